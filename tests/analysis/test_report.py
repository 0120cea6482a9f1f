"""Reports come from run folders alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from threepo.analysis.report import plot, read_run, tables
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
    console.print(*tables({r.name: r for r in (run, only_before, empty)}))
    text = console.export_text()
    assert "25.0 % ± 2.0" in text
    assert text.count(" - ") >= 5


def test_without_any_evaluation_the_table_shows_rewards(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [step(1), step(5)]))
    console = Console(record=True, width=120)
    console.print(*tables({"a": run}))
    text = console.export_text()
    assert "reward last" in text
    assert " 0.1 " in text
    assert " 0.5 " in text
    assert "pass@1" not in text


def written_fine_tuning(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"run": {"steps": 2}}))
    rows = [{"step": i, "sft/loss": 2.0 - i, "time/step": 0.5} for i in range(2)]
    rows[1]["sft/eval_loss"] = 1.5
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_runs_of_fine_tuning_have_a_table_of_their_own(tmp_path: Path) -> None:
    tuned = read_run(written_fine_tuning(tmp_path / "sft"))
    learnt = read_run(write_run(tmp_path / "rl", [step(1)]))
    console = Console(record=True, width=120)
    for table in tables({"sft": tuned, "rl": learnt}):
        console.print(table)
    text = console.export_text()
    assert "loss first" in text
    assert "reward first" in text
    assert tuned.summary() == {
        "loss_first": 2.0,
        "loss_last": 1.0,
        "eval_loss": 1.5,
        "seconds_per_step": 0.5,
        "steps": 2,
    }


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is drawn from now on."""
    import matplotlib.pyplot as plt

    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    return figures


def test_every_curve_is_inside_its_panel_and_no_panel_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = drawn(monkeypatch)
    rewards = [14.0, -0.9, 3.0]
    rows = [step(i, **{"reward/mean": reward}) for i, reward in enumerate(rewards)]
    rows[2] |= evaluated(0.75)
    plot([read_run(write_run(tmp_path / name, rows)) for name in ("a", "b")], tmp_path / "curves.png")
    panels = {axis.get_title(): axis for axis in figures[0].axes if axis.get_visible()}
    assert len(panels) == 4
    low, high = panels["Reward (training rollouts)"].get_ylim()
    assert low < -0.9
    assert high > 14
    assert panels["Share of prompts without any advantage"].get_ylim() == (-0.02, 1.02)
    assert all(axis.lines or axis.containers for axis in panels.values())
    plot([read_run(written_fine_tuning(tmp_path / "sft"))], tmp_path / "sft.png")
    assert [axis.get_title() for axis in figures[1].axes if axis.get_visible()] == [
        "Cross-entropy of the targets (nats)",
        "Held-out cross-entropy (nats)",
    ]


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_the_suffix_says_how_curves_are_drawn(suffix: str, begins: bytes, tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [step(0), step(1)]))
    plot([run], tmp_path / f"curves{suffix}")
    assert (tmp_path / f"curves{suffix}").read_bytes().startswith(begins)
    with pytest.raises(UserError, match="--output .*curves.jpg: the suffix says how to draw; end it in .png"):
        plot([run], tmp_path / "curves.jpg")
    with pytest.raises(UserError, match="nothing to draw"):
        plot([read_run(write_run(tmp_path / "empty", []))], tmp_path / "empty.png")


def test_folders_without_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        read_run(tmp_path)
