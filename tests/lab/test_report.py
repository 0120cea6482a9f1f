"""Reports come from run folders alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from threepo.cli import main
from threepo.errors import UserError
from threepo.evaluation.tables import cells
from threepo.lab.curves import cost, learning, noise, plot
from threepo.lab.figures import Curve, Panel, colours, draw_panel, with_data
from threepo.lab.report import RunReport, by_method, differing_settings, findings, read_run, read_runs, tables


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


def test_rollouts_count_what_was_discarded(tmp_path: Path) -> None:
    rows = [step(0, **{"groups/generated": 12}), step(1, **{"overlap/dropped": 1})]
    assert read_run(write_run(tmp_path / "a", rows)).summary()["rollouts"] == (12 + 4 + 1) * 8


def seeded(name: str, seed: int, after: float = 0.75, draws: int = 0) -> RunReport:
    """A run whose rewards are 0.1 x (seed + 1) x step."""
    config = {
        "run": {"seed": seed, "folder": f"runs/{name}"},
        "model": {"path": f"starts/seed-{seed}"},
        "data": {"prompts_per_step": 4, "seed": 1 + seed},
        "method": {"rollouts_per_prompt": 8, "draws": draws},
    }
    rows = [{"step": -1, **evaluated(0.25)}, step(0), step(1, **{"reward/mean": 0.1 * (seed + 1)}, **evaluated(after))]
    return RunReport(Path("runs") / name, name, config, rows)


def test_runs_that_differ_only_by_seed_are_one_method() -> None:
    runs = [seeded("c3po/seed-0", 0, draws=4), seeded("grpo-0", 0), seeded("c3po/seed-1", 1, draws=4)]
    runs += [seeded("grpo-1", 1), seeded("again", 1)]
    names = {name: [run.name for run in seeds] for name, seeds in by_method(runs).items()}
    assert names == {
        "c3po, 2 seeds": ["c3po/seed-0", "c3po/seed-1"],
        "grpo, 2 seeds": ["grpo-0", "grpo-1"],
        "again": ["again"],
    }
    assert list(by_method([seeded("seed-0", 0), seeded("seed-1", 1)])) == ["runs, 2 seeds"]
    twins = [seeded(f"a-{i}", i % 2, draws=i // 2) for i in range(4)]
    assert list(by_method(twins)) == ["a, 2 seeds", "a-2, 2 seeds"]
    [rows] = [cells(differing_settings(runs))["rows"]]
    assert rows == [("method.draws", "4", "0", "0")]
    [alone] = [cells(differing_settings(runs[:1]))["rows"]]
    assert ("method.draws", runs[0].settings["method.draws"]) in alone
    assert len(alone) == len(runs[0].settings), "a report of one run shows all"


def test_findings_by_hand() -> None:
    """One pair: 1.96 x sqrt(2) x 2 % = 5.5 points. Differences of 20 and 30 points: t = 12.706, standard error 5.

    Without pairs, 70 and 55 points less 50 and 25: variance 12.5^2 + 7.5^2, 1.64 degrees of freedom, t = 5.36.
    """
    one, worse = seeded("one", 0), seeded("worse", 3, after=0.25, draws=1)
    assert findings([one, worse], one) == [
        ("one", "learned: held-out pass@1 from 25.0 % ± 2.0 to 75.0 % ± 2.0 in 2 steps, +50.0 points [44.5, 55.5]."),
        (
            "worse",
            "did not clearly learn: held-out pass@1 from 25.0 % ± 2.0 to 25.0 % ± 2.0 in 2 steps, +0.0 points [-5.5, "
            "5.5]. Against one (another seed): -50.0 points [-55.5, -44.5], worse.",
        ),
    ]
    worse.rows.append(step(2))
    assert "in 2 steps" in findings([one, worse], one)[1][1], "the third has not been evaluated"
    assert findings([one, worse], one)[1][1].endswith("-44.5], worse.")
    worse.rows[-1] |= evaluated(0.25)
    assert findings([one, worse], one)[1][1].endswith("-44.5], worse, after unlike numbers of steps.")
    base = [seeded(f"grpo-{i}", i, after) for i, after in enumerate((0.5, 0.25))]
    other = [seeded(f"c3po-{i}", i, after, draws=4) for i, after in enumerate((0.7, 0.55, 0.9))]
    assert findings([*base, *other], base[1]) == [
        ("grpo, 2 seeds", "learned in 1 of 2 seeds: held-out pass@1 from 25.0 % ± 0.0 to 37.5 % ± 12.5 in 2 steps."),
        (
            "c3po, 3 seeds",
            "learned in 3 of 3 seeds: held-out pass@1 from 25.0 % ± 0.0 to 71.7 % ± 10.1 in 2 steps. "
            "Against grpo, 2 seeds (paired by seed, 2 pairs): +25.0 points [-38.5, 88.5], no clear difference.",
        ),
    ]
    data = {"prompts_per_step": 4, "seed": 11}  # the runs' own seeds are shared, the order of the data is not
    other = [replace(run, config=run.config | {"data": data}) for run in other]
    for runs, words in (
        (other[:2], "+25.0 points [-53.1, 103.1], no clear difference."),
        (other[2:], "+52.5 points, no interval."),
    ):
        words = f" Against grpo, 2 seeds (not paired: no seed in both): {words}"
        assert findings([*base, *runs], base[0])[1][1].endswith(words)


@pytest.mark.parametrize(
    ("first", "second", "unlike"),
    [
        ({}, {"eval": {"temperature": 0.0}}, True),
        ({}, {"reward": {"function": "lax:reward"}}, True),
        ({"eval": {"max_new_tokens": 0}}, {"eval": {"max_new_tokens": 8}}, False),  # 0 is as in training
        ({"environment": {"workers": 0}}, {"environment": {"workers": 3}}, False),
    ],
)
def test_runs_that_were_evaluated_unlike_say_so(first: dict, second: dict, unlike: bool) -> None:
    runs = [seeded("one", 0), seeded("other", 0, after=0.25, draws=1)]
    for run, settings in zip(runs, (first, second), strict=True):
        run.config.update({"sampling": {"max_new_tokens": 8}, **settings})
    words = ", evaluated unlike: see [data], [eval], [reward] and [environment]" if unlike else ""
    assert findings(runs, runs[0])[1][1].endswith(f"-44.5], worse{words}.")


@pytest.mark.parametrize("content", ["1", "2"])
def test_held_out_problems_of_python_are_told_by_their_contents(content: str, tmp_path: Path) -> None:
    runs = [replace(seeded(name, 0, draws=i), path=tmp_path / name) for i, name in enumerate(("one", "other"))]
    for run, kept in zip(runs, ("1", content), strict=True):
        run.config["data"] |= {"train": run.name, "eval": f"runs/{run.name}/inputs/eval.jsonl"}
        (run.path / "inputs").mkdir(parents=True)
        (run.path / "inputs" / "eval.jsonl").write_text(kept)
    assert ("evaluated unlike" in findings(runs, runs[0])[1][1]) == (content == "2")


def test_a_change_is_paired_by_problem_where_it_is_known(tmp_path: Path) -> None:
    """Six differences of 25 points and three of 0: standard error 12.5 / 3; of `evaluated`, without pairs, 2.8."""
    shares = {0: dict.fromkeys("abcdefghi", 0.5), 1: {**dict.fromkeys("abcdef", 0.75), **dict.fromkeys("ghi", 0.5)}}
    rows = [{"step": -1, **evaluated(0.5)}, step(0, **evaluated(2 / 3))]
    path = write_run(tmp_path / "run", rows)
    (path / "evaluations").mkdir()
    for done, right in shares.items():
        (path / "evaluations" / f"step-{done:06d}.json").write_text(json.dumps(right))
    run = read_run(path)
    assert findings([run], run)[0][1].endswith("+16.7 points [8.5, 24.8].")
    better = write_run(tmp_path / "better", [{"step": -1, **evaluated(0.5)}, step(0, **evaluated(5 / 6))])
    (better / "evaluations").mkdir()
    (better / "evaluations" / "step-000001.json").write_text(json.dumps({**shares[1], **dict.fromkeys("abcdef", 1.0)}))
    against = findings([run, read_run(better)], run)[1][1]
    assert against.endswith("Against run: +16.7 points [8.5, 24.8], better."), "the same six differences"
    colder = replace(read_run(better), config={**run.config, "eval": {"temperature": 0.0}})  # on the same problems
    assert "+16.7 points [8.5, 24.8], better, evaluated unlike" in findings([run, colder], run)[1][1]
    other_file = replace(read_run(better), config={**run.config, "data": {"prompts_per_step": 4, "eval": "other"}})
    assert findings([run, other_file], run)[1][1].endswith(
        "+16.7 points [11.1, 22.2], better, evaluated unlike: see [data], [eval], [reward] and [environment]."
    )
    for other in ({**shares[1], "z": 0.5}, {**shares[1], "a": 0.5}):  # other problems, or too few that differ
        (path / "evaluations" / "step-000001.json").write_text(json.dumps(other))
        assert findings([read_run(path)], run)[0][1].endswith("+16.7 points [11.1, 22.2].")


def test_curves_of_seeds_are_their_mean_and_range() -> None:
    """Rewards 0, 0.1 and 0, 0.2: running means 0, 0.05 and 0, 0.1."""
    panels = {panel.name: panel for panel in learning([seeded("a-0", 0, 0.5), seeded("a-1", 1, 1.0)])}
    [reward], [scores] = panels["reward"].curves, panels["pass_at_1"].curves
    assert (reward.x, reward.name) == ([1, 2], "a, 2 seeds")
    for found, expected in ((reward.y, [0, 0.075]), (reward.low, [0, 0.05]), (reward.high, [0, 0.1])):
        assert found == pytest.approx(expected)
    assert (scores.y, scores.low, scores.high) == ([0.25, 0.75], [0.25, 0.5], [0.25, 1.0])


def test_the_mean_of_seeds_ends_with_the_first_of_them() -> None:
    """The mean of those that go on would look like a jump."""
    short, long = seeded("a-0", 0), seeded("a-1", 1)
    long.rows.append(step(2, **{"reward/mean": 0.9}))
    for panel in learning([short, long]):
        for curve in panel.curves:
            assert max(curve.x) <= 2, panel.name
    begun = seeded("a-2", 2)
    del begun.rows[1:]
    for panel in learning([short, seeded("a-1", 1), begun]):
        for curve in panel.curves:
            assert max(curve.x) == 2, "one that has just begun does not cut the others off"
    [alone] = next(panel for panel in learning([long]) if panel.name == "pass_at_1").curves
    assert max(alone.x) == 2


def test_folders_of_the_same_name_go_by_what_differs(tmp_path: Path) -> None:
    folders = [tmp_path / "study" / method / "seed-0" for method in ("grpo", "c3po")]
    for folder in folders:
        folder.parent.mkdir(parents=True)
        write_run(folder, [step(0)])
    assert [run.name for run in read_runs(folders)] == ["grpo/seed-0", "c3po/seed-0"]
    assert [run.name for run in read_runs(folders[:1])] == ["seed-0"]


def test_a_run_is_listed_once_however_its_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, [step(0)])
    monkeypatch.chdir(tmp_path / "a")
    assert [run.name for run in read_runs([Path(), tmp_path / "a", Path("../a"), Path("../b")])] == ["a", "b"]
    assert main(["report", str(tmp_path / "b"), ".", "--baseline", str(tmp_path / "a")]) == 0
    assert main(["report", ".", "--baseline", str(tmp_path / "b")]) == 2
    assert "must be one of the RUNs" in capsys.readouterr().err


def test_what_was_not_measured_is_said_to_be_missing(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [step(0)]))
    assert run.summary()["pass_at_1_before"] is None
    only_before = read_run(write_run(tmp_path / "b", [{"step": -1, **evaluated(0.25)}, step(0)]))
    assert only_before.summary()["pass_at_1_after"] is None
    empty = read_run(write_run(tmp_path / "c", []))
    console = Console(record=True, width=120)
    console.print(*tables([run, only_before, empty]))
    text = console.export_text()
    assert "25.0 % ± 2.0" in text
    assert text.count(" - ") >= 5


def test_without_any_evaluation_the_table_shows_rewards(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [step(1), step(5)]))
    console = Console(record=True, width=120)
    console.print(*tables([run]))
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
    learned = read_run(write_run(tmp_path / "rl", [step(1)]))
    console = Console(record=True, width=120)
    for table in tables([tuned, learned]):
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


def test_every_curve_is_inside_its_panel_and_no_panel_is_empty(tmp_path: Path) -> None:
    rows = [step(i, **{"reward/mean": reward}) for i, reward in enumerate([14.0, -0.9, 3.0])]
    rows[2] |= evaluated(0.75)
    runs = [read_run(write_run(tmp_path / name, rows)) for name in ("a", "b")]
    axes = {panel.name: drawn(panel) for panel in with_data(learning(runs))}
    assert list(axes) == ["reward", "pass_at_1", "zero_advantage", "entropy"]
    low, high = axes["reward"].get_ylim()
    assert low < -0.9
    assert high > 14
    assert axes["zero_advantage"].get_ylim() == (-0.02, 1.02)
    tuned = with_data(learning([read_run(written_fine_tuning(tmp_path / "sft"))]))
    assert [panel.name for panel in tuned] == ["sft_loss", "sft_eval_loss"]


def test_the_only_step_of_a_run_is_a_dot(tmp_path: Path) -> None:
    one, two = (
        read_run(write_run(tmp_path / str(n), [step(i, **{"time/step": 1.0}) for i in range(n)])) for n in (1, 2)
    )
    for run, marker in ((one, "o"), (two, "None")):
        assert {line.get_marker() for line in drawn(learning([run])[0]).lines} == {marker}
        assert {line.get_marker() for line in drawn(cost([run])[1]).lines} == {marker}


def drawn(panel: Panel) -> Any:
    """The axes that a panel with data is drawn on."""
    axis = Figure().subplots()
    draw_panel(panel, axis, colours(list(dict.fromkeys(curve.name for curve in panel.curves))))
    return axis


def test_panels_of_cost_by_hand(tmp_path: Path) -> None:
    """Totals of two steps."""
    spent = {"compute/flops": 10.0, "time/rollout": 2.0, "time/tokens_per_second": 50.0, "time/eval": 0.5}
    run = read_run(write_run(tmp_path / "a", [{"step": -1, **evaluated(0.25)}, step(0, **spent), step(1, **spent)]))
    panels = {panel.name: panel for panel in cost([run])}
    for name, x, y in (
        ("seconds", [1, 2], [1.5, 4.0]),
        ("tokens", [1, 2], [100, 200]),
        ("reward_by_flops", [10, 20], [0, 0.1]),
    ):
        line = drawn(panels[name]).lines[0]
        assert list(line.get_xdata()) == x
        assert list(line.get_ydata()) == pytest.approx(y)


def off_policy(name: str, correction: str, high: float) -> RunReport:
    """One step whose importance ratios reach `high`; everything is kept."""
    rho = {"correction/rho_p05": 0.99998, "correction/rho_p50": 1.0, "correction/rho_p95": high}
    config = {"method": {"correction": {"kind": correction}}}
    return RunReport(Path(name), name, config, [step(0, **rho, **{"correction/kept_share": 1.0})])


def test_kept_shares_and_ratios_are_shown_of_runs_that_have_any() -> None:
    """Plain runs keep everything, at ratios of 1; Thompson's rollouts have other weights, and no correction."""
    plain, thompson = off_policy("grpo", "none", 1.00002), off_policy("thompson", "none", 1.3)
    corrected = off_policy("c3po", "seq_mis", 1.0)
    for runs, kept, rho in (
        ([plain], [], []),
        ([plain, thompson], [], ["thompson"]),
        ([plain, corrected, thompson], ["c3po"], ["c3po", "thompson"]),
    ):
        shown = {panel.name: list(dict.fromkeys(curve.name for curve in panel.curves)) for panel in noise(runs)}
        assert (shown["kept"], shown["rho"]) == (kept, rho)


