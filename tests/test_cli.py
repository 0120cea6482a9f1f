"""The commands as a user types them: each in a process of its own where the exit status matters."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyarrow.parquet import read_table

from runs import RLVR, SFT, forked, outcome, train_config
from threepo import api
from threepo.cli import main
from threepo.config import ModelConfig
from threepo.models.policy import load_policy
from threepo.posterior.gaussian import Posterior
from threepo.run_folder import checkpoints, read_metrics

COMMANDS = (
    "train",
    "sft",
    "eval",
    "probe",
    "report",
    "explore",
    "study",
    "sample",
    "certify",
    "data",
    "demo",
    "doctor",
)


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "threepo", *arguments], capture_output=True, text=True, cwd=cwd, check=False
    )


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n    {command} " in text for command in COMMANDS)
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("threepo 0.")


def test_standard_streams_may_be_closed_and_a_full_one_is_one_line(tmp_path: Path) -> None:
    """As a program does that goes into the background, or as a scheduler leaves them."""
    for said, status in (("<&- >&- 2>&-", 0), ("> /dev/full", 2)):
        command = f"{sys.executable} -m threepo data list {said}"
        result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert (result.returncode, "Traceback" in result.stderr) == (status, False), result.stderr
    assert result.stderr.startswith("threepo: cannot write standard output or a temporary file: No space left")


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = [sys.executable, "-u", "-m", "threepo", "data", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait() == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "name a recipe"),
        (["train", "no/such.toml"], "no such file and no shipped recipe"),
        (["train", "demo/c3po", "method.drwas=2"], "did you mean method.draws?"),
        (["train", "demo/c3po", "method.draws=3"], "must divide"),
        (["train", "demo/c3po", "model.path=/nowhere"], "holds no config.json"),
        (["train", "--resume", "nowhere"], "holds no run"),
        (["train", "demo/c3po", "--resume", "nowhere"], "leave out the recipe"),
        (["train", "--resume", "nowhere", "run.seed=1"], "all but run.steps and what depends on the machine"),
        (
            ["train", "--resume", "nowhere", "run.seed=1"],
            "start a new run from its checkpoint, with model.path=nowhere",
        ),
        (["train", "model.path=tiny-qwen2", "data.train=sorting"], "run.folder"),
        (["train", "demo/warm_start"], "is a warm start; `threepo sft` takes it"),
        (["sft", "demo/c3po"], "is reinforcement learning; `threepo train` takes it"),
        (["eval", "/nowhere", "data.train=sorting"], "holds no config.json"),
        (["eval", "tiny-qwen2"], "data.eval is missing"),
        (["eval"], "name a MODEL"),
        (["eval", "tiny-qwen2", "benchmarks.problems=2"], "benchmarks.names is missing"),
        (["eval", "tiny-qwen2", "--benchmarks", "aim24"], "did you mean aime24?"),
        (["eval", "tiny-qwen2", "--benchmarks", "aime24,aime24=x.jsonl"], "names aime24 twice"),
        (
            ["eval", "tiny-qwen2", "--benchmarks", "aime24=x.txt"],
            "after the =, name a .jsonl",
        ),
        (["eval", "tiny-qwen2", "--benchmarks", "aime24=x.jsonl"], "x.jsonl: no such file"),
        (["eval", "tiny-qwen2", "--benchmarks", "aime24", "data.train=sorting"], "data.train: is not read"),
        (["eval", "tiny-qwen2", "--benchmarks", "aime24", "eval.problems=4"], "eval.problems: is not read"),
        (["eval", "tiny-qwen2", "--benchmarks", "aime24", "benchmarks.math_prompt=x"], "must contain {prompt}"),
        (["eval", "--compare", "a", "b"], "--compare a: holds no evaluation"),
        (["eval", "m", "--compare", "a", "b"], "no other option but --output"),
        (["eval", "tiny-qwen2", "data.train=sorting", "eval.draws=2"], "holds no posterior"),
        (["eval", "tiny-qwen2", "--recipe", "demo/c3po", "eval.samples=no"], "eval.samples = 'no'"),
        (["train", "demo/c3po", "--resume", "nowhere", "run.steps=1"], "leave out the recipe"),
        (["train", "demo/c3po", "model.path=tiny-qwen"], "did you mean tiny-qwen2?"),
        (["report", "nowhere"], "holds no run"),
        (["sample", "nowhere", "--output", "out"], "holds no posterior"),
        (["sample", "nowhere", "--output", "out", "--draws", "0"], "at least 1 draw"),
        (["certify", "http://127.0.0.1:80a", "--model", "m"], "does not answer /v1/models (nonnumeric port: '80a')"),
        (["certify", "http://127.0.0.1:9", "--model", "m"], "http://127.0.0.1:9: does not answer /v1/models ("),
        (["certify", "nowhere", "--model", "m"], "nowhere: is no address of a server; write http://nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.startswith("threepo: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == [], "nothing half written"


def test_the_name_of_a_recipe_may_have_an_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1.toml").write_text("no table")
    assert main(["train", "./lr=1.toml"]) == 2
    assert "lr=1.toml: not valid TOML" in capsys.readouterr().err
    assert main(["train", f"data.prompt_template={'x' * 300}"]) == 2
    assert "model.path is missing" in capsys.readouterr().err, "a setting is no path, however long"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sample", "run", "--output", ""], "argument --output: is empty"),
        (["eval", "tiny-qwen2", "--output", ""], "argument --output: is empty"),
        (["report", "run", "--outptu", "x"], "unrecognized arguments: --outptu"),
        (["demo", "more"], "unrecognized arguments: more"),
    ],
)
def test_words_that_are_no_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_arguments_may_stand_in_any_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [api.train(train_config(tmp_path / name, "run.steps=1")) for name in ("one", "two")]
    picture = tmp_path / "curves.png"
    assert main(["report", str(runs[0]), "--output", str(picture), str(runs[1])]) == 0
    assert "reward last" in capsys.readouterr().out
    assert picture.is_file()


def test_a_run_is_resumed_by_the_command_that_made_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *RLVR, f"run.folder={tmp_path / 'run'}", "run.steps=2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"finished: {tmp_path / 'run'}: 2 steps in ")
    assert main(out.splitlines()[-1].removeprefix("next: threepo ").split()) == 0
    assert capsys.readouterr().out.endswith(f"page: {(tmp_path / 'run' / 'report' / 'index.html').as_uri()}\n")
    assert main(["sft", "--resume", str(tmp_path / "run")]) == 2
    assert "is a run of `threepo train`" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "run")]) == 2
    assert "continue the run with --resume" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0


def test_a_run_shows_rollouts_that_it_was_asked_for_and_ends_with_its_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["run.steps=3", "run.show_every=2", "eval.every=2", "method.preset=c3po", "optimizer.ess=1e6"]
    assert main(["train", *RLVR, f"run.folder={tmp_path / 'run'}", *settings]) == 0
    out, said = capsys.readouterr()
    rows = {row["step"]: row for row in read_metrics(tmp_path / "run")}
    before, after = (f"{100 * rows[step]['eval/pass_at_1']:.1f} % ± " for step in (-1, 2))
    scores = out.splitlines()[1]
    assert scores.startswith(f"held-out pass@1: {before}{100 * rows[-1]['eval/se_between']:.1f} -> {after}")
    assert scores.endswith("(standard errors over problems; temperature 0.6)")
    first = read_table(tmp_path / "run" / "completions" / "step-000001.parquet").to_pylist()[0]
    verdict = f"reward {first['reward']:g}, {first['status']}, {first['num_tokens']} tokens"
    assert f"--- its completion: {verdict}\n{first['completion']}\n---" in said
    assert said.count("--- step 2: a prompt") == said.count(": a prompt") == 1
    line = said.splitlines()[-1]
    for name, metric in (("held-out", "eval/pass_at_1"), ("update", "update/rms"), ("noise", "posterior/sigma_to_rms")):
        assert f"{name} {rows[2][metric]:.3g}  " in line
    assert "kept" in line


def test_a_run_is_extended_when_it_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a constant learning rate and no warm-up, it ends like a run of that length."""
    settings = [*RLVR, "schedule.warmup_share=0", "run.checkpoint_every=0"]
    assert main(["train", *settings, f"run.folder={tmp_path / 'whole'}", "run.steps=4"]) == 0
    parts = tmp_path / "parts"
    assert main(["train", *settings, f"run.folder={parts}", "run.steps=2"]) == 0
    assert main(["train", "--resume", str(parts), "run.steps=1"]) == 2
    assert "run.steps = 1: the run has done 2 steps; set 2 or more" in capsys.readouterr().err
    elsewhere = ("batching.tokens=4096", "engine.memory_gib=1")  # the same as without them here
    assert main(["train", "--resume", str(parts), "run.steps=4", *elsewhere]) == 0
    assert "4 steps" in capsys.readouterr().out
    assert json.loads((parts / "config.json").read_text())["run"]["steps"] == 4
    whole, extended = outcome(tmp_path / "whole"), outcome(parts)
    assert {key: extended[key] for key in whole} == whole


