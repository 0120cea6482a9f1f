"""RLVR from end to end with the real verifiers: mathematics from a published file, programs in the sandbox.

A tiny model is first taught to answer, half of the time rightly, so that there is something to reinforce.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from rewards.contained import why_not
from threepo import api
from threepo.config import SFTConfig, TrainConfig
from threepo.config.recipes import load
from threepo.run_folder import read_metrics

SHAPE = [
    f"model.tiny.{name}" for name in ("hidden_size=48", "intermediate_size=96", "layers=1", "heads=2", "kv_heads=1")
]
DIGITS = "37"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|endoftext|>"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
PROGRAM = "```python\nprint({})\n```"
STEPS = 2
REASON = why_not()


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers `digit?` and `program?` with one of two digits."""
    folder = tmp_path_factory.mktemp("warm")
    rows = [{"prompt": "digit?", "completion": rf"\boxed{{{digit}}}"} for digit in DIGITS]
    rows += [{"prompt": "program?", "completion": PROGRAM.format(digit)} for digit in DIGITS]
    source = write(folder / "rows.jsonl", rows)
    (folder / "chat.jinja").write_text(TEMPLATE)
    settings = ["model.path=tiny-qwen2", *SHAPE, f"run.folder={folder / 'run'}", "run.steps=70", "run.threads=1"]
    settings += [f"conversations.source={source}", "conversations.batch_size=4", f"conversations.cache={folder}"]
    settings += [f"conversations.chat_template={folder / 'chat.jinja'}"]
    settings += ["optimizer.kind=adamw", "optimizer.lr=1e-2", "optimizer.weight_decay=0"]
    return api.train(load(SFTConfig, "", settings))


def trained(warm_start: Path, folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Every completion of a few steps of C3PO."""
    shared = [f"model.path={warm_start}", f"run.folder={folder}", f"run.steps={STEPS}", "run.threads=1"]
    shared += ["method.preset=c3po", "method.draws=2", "method.rollouts_per_prompt=16", "optimizer.lr=30"]
    shared += ["data.prompts_per_step=1", "sampling.max_new_tokens=32", "data.prompt_template={prompt}"]
    run = api.train(load(TrainConfig, "", [*shared, *settings]))
    metrics = read_metrics(run)
    assert [row["step"] for row in metrics] == list(range(STEPS))
    assert all(0 < row["reward/mean"] < 1 for row in metrics), "some are right and some are wrong"
    assert sum(row["optimizer/skipped_steps"] for row in metrics) == 0
    tables = [pyarrow.parquet.read_table(path) for path in sorted((run / "completions").glob("*.parquet"))]
    return [row for table in tables for row in table.to_pylist()]


def test_mathematics(warm_start: Path, tmp_path: Path) -> None:
    before = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    )
    after = '\n\nRemember to put your answer on its own line after "Answer:".'
    row = {
        "data_source": "math_dapo",
        "prompt": [{"content": f"{before}digit?{after}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "7", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "a"},
    }
    source = write(tmp_path / "dapo.jsonl", [row, row])
    completions = trained(warm_start, tmp_path / "run", f"data.train=dapo-math-17k:{source}")
    assert len(completions) == STEPS * 16
    for row in completions:
        assert (row["status"] == "right") == (row["completion"] == r"\boxed{7}")
        assert row["parsed_answer"] == {r"\boxed{7}": "7", r"\boxed{3}": "3"}.get(
            row["completion"], row["parsed_answer"]
        )


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_code(warm_start: Path, tmp_path: Path) -> None:
    row = {"prompt": "program?", "tests": {"inputs": ["", ""], "outputs": ["7\n", "7"]}}
    source = write(tmp_path / "code.jsonl", [row])
    completions = trained(
        warm_start, tmp_path / "run", f"data.train={source}", "reward.function=code", "reward.sandbox.timeout_s=20"
    )
    statuses = {row["completion"]: (row["status"], row["detail"]) for row in completions}
    assert statuses[PROGRAM.format(7)][0] == "right"
    assert statuses[PROGRAM.format(3)][0] == "wrong"
