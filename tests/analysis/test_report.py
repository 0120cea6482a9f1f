"""Reports come from run folders alone."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from threepo.analysis.report import plot, read_run, table
from threepo.errors import UserError


def write_run(path: Path, rows: list[dict]) -> Path:
    path.mkdir()
    config = {"data": {"prompts_per_step": 4}, "method": {"rollouts_per_prompt": 8}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def step(number: int, **fields: float) -> dict:
    return {
        "step": number,
        "reward/mean": 0.1 * number,
        "groups/zero_advantage_share": 0.2 * number,
        "policy/entropy": 1.0,
        "time/step": 1.0 + number,
        **fields,
    }


def evaluated(value: float) -> dict[str, float]:
    return {"eval/pass_at_1": value, "eval/se_between": 0.02}


def test_a_summary_by_hand(tmp_path: Path) -> None:
    rows = [{"step": -1, **evaluated(0.25)}, step(0), step(1), step(2, **evaluated(0.75))]
    summary = read_run(write_run(tmp_path / "a", rows)).summary()
    assert summary == {
        "pass_at_1_before": 0.25,
        "se_before": 0.02,
        "pass_at_1_after": 0.75,
        "se_after": 0.02,
        "reward_first": 0.0,
        "reward_last": 0.2,
        "zero_advantage_share": pytest.approx(0.2),
        "seconds_per_step": 2.0,
        "rollouts": 4 * 8 * 3,
        "steps": 3,
    }


def test_what_was_not_measured_is_said_to_be_missing(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [step(0)]))
    assert run.summary()["pass_at_1_before"] is None
    only_before = read_run(write_run(tmp_path / "b", [{"step": -1, **evaluated(0.25)}, step(0)]))
    assert only_before.summary()["pass_at_1_after"] is None
    empty = read_run(write_run(tmp_path / "c", []))
    console = Console(record=True, width=120)
    console.print(table({r.name: r.summary() for r in (run, only_before, empty)}))
    text = console.export_text()
    assert "25.0 % ± 2.0" in text
    assert text.count(" - ") >= 5


def test_without_any_evaluation_the_table_shows_rewards(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [step(1), step(5)]))
    console = Console(record=True, width=120)
    console.print(table({"a": run.summary()}))
    text = console.export_text()
    assert "reward last" in text
    assert " 0.1 " in text
    assert " 0.5 " in text
    assert "pass@1" not in text


def test_curves_are_drawn(tmp_path: Path) -> None:
    rows = [{"step": -1, **evaluated(0.25)}, step(0), step(1), step(2, **evaluated(0.75))]
    runs = [read_run(write_run(tmp_path / name, rows)) for name in ("a", "b")]
    plot(runs, tmp_path / "curves.png")
    data = (tmp_path / "curves.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000
    plot([read_run(write_run(tmp_path / "empty", []))], tmp_path / "empty.png")


def test_folders_without_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is no run of `threepo train`"):
        read_run(tmp_path)