def test_bands_of_few_seeds_do_not_flatten_the_lines() -> None:
    """A line from 0 to 1 with a band from -10 to 1.2: half of the line's height is shown beyond it at most."""
    wide = drawn(Panel("a", "a", "", [Curve("a", [1, 2], [0.0, 1.0], low=[-10.0, 0.0], high=[10.0, 1.2])]))
    assert wide.get_ylim() == (-0.5, 1.5)
    beside = drawn(
        Panel("a", "a", "", [Curve("a", [1, 2], [0.0, 1.0], [-0.1, 0.0], [0.1, 1.2]), Curve("b", [1], [5.0])])
    )
    assert beside.get_ylim()[1] > 5, "a single seed beside them"
    narrow = drawn(Panel("a", "a", "", [Curve("a", [1, 2], [0.0, 1.0], low=[-0.1, 0.0], high=[0.1, 1.2])]))
    assert -0.5 < narrow.get_ylim()[0] < -0.1


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_the_suffix_says_how_curves_are_drawn(suffix: str, begins: bytes, tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [step(0), step(1)]))
    plot([run], tmp_path / f"curves{suffix}")
    assert (tmp_path / f"curves{suffix}").read_bytes().startswith(begins)
    with pytest.raises(UserError, match="--output .*curves.jpg: name a folder for the page, or end the name in .png"):
        plot([run], tmp_path / "curves.jpg")
    with pytest.raises(UserError, match="nothing to draw"):
        plot([read_run(write_run(tmp_path / "empty", []))], tmp_path / "empty.png")


def test_folders_without_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        read_run(tmp_path)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_of_many_runs_differ_and_stand_out_from_the_ground(dark: bool) -> None:
    """Contrast as in WCAG: 3 to 1 is asked of lines."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for count in (1, 10, 11, 40):
        found = colours([str(i) for i in range(count)], dark=dark)
        assert len(set(found.values())) == count
        for colour in found.values():
            low, high = sorted([luminance(colour), luminance("#1d2126" if dark else "#f6f7f9")])
            assert (high + 0.05) / (low + 0.05) > 3, colour
