"""What a report says about the arms of a run: shares, earnings and rescued prompts, by hand."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from threepo.evaluation.tables import cells
from threepo.lab.arms_view import ARM_SHARE, OTHERS, SHOWN, arm_tables, leading_arms, rescuers
from threepo.lab.curves import noise, share_panel
from threepo.lab.report import RunReport

RIGHT = {"correct": True, "reward": 1.0, "status": "right"}
WRONG = {"correct": False, "reward": 0.0, "status": "wrong"}


def test_the_summary_says_which_arm_led_from_when_on() -> None:
    shares = [{"mean": 0.5, "mlp 1": 0.5}, {"mean": 0.25, "mlp 1": 0.5, "all 1": 0.25}, {"mlp 1": 0.75, "mean": 0.25}]
    shares += [{"mlp 1": 0.75}, {"mean": 0.75}, {"mlp 1": 0.75}, {"mlp 1": 0.75}, {"mean": 0.75}, {"mean": 1.0}]
    steps = [{f"arms/share/{a}": s for a, s in row.items()} | {"step": i} for i, row in enumerate(shares)]
    late = "the mean weights, without noise, led from step 7"
    assert leading_arms(steps) == f"mlp 1 led from step 2; {late}"
    assert (
        leading_arms([*steps[2:4], *steps[:2], *steps[7:]]) == f"mlp 1 led from step 2; no arm led from step 0; {late}"
    )
    assert leading_arms(steps[2:3]) == "mlp 1 led from step 2"
    assert leading_arms(steps[:2]) == "no arm led"


def test_the_unit_of_arms_is_not_shown_as_the_size_of_the_noise() -> None:
    step = {"step": 0, "posterior/sigma_to_rms": 1.0}
    plain, arms = (
        RunReport(Path(name), name, {}, [step | more]) for name, more in (("a", {}), ("b", {"arms/share/mean": 1.0}))
    )
    [shown] = [panel.curves for panel in noise([plain, arms]) if panel.name == "sigma"]
    assert {curve.name for curve in shown} == {"a"}


def test_areas_lie_upon_each_other_and_fill_the_panel() -> None:
    arms = {f"norm {i}": i / 55 * 0.75 for i in range(1, 11)}
    row = {f"{ARM_SHARE}mean": 0.25} | {ARM_SHARE + arm: share for arm, share in arms.items()}
    steps = [{"step": step, **row} for step in (0, 1)]
    curves = share_panel("arms", "", steps).curves
    assert [curve.name for curve in curves] == ["mean", *(f"norm {i}" for i in range(10, 10 - SHOWN, -1)), OTHERS]
    for below, above in pairwise(curves):
        assert list(below.high) == list(above.low)
    assert list(curves[0].low) == [0, 0]
    assert curves[0].high[0] == 0.25
    np.testing.assert_allclose(curves[1].high, 0.25 + arms["norm 10"])
    np.testing.assert_allclose(curves[-1].high, 1)
    assert not share_panel("arms", "", [{"step": 0, "reward/mean": 1.0}]).curves
    without_mean = share_panel("arms", "", [{"step": 0} | {f"{ARM_SHARE}norm {i}": 1 / 8 for i in range(8)}]).curves
    assert (len(without_mean), without_mean[-1].name, without_mean[-1].high) == (SHOWN + 1, OTHERS, [1.0])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(None, False), ("norm 1", True), ("norm 1", True), ("mlp 1", False), ("all 1", True)], ["norm 1", "all 1"]),
        ([(None, False), (None, True), ("norm 1", True)], []),
        ([("norm 1", True), ("mlp 1", False)], []),  # the mean was not asked
        ([(None, False), ("norm 1", False)], []),
    ],
)
def test_an_arm_rescues_a_prompt_that_the_mean_did_not_answer(
    rows: list[tuple[str | None, bool]], expected: list[str]
) -> None:
    assert rescuers([{"draw_arm": arm, "correct": right} for arm, right in rows]) == expected


def test_tables_of_a_run_by_hand(tmp_path: Path) -> None:
    unjudged = WRONG | {"status": "error"}
    steps = [
        [(None, "c", unjudged), ("all 1", "c", unjudged), ("all 1", "c", unjudged)],
        [(None, "a", WRONG), ("norm 1", "a", RIGHT), (None, "b", RIGHT), ("norm 1", "b", RIGHT)],
        [(None, "a", WRONG), ("mlp 0.2", "a", WRONG), (None, "b", WRONG), ("mlp 0.2", "b", RIGHT)],
    ]
    (tmp_path / "completions").mkdir()
    for step, found in enumerate(steps):
        rows = [{"step": step, "problem_id": problem, "draw_arm": arm, **verdict} for arm, problem, verdict in found]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"completions/step-{step}.parquet")
    earned, first = map(cells, arm_tables(tmp_path))
    assert earned["columns"] == ["arm", "completions", "share %", "mean reward", "groups rescued"]
    assert earned["rows"] == [
        ("mean", "5", "45.5", "0.250", "0"),
        ("all 1", "2", "18.2", "-", "0"),
        ("norm 1", "2", "18.2", "1.000", "1"),
        ("mlp 0.2", "2", "18.2", "0.500", "1"),
    ]
    assert first["rows"] == [("1", "a", "norm 1"), ("2", "b", "mlp 0.2")]


def test_a_run_without_arms_has_no_tables(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    rows = [{"step": 0, "problem_id": "a", "draw_arm": None, **verdict} for verdict in (RIGHT, WRONG)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "completions/step-0.parquet")
    assert arm_tables(tmp_path) == []
