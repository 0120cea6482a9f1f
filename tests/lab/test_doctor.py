"""`threepo doctor` tells what works here and what does not: the real checks, and things that are really missing."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from programs import run_program
from rewards.contained import why_not
from runs import train_config
from threepo import api
from threepo.cli import main
from threepo.lab import doctor
from threepo.posterior import native
from training.conftest import LOWER_HALF

REASON = why_not()


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, wide enough that no line is broken."""
    wide = os.environ | {"COLUMNS": "200"} | environment
    command = [sys.executable, "-m", "threepo", "doctor"]
    return subprocess.run(command, capture_output=True, text=True, env=wide, check=False)


def line(output: str, part: str) -> str:
    """The words after the name of a part."""
    return next(line for line in output.splitlines() if line.startswith(part)).removeprefix(part).strip()


def test_every_part_is_tried_and_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    for name in doctor.CHECKS:
        state = line(output, name).split()[0]
        assert state == "works" or name not in doctor.NEEDED or state == "slow", output
    assert "torch" in line(output, "packages")
    assert "cores" in line(output, "devices")
    assert line(output, "kernels").startswith("works" if native.LIBRARY.loaded else "slow")
    assert line(output, "grader: code, sandbox").startswith("absent" if REASON else "works")
    told = [one.split() for one in output.splitlines()[1:]]
    states = [next(word for word in words if word in doctor.STYLES) for words in told]
    assert states == sorted(states, key=list(doctor.STYLES).index), "what works comes before what is absent"
    assert "trainer" in line(output, "extras")
    assert len([words for words in told if words[0] == "extras"]) <= 2


def test_without_bubblewrap_the_sandbox_is_absent_and_the_rest_works(tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to(shutil.which("sh") or "sh")
    program = "import sys; from threepo.cli import main; sys.exit(main(['doctor']))"
    ended = run_program(program, tmp_path, PATH=str(tmp_path), COLUMNS="200")
    assert ended.returncode == 0, ended.stderr
    assert line(ended.stdout, "grader: code, sandbox").startswith("absent")
    assert "install it (apt-get install bubblewrap)" in ended.stdout
    assert line(ended.stdout, "grader: mathematics").startswith("works")


def test_an_installation_that_does_not_work_is_said_in_one_line_with_status_2(tmp_path: Path) -> None:
    """A torch that cannot be imported, found before the real one."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')\n")
    ended = run(PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    assert ended.returncode == 2
    assert line(ended.stdout, "packages").startswith("broken  ImportError: libtorch.so: cannot open")
    assert ended.stdout.splitlines()[1].startswith("packages"), "what is broken comes first"
    assert line(ended.stdout, "extras").startswith("works")
    (said,) = ended.stderr.splitlines()
    assert said.startswith("threepo: doctor: training needs what does not work here: packages, devices")


@pytest.fixture
def learnable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("first_character.py").write_text(LOWER_HALF)
    return ["model.tiny.tied=false"]


def test_a_bundle_has_versions_and_metrics_and_no_data(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "bundle.json"
    api.train(train_config(run, "run.steps=1", "method.preset=c3po", "optimizer.ess=1e8"))
    assert main(["doctor", "--bundle", str(file), "--run", str(run)]) == 0
    found = json.loads(file.read_text())
    assert {row["part"] for row in found["findings"]} >= set(doctor.CHECKS)
    assert found["packages"]["torch"]
    assert [row["step"] for row in found["run"]["metrics"]] == [0]
    assert found["run"]["settings"]["method"]["name"] == "c3po"
    assert found["run"]["settings"]["optimizer"]["ess"] == 1e8
    assert found["run"]["settings"]["engine"] == {"kind": "local", "dtype": "float32"}
    assert str(tmp_path) not in file.read_text()
    assert "sorting" not in file.read_text()


def test_a_bundle_names_no_function_and_no_path(
    learnable: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("secret.py").write_text(Path("first_character.py").read_text())
    two = "reward.function=['secret:reward', 'first_character:reward']"
    api.train(train_config(tmp_path / "run", *learnable, "run.steps=1", two))
    rows = [("packages", "broken", "ImportError: /home/alice/acme/libcudart.so: cannot open")]
    found = json.dumps(doctor.bundle(rows, doctor.without_data(tmp_path / "run")))  # type: ignore[arg-type]
    assert "reward/mean" in found
    assert not any(word in found for word in ("secret", "first_character", "alice", str(tmp_path)))
    row = {"step": 0, "reward/format_ok_share": 1.0, "reward/patient_seven_share": 0.5, "environment/secret": 1.0}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(row) + "\n")  # a grader of one's own gave a reason
    (kept,) = doctor.without_data(tmp_path / "run")["metrics"]
    assert kept.keys() == {"step", "reward/format_ok_share"}


def test_a_run_without_a_bundle_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--run", "runs/mine"]) == 2
    assert "name its file with --bundle FILE" in capsys.readouterr().err


def test_kernels_with_other_bits_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: here the kernels get a noise that is not the address's."""
    from threepo.posterior import kernels
    from threepo.posterior.noise_structures import Noise

    whole = kernels.run
    monkeypatch.setattr(kernels, "run", lambda some: whole([replace(one, noise=Noise((1, 2))) for one in some]))
    state, found = doctor.noise()
    assert state == "broken"
    assert "other bits than torch's" in found


def test_an_extra_that_is_missing_is_installed_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["nowhere-to-be-found>=1; extra == 'wandb'", "nowhere>=1; extra == 'vllm'", "numpy>=900; extra == 'trl'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["torch>=2.7", "numpy>=900", *wanted])
    old, works, absent = doctor.extras()
    assert old[:2] == ("extra: trl", "broken")
    assert old[2].endswith("is not >=900: pip install '.[trl]' in a clone")
    assert works[:2] == ("extras", "works")
    assert {"mlflow", "lora"} <= set(works[2].split(", "))
    fix = "pip install '.[NAME]' in a clone; vllm without a GPU: requirements-NAME.txt"
    assert absent == ("extras", "absent", f"vllm, wandb: {fix}")
    state, found = doctor.packages()
    assert state == "broken"
    assert "is not >=900; install threepo again" in found