def test_a_file_size_limit_is_one_line(tmp_path: Path) -> None:
    """The limit is hit in a checkpoint."""
    said, run = tmp_path / "said", f"run.folder={tmp_path / 'run'}"
    process = forked("train", *RLVR, "run.steps=1", run, said=str(said), most_bytes=65536)
    process.join()
    assert process.exitcode == 2, said.read_text()
    assert "File too large; free some space" in said.read_text().splitlines()[-1]
    assert "Traceback" not in said.read_text()


def test_the_same_from_a_process(tmp_path: Path) -> None:
    result = run("train", "demo/c3po", "run.steps=no", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "threepo: run.steps = 'no': must be a valid integer\n"


@pytest.mark.filterwarnings("ignore:.*earned the same reward:threepo.errors.ThreepoWarning")
def test_a_stopped_run_saves_says_how_to_go_on_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["run.steps=30", "run.checkpoint_every=0"]
    folder, said = tmp_path / "run", tmp_path / "said"
    process = forked("train", *RLVR, *settings, f"run.folder={folder}", said=str(said))
    while len(read_metrics(folder)) < 2 and process.is_alive():
        time.sleep(0.01)
    process.terminate()
    process.join(60)
    error = said.read_text()
    assert process.exitcode == 128 + signal.SIGTERM
    assert f"continue with --resume {folder}" in error
    assert "Traceback" not in error
    done = checkpoints(folder)[-1][0]
    assert 2 <= done < 30
    assert main(["train", "--resume", str(folder)]) == 0
    api.train(train_config(tmp_path / "whole", *settings))
    assert outcome(folder)["tensors"] == outcome(tmp_path / "whole")["tensors"]
    capsys.readouterr()
    assert main(["train", "--resume", str(folder)]) == 0, "resuming a finished run has nothing to do, and says so"
    said = capsys.readouterr().err
    assert f"this run has done all its 30 steps; --resume {folder} run.steps=N extends it" in said


def test_a_run_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    api.train(train_config(folder, "run.steps=1"))
    from threepo.run_folder import RunFolder

    with RunFolder(folder):
        assert main(["train", "--resume", str(folder)]) == 2
    assert "is in use by another process" in capsys.readouterr().err


def test_sft_train_eval_report_and_sample_in_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sft, rl = tmp_path / "sft", tmp_path / "rl"
    assert main(["sft", *SFT, f"run.folder={sft}", "run.steps=2"]) == 0
    settings = [s for s in RLVR if not s.startswith("model.")]
    assert (
        main(
            [
                "train",
                f"model.path={sft}",
                *settings,
                f"run.folder={rl}",
                "run.steps=2",
                "method.preset=c3po",
                f"optimizer.load_hessian={sft}",
                "eval.every=2",
            ]
        )
        == 0
    )
    assert json.loads((rl / "summary.json").read_text())["steps"] == 2
    assert main(["eval", str(rl), "eval.samples=4", "--output", str(tmp_path / "eval")]) == 0
    assert "pass@k" in capsys.readouterr().out
    assert main(["report", str(rl), "--output", str(tmp_path / "report.png")]) == 0
    assert "pass@1 after" in capsys.readouterr().out
    assert (tmp_path / "report.png").is_file()
    assert main(["sample", str(rl), "--draws", "2", "--first", "1", "--output", str(tmp_path / "draws")]) == 0
    posterior = Posterior.from_pretrained(checkpoints(rl)[-1][1])
    mean = load_policy(ModelConfig(path=str(rl))).model
    for index in (1, 2):
        written = load_policy(ModelConfig(path=str(tmp_path / "draws" / f"draw-{index}"))).model
        drawn = load_policy(ModelConfig(path=str(rl))).model
        posterior.perturb_(drawn.named_parameters(), posterior.address(index))
        for (_, a), (_, b), (_, m) in zip(*(x.named_parameters() for x in (written, drawn, mean)), strict=True):
            assert a.equal(b)
            assert not a.equal(m)
    assert main(["sample", str(rl), "--first", "1", "--output", str(tmp_path / "draws")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_warnings_about_a_run_are_one_line() -> None:
    program = (
        "import warnings; from threepo.cli import main; from threepo.errors import ThreepoWarning; "
        "main(['data', 'list']); warnings.warn('look', ThreepoWarning); warnings.warn('not ours')"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    assert said.startswith("threepo: warning: look\n<string>:1: UserWarning: not ours")
