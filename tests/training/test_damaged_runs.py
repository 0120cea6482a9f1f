"""Damaged, deleted and replaced run folders: a clear error or a correct resume, and never a traceback."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from runs import RLVR, train_config
from threepo import api
from threepo.cli import main
from threepo.config import TrainConfig
from threepo.config.records import build
from threepo.errors import UserError
from threepo.run_folder import RunFolder, checkpoints

REFERENCE = ("objective.reference_kl=0.1", "objective.reference_reset_every=1")
SHORT = ("data.prompts_per_step=2", "sampling.max_new_tokens=2", "eval.problems=1", "eval.samples=1")
RUNS = {
    "train": (*RLVR, *SHORT, "method.preset=b3po", "eval.every=1", "optimizer.clip_radius=inf", *REFERENCE),
    "sft": ("model.lora.rank=2", "run.threads=1", "conversations.batch_size=2"),
}
"""Settings of a run by the command that makes it; together they write every file that a run can have."""
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "NUL": lambda content: b"\0" * len(content),
}
"""What kills, full disks and power cuts leave."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of two steps of each kind, and the same runs extended to three."""
    home = tmp_path_factory.mktemp("runs")
    rows = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": str(i)}] for i in range(6)]
    (home / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    (home / "template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    )
    for command, settings in RUNS.items():
        here = [f"run.folder={home / command}", "run.steps=2", "run.keep_checkpoints=1"]
        if command == "sft":
            here += [f"model.path={home / 'train'}", f"conversations.source={home / 'chats.jsonl'}"]
            here += [f"conversations.chat_template={home / 'template.jinja'}"]
        assert main([command, *settings, *here]) == 0
        (home / command / "trackers.json").write_text('{"wandb": "id"}')
        shutil.copytree(home / command, home / f"{command}-whole")
        assert main([command, "--resume", str(home / f"{command}-whole"), "run.steps=3"]) == 0
    return home


def files(run: Path) -> list[Path]:
    """All files of a run, relative to its folder."""
    return sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file())


def tensors(run: Path) -> dict[str, Any]:
    """All that a run's last checkpoint holds in tensors."""
    step, last = checkpoints(run)[-1]
    assert step == 3
    return {
        f"{file.name}/{name}": tensor.tolist()
        for file in last.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.filterwarnings("ignore::threepo.errors.ThreepoWarning")
@pytest.mark.parametrize("command", RUNS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_or_does_not_matter(
    command: str, damage: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tensors(home / f"{command}-whole")
    found = files(home / command)
    assert len(found) > 10
    for file in found:
        if file.suffix in (".parquet", ".lock") and damage != "NUL":  # one damage shows that nothing reads them again
            continue
        run = tmp_path / command  # whose name says nothing of the file
        shutil.copytree(home / command, run)
        (run / file).write_bytes(DAMAGES[damage]((run / file).read_bytes()))
        status = main([command, "--resume", str(run), "run.steps=3"])
        said = capsys.readouterr().err
        if status == 0:
            assert tensors(run) == whole, file
        else:
            assert status == 2, file
            assert file.name in said, (file, said)
        shutil.rmtree(run)


def test_a_row_without_its_step_is_named_with_its_line(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(home / "train", tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    for garbage in ('{"reward/mean": 1.0}', "garbage"):
        file.write_text("\n".join([lines[0], garbage, *lines[1:]]) + "\n")
        assert main(["train", "--resume", str(tmp_path / "run"), "run.steps=3"]) == 2
        assert "metrics.jsonl, line 2: " in capsys.readouterr().err


def test_what_lies_beside_the_checkpoints_is_none(tmp_path: Path) -> None:
    for name in ("step-000001", "step-000002", "step-000002.bak", "step-000003.old"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [(step, path.name) for step, path in checkpoints(tmp_path)] == [(1, "step-000001"), (2, "step-000002")]


def deleted(run: Path) -> None:
    shutil.rmtree(run)


def moved(run: Path) -> None:
    run.rename(run.with_name("moved"))


def replaced(run: Path) -> None:
    shutil.rmtree(run)
    RunFolder.create(run, train_config(run)).close()
    (run / "checkpoints" / "step-000001").mkdir(parents=True)


@pytest.mark.parametrize("lose", [deleted, moved, replaced])
def test_a_run_whose_folder_is_gone_ends_and_writes_nothing_there(
    lose: Callable[[Path], None], home: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = build(TrainConfig, json.loads((home / "train" / "config.json").read_text()))
    config = replace(config, run=replace(config.run, folder=str(run), steps=3))
    with pytest.raises(UserError, match="was deleted, moved or replaced while it was in use"):
        api.train(config, callbacks=[lambda row: lose(run) if row["step"] == 0 and "reward/mean" in row else None])
    here = {"deleted": set(), "moved": {"moved"}, "replaced": {"run"}}[lose.__name__]
    assert {path.name for path in tmp_path.iterdir()} == here
    if lose is replaced:
        assert files(run) == [Path("config.json"), Path("run.lock")]
        assert [step for step, _ in checkpoints(run)] == [1]
