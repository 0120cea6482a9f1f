"""The exploration analysis: figures worked by hand, subsets counted one by one, planted effects, others' logs."""

import io
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from runs import train_config
from threepo import api
from threepo.cli import main
from threepo.errors import UserError
from threepo.lab.completions import PromptGroup, _group, read_completions, text_distance
from threepo.lab.exploration import distinct_answers, explore, figures, terms_of
from threepo.lab.exploration_view import exploration_panels, exploration_tables
from threepo.lab.figures import colours, draw_panel, with_data
from threepo.lab.statistics import count_chances, ratio_intervals, win_loss_tie
from threepo.run_folder import write_parquet


def group(verdicts: str) -> PromptGroup:
    """Completions as letters: R and S are right, small letters are wrong answers, and a dash is none."""
    return PromptGroup(
        right=tuple(letter.isupper() for letter in verdicts),
        no_answer=tuple(letter == "-" for letter in verdicts),
        answers=tuple(None if letter == "-" else letter for letter in verdicts),
        text_distance=math.nan,
    )


def rows(steps: list[list[str]], *, first: int = 0) -> list[dict[str, Any]]:
    """A run in our columns: for every step the groups of its problems, as letters; the text is the letter, doubled."""
    return [
        {
            "step": first + step,
            "problem_id": f"p{problem}",
            "completion": f"{letter} {letter}",
            "parsed_answer": None if letter == "-" else letter,
            "correct": letter.isupper(),
        }
        for step, groups in enumerate(steps)
        for problem, letters in enumerate(groups)
        for letter in letters
    ]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        write_parquet(path, rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_subsets_of_a_group_are_counted_exactly() -> None:
    assert count_chances(4, 1, 2).tolist() == [0.5, 0.5, 0]
    assert count_chances(3, 2, 3).tolist() == [0, 0, 1, 0]
    by_hand = [math.comb(5, x) * math.comb(11, 4 - x) / math.comb(16, 4) for x in range(5)]
    np.testing.assert_allclose(count_chances(16, 5, 4), by_hand, atol=1e-15)
    # Pairs of a, a, b, none: one answer in (a, a), 2 (a, none) and (b, none), two answers in 2 (a, b).
    assert distinct_answers(["a", "a", "b", None], 2) == pytest.approx((1 + 2 * 1 + 1 + 2 * 2) / 6)
    assert distinct_answers(["a", "a", "b", None], 4) == 2
    assert win_loss_tie(np.array([0.5, 0.5]), np.array([0.25, 0.75])) == (0.125, 0.375, 0.5)


def test_distances_by_hand() -> None:
    """Counts (2, 1) and (1, 2) have the cosine 4 / 5; the third text has no token of them."""
    texts = [np.array([1, 2, 1]), np.array([2, 2, 1]), np.array([9])]
    assert text_distance(texts) == pytest.approx((0.2 + 1 + 1) / 3)
    assert math.isnan(text_distance(texts[:1]))


def test_what_an_environment_says_makes_episodes_no_more_alike() -> None:
    """Two episodes of two replies have no token in common but those of the observation between them."""
    episode = json.dumps({"own": [[0, 2], [6, 8]]})
    tokens = [[1, 2, 9, 9, 9, 9, 3, 4], [5, 6, 9, 9, 9, 9, 7, 8]]
    table = {"tokens": tokens, "episode": [episode, episode], "right": [True, False], "draw_seed": [0, 0]}
    assert _group(table, [0, 1]).text_distance == 1
    assert _group(table | {"episode": [None, None]}, [0, 1]).text_distance == pytest.approx(1 - 16 / 20)


def test_estimates_by_hand_and_against_theory() -> None:
    """A share of 1/4 over 400 pairs has the standard error sqrt(3/16/400), and its sum 400 times that; 0/0 is none."""
    x = np.tile([1.0, 0, 0, 0], 100)
    found = ratio_intervals(np.stack([x, 0 * x, x]), np.stack([np.ones(400), 0 * x, np.nan * x]))
    assert [found[0].value, found[2].value] == [0.25, 100]
    widths = [found[i].high - found[i].low for i in (0, 2)]
    np.testing.assert_allclose(widths, 2 * 1.96 * math.sqrt(3 / 16 / 400) * np.array([1, 400]), rtol=0.1)
    assert all(map(math.isnan, (found[1].value, found[1].low, found[1].high)))


def test_every_figure_of_a_case_by_hand(tmp_path: Path) -> None:
    """Three steps of two problems, groups of four."""
    baseline = [["aab-", "RRRR"], ["Rabc", "----"], ["Raaa", "RRaa"]]
    run = [["Raab", "RRRR"], ["abcd", "aaaa"], ["Raaa", "RRRa"]]
    first = written(tmp_path / "baseline.jsonl", rows(baseline))
    comparison = explore(first, [written(tmp_path / "run.parquet", rows(run))])["runs"]["run.parquet"]
    assert (comparison["pairs"], comparison["steps"]) == (6, 3)
    values = {name: figure["value"] for name, figure in comparison["phases"]["all"].items()}
    assert (values["rescued"], values["lost"], values["rescued_minus_lost"]) == (1, 1, 0)
    assert [values[f"all_wrong/{side}"] for side in ("baseline", "run")] == pytest.approx([2 / 6, 2 / 6])
    assert [values[f"all_right/{side}"] for side in ("baseline", "run")] == pytest.approx([1 / 6, 1 / 6])
    # No answer: 1, 0, 0, 4, 0, 0 of the baseline, none of the run.
    assert [values[f"no_answer/{name}"] for name in ("wins", "losses", "ties", "win_rate")] == [2, 0, 4, 1]
    assert values["no_answer/baseline"] == pytest.approx(5 / 24)
    # Not right: 4, 0, 3, 4, 3, 2 against 3, 0, 4, 4, 3, 1. With an answer, 3, 0, 3, 0, 3, 2 against the same.
    assert [values[f"incorrect/{name}"] for name in ("wins", "losses", "ties")] == [2, 1, 3]
    assert values["incorrect/win_rate"] == pytest.approx(2 / 3)
    assert [values[f"wrong_answer/{name}"] for name in ("wins", "losses", "ties")] == [1, 2, 3]
    # Distinct answers: 2, 1, 4, 0, 2, 2 against 3, 1, 4, 1, 2, 2.
    assert values["distinct_answers/baseline"] == pytest.approx(11 / 6)
    assert values["distinct_answers/difference"] == pytest.approx(2 / 6)
    # pass@2: 0, 1, 1/2, 0, 1/2, 5/6 against 1/2, 1, 0, 0, 1/2, 1.
    assert values["pass_at_2/baseline"] == pytest.approx((1 + 0.5 + 0.5 + 5 / 6) / 6)
    assert values["pass_at_2/difference"] == pytest.approx((0.5 - 0.5 + 1 / 6) / 6)
    # Two words and the end: texts of other letters have the cosine 1/5. Shares of pairs with other letters: the
    # baseline's 5/6, 0, 1, 0, 1/2, 2/3; the run's 5/6, 0, 1, 0, 1/2 and 1/2.
    assert values["text_distance/baseline"] == pytest.approx(0.8 * (5 / 6 + 1 + 1 / 2 + 2 / 3) / 6)
    assert values["text_distance/difference"] == pytest.approx(0.8 * (1 / 2 - 2 / 3) / 6)
    assert comparison["curves"]["rescued"] == [1, 1, 1]
    assert comparison["curves"]["lost"] == [0, 1, 1]
    assert comparison["curves"]["all_wrong/run"] == [0, 1, 0]
    early, late = (comparison["phases"][name] for name in ("early", "late"))
    assert [part["rescued"]["value"] for part in (early, late)] == [1, 0]
    assert late["incorrect/wins"]["value"] == 1


def test_bigger_groups_count_as_the_mean_over_their_subsets() -> None:
    big, small = group("Raab-cRa"), group("Rab-")
    found = terms_of(big, small)
    subsets = [group("".join(letters)) for letters in itertools.combinations("Raab-cRa", 4)]
    for name, value in found.items():
        mean = np.mean([terms_of(subset, small)[name] for subset in subsets], axis=0)
        assert value == pytest.approx(tuple(mean), nan_ok=True), name


def test_answers_in_other_spellings_are_one_and_unreported_ones_are_unknown(tmp_path: Path) -> None:
    def read(name: str, **columns: list[Any]) -> PromptGroup:
        made = [{"step": "3", "problem_id": "p", "completion": "a", "correct": i == 0} for i in range(3)]
        table = [row | {key: values[i] for key, values in columns.items()} for i, row in enumerate(made)]
        return read_completions(written(tmp_path / f"{name}.jsonl", table))[3, "p"]

    answered = read("answered", parsed_answer=["27.0", "27", None])
    assert answered.answers is not None
    assert (len(set(answered.answers[:2])), answered.no_answer) == (1, (False, False, True))
    for name, columns in (
        ("right", {"parsed_answer": [None, "1", "2"]}),
        ("judged", {"parsed_answer": ["1", None, "2"], "status": ["right", "wrong", "wrong"]}),
    ):
        assert read(name, **columns).answers is None
    assert read("status", status=["right", "no_answer", "error"]).no_answer == (False, True, False)
    assert read("plain").no_answer is None


def test_the_table_by_hand(tmp_path: Path) -> None:
    first = written(tmp_path / "a.jsonl", rows([["Raaa", "----"], ["RRRR", "aaaa"]]))
    second = written(tmp_path / "b.jsonl", rows([["RRaa", "R---"], ["aaaa", "aaaa"]]))
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(*exploration_tables(explore(first, [second])))
    lines = [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]
    for beginning in ("rescued 1.0 ", "lost 1.0 ", "rescued - lost 0.0 ", "incorrect 66.7 "):
        assert any(line.startswith(beginning) for line in lines), beginning
    assert "won/lost/tied 2/1/1 2/0/0 0/1/1" in lines
    console.print(*exploration_tables(explore(first, [first])))
    assert "won/lost/tied" not in console.export_text(clear=False), "rows of ties alone"
    assert "b.jsonl against" in lines[0]
    assert any(line.startswith("pass@1 0.312 0.188 -0.125 ") for line in lines)
    assert [line.split()[0] for line in lines if line.startswith("pass@")] == ["pass@1", "pass@2", "pass@4"]


def drawn(generator: np.random.Generator, chances: np.ndarray) -> list[PromptGroup]:
    """Groups of four, with these chances of a right completion."""
    return [group("".join("R" if hit else "a" for hit in generator.random(4) < chance)) for chance in chances]


@pytest.mark.parametrize(("planted", "least", "most"), [(0.0, 0, 6), (0.2, 39, 40)])
def test_a_planted_rescue_is_found_and_a_copy_with_another_seed_is_none(planted: float, least: int, most: int) -> None:
    """Forty comparisons of 60 groups each: the interval of rescued - lost excludes 0 in about 5 %, or in all."""
    found = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        chances = generator.choice([0.02, 0.1, 0.5], 60)
        pairs = zip(drawn(generator, chances), drawn(generator, chances + planted), strict=True)
        wanted = ("rescued_minus_lost", "incorrect/win_rate")  # all would take four times as long
        terms = [terms_of(first, second) for first, second in pairs]
        results = figures([{name: of_pair[name] for name in wanted} for of_pair in terms])
        low, high = results["rescued_minus_lost"]["interval"]
        found += low > 0 or high < 0
        low, high = results["incorrect/win_rate"]["interval"]
        assert planted == 0 or low > 0.5
    assert least <= found <= most


STEPS = [["Rab-", "RRaa"], ["a---", "RRRR"]]


def test_logs_of_trl_and_verl_are_read_as_ours(tmp_path: Path) -> None:
    ours = written(tmp_path / "ours.jsonl", rows(STEPS))
    expected = read_completions(ours)
    assert expected[0, "p0"].right == (True, False, False, False)
    assert expected[0, "p0"].answers == ("R", "a", "b", None)
    (tmp_path / "trl" / "completions").mkdir(parents=True)
    (tmp_path / "verl").mkdir()
    repeated = [(1, 0), (2, 1), (3, 1)]  # TRL's log of step 3 has the batch of step 2 again
    for number, step in repeated:
        made = [row for row in rows(STEPS) if row["step"] == step]
        trl = [
            {"step": number, "prompt": row["problem_id"], "completion": row["completion"]}
            | {"exact_match": float(row["correct"]), "advantage": 0.5}
            for row in made
        ]
        write_parquet(tmp_path / "trl" / "completions" / f"completions_{number:05d}.parquet", trl)
        verl = [
            {"input": row["problem_id"], "output": row["completion"], "gts": "R", "score": 2.0 * row["correct"] - 1}
            | {"step": number, "acc": row["correct"], "pred": row["parsed_answer"] or "[INVALID]"}
            for row in made
        ]
        if number < 3:
            written(tmp_path / "verl" / f"{number}.jsonl", verl)
    later = {(step + 1, problem): found for (step, problem), found in expected.items()}
    # A step of one problem with one pair has NaN, which is equal to itself only if it is the same object.
    assert repr(read_completions(tmp_path / "verl")) == repr(later)
    found = read_completions(tmp_path / "trl")
    assert found.keys() == later.keys()
    for key, one in found.items():
        assert (one.right, one.text_distance) == (later[key].right, later[key].text_distance)
        assert one.no_answer is None
    values = explore(tmp_path / "trl", [tmp_path / "verl"])["runs"]["verl"]["phases"]["all"]
    assert values["incorrect/ties"]["value"] == 4
    assert values["no_answer/wins"]["value"] is None


def test_trls_only_reward_is_the_verdict_beside_the_columns_of_draws(tmp_path: Path) -> None:
    made = [{"step": 1, "prompt": "p", "completion": c, "draw_index": 0, "draw_arm": "all", "fits": 1.0} for c in "ab"]
    written(tmp_path / "completions_1.parquet", [row | {"advantage": 0.0} for row in made])
    assert [group.right for group in read_completions(tmp_path).values()] == [(True, True)]


def test_completions_without_a_verdict_are_left_out(tmp_path: Path) -> None:
    """TRL writes a reward of None as null, and leaves it out of its group's comparison."""
    made = [
        {"step": 1, "prompt": "p", "completion": c, "fits": value}
        for c, value in zip("abc", (1.0, None, 0.0), strict=True)
    ]
    made += [{"step": 1, "prompt": "q", "completion": "d", "fits": None}]
    written(tmp_path / "completions_1.parquet", [row | {"advantage": 0.0} for row in made])
    assert [group.right for group in read_completions(tmp_path).values()] == [(True, False)]


def test_a_line_ends_only_at_a_newline(tmp_path: Path) -> None:
    table = [row | {"completion": "one\u2028two\x85three"} for row in rows(STEPS)]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in table)  # without escapes, as verl writes it
    (tmp_path / "raw.jsonl").write_text(lines, encoding="utf-8")
    assert list(read_completions(tmp_path / "raw.jsonl")) == [(0, "p0"), (0, "p1"), (1, "p0"), (1, "p1")]


def test_a_run_that_repeats_itself_keeps_its_steps(tmp_path: Path) -> None:
    for step in range(2):  # a file for each step, as in our run folders
        written(tmp_path / f"step-{step}.jsonl", [row | {"draw_index": 0} for row in rows([["Ra"]], first=step)])
    assert list(read_completions(tmp_path)) == [(0, "p0"), (1, "p0")]


def test_files_that_trl_wrote() -> None:
    """trl_logs has two runs of TRL 1.16's GRPOTrainer, which differ in the learning rate; figures counted by hand."""
    logs = Path(__file__).parent / "trl_logs"
    with pytest.raises(UserError, match="has the columns right, length; say which one is the verdict"):
        read_completions(logs / "base")
    compared = explore(logs / "base", [logs / "fast"], verdict="right")["runs"]["fast"]
    values = {figure: found["value"] for figure, found in compared["phases"]["all"].items()}
    assert (values["rescued"], values["lost"]) == (2, 3)
    assert (values["all_wrong/baseline"], values["all_wrong/run"]) == (pytest.approx(7 / 12), pytest.approx(8 / 12))
    assert (values["incorrect/baseline"], values["incorrect/run"]) == (pytest.approx(40 / 48), pytest.approx(44 / 48))
    assert (values["incorrect/wins"], values["incorrect/losses"], values["incorrect/ties"]) == (2, 4, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"correct": 0.5}, r"correct of row 0 is 0.5; say from where on it is right with --right-above"),
        ({"correct": "yes"}, r"correct of row 0 is .yes.; it must be a number"),
        ({"correct": ...}, r"has no column correct or acc, but step, .*; rename"),
        ({"completion": ...}, r"has no column completion or output, but"),
        ({"problem_id": ...}, r"has no column problem_id or prompt or input, but"),
    ],
)
def test_what_cannot_be_read_is_said(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    changed = [{k: v for k, v in (row | change).items() if v is not ...} for row in rows(STEPS)]
    with pytest.raises(UserError, match=f"bad.jsonl: {message}"):
        read_completions(written(tmp_path / "bad.jsonl", changed))


def test_files_that_are_none_are_said(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"step": 1\n')
    with pytest.raises(UserError, match="bad.jsonl: cannot be read as JSON lines"):
        read_completions(tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_text("[1, 2]\n")
    with pytest.raises(UserError, match="bad.jsonl: cannot be read as JSON lines"):
        read_completions(tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_text("")
    with pytest.raises(UserError, match="bad.jsonl: is empty; remove it"):
        read_completions(tmp_path / "bad.jsonl")
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(UserError, match="bad.parquet: cannot be read as parquet"):
        read_completions(tmp_path / "bad.parquet")
    with pytest.raises(UserError, match="nowhere: holds no completions"):
        read_completions(tmp_path / "nowhere")
    (tmp_path / "split").mkdir()
    for name, step in (("1", [["Ra"]]), ("2", [["RR"]])):
        written(tmp_path / "split" / f"{name}.jsonl", rows(step))
    with pytest.raises(UserError, match=r"2.jsonl: problem 'p0' of step 0 is in another file too"):
        read_completions(tmp_path / "split")


def test_rewards_that_are_not_verdicts_need_a_rule(tmp_path: Path) -> None:
    table = [
        {"step": 0, "prompt": "p", "completion": "a", "format": 1.0, "score": s, "advantage": 0.0} for s in (0.3, 0.9)
    ]
    file = written(tmp_path / "trl.parquet", table)
    with pytest.raises(UserError, match="score of row 0 is 0.3; say from where on it is right with --right-above"):
        read_completions(file)
    assert read_completions(file, above=0.5)[0, "p"].right == (False, True)
    assert read_completions(file, "format")[0, "p"].right == (True, True)
    renamed = [{("accuracy" if k == "score" else k): v for k, v in row.items()} for row in table]
    with pytest.raises(UserError, match="has the columns format, accuracy; say which one is the verdict"):
        read_completions(written(tmp_path / "two.parquet", renamed))


def test_runs_that_cannot_be_paired_are_refused(tmp_path: Path) -> None:
    first = written(tmp_path / "a.jsonl", rows(STEPS))
    other = written(tmp_path / "b.jsonl", [row | {"problem_id": row["problem_id"] + "x"} for row in rows(STEPS)])
    with pytest.raises(UserError, match=r": 8 problems are in only one .* 'p0' at step 0, .*data.seed"):
        explore(first, [other])
    with pytest.raises(UserError, match="no step in common"):
        explore(first, [written(tmp_path / "c.jsonl", rows(STEPS, first=7))])
    longer = written(tmp_path / "d.jsonl", rows([*STEPS, *STEPS]))
    assert explore(first, [longer])["runs"]["d.jsonl"]["steps_in_one_only"] == {"baseline": 0, "run": 2}


def test_the_command_on_runs_of_our_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("run.steps=2", "eval.every=0")
    api.train(train_config(tmp_path / "grpo", *settings))
    api.train(train_config(tmp_path / "c3po", *settings, "method.preset=c3po"))
    arguments = ["explore", str(tmp_path / "grpo"), str(tmp_path / "c3po"), "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert "rescued - lost" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "exploration.json").read_text())["runs"]["c3po"]
    assert (found["pairs"], found["steps"], found["group_sizes"]["compared"]) == (8, 2, [8])
    phases = found["phases"]["all"]
    for name in ("incorrect", "no_answer"):
        assert sum(phases[f"{name}/{outcome}"]["value"] for outcome in ("wins", "losses", "ties")) == 8
    assert (tmp_path / "out" / "exploration.png").read_bytes().startswith(b"\x89PNG")
    assert main(["explore", str(tmp_path / "grpo")]) == 2
    assert "at least one run" in capsys.readouterr().err
    # The same files without the columns that are ours alone.
    files = sorted((tmp_path / "c3po" / "completions").glob("*.parquet"))
    (tmp_path / "plain").mkdir()
    for file in files:
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).drop(["tokens"]), tmp_path / "plain" / file.name)
    ours, plain = (read_completions(tmp_path / name) for name in ("c3po", "plain"))
    assert [g.right for g in ours.values()] == [g.right for g in plain.values()]


def test_a_run_with_the_baselines_name_keeps_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (".", "other"):
        (tmp_path / folder).mkdir(exist_ok=True)
        written(tmp_path / folder / "a.jsonl", rows([["Raaa"]]))
    monkeypatch.chdir(tmp_path)
    assert list(explore(Path("a.jsonl"), [Path("other/a.jsonl")])["runs"]) == ["other/a.jsonl"]


def test_the_baseline_has_a_line_for_each_size_and_number_of_steps(tmp_path: Path) -> None:
    """Of four completions one is right: no pair of them has it in one of two cases, and the four always have it."""
    first = written(tmp_path / "a.jsonl", rows([["Raaa"]] * 3))
    others = {"pairs": [["aa"]] * 3, "copy": [["Raaa"]] * 3, "again": [["RRaa"]] * 3, "short": [["Raaa"]] * 2}
    runs = [written(tmp_path / f"{name}.jsonl", rows(steps)) for name, steps in others.items()]
    comparison = explore(first, runs)
    palette = {str(first): "black", **colours(list(comparison["runs"]))}
    panels = {panel.name: panel for panel in exploration_panels(comparison)}
    axis = Figure().subplots()
    draw_panel(panels["no_signal"], axis, palette)
    found = [line.get_ydata() for line in axis.lines if line.get_color() == "black" and line.get_linestyle() == "-"]
    assert [list(map(float, line)) for line in found] == [[0.5] * 3, [0] * 3, [0] * 2]
    labels = ["groups of 2, 3 steps", "groups of 4, 3 steps", "groups of 4, 2 steps"]
    assert list(dict.fromkeys(text.get_text() for text in axis.texts if text.get_text())) == labels
    assert "M3PO" in panels["no_signal"].note
    draw_panel(exploration_panels(explore(first, runs[1:3]))[2], axis := Figure().subplots(), palette)
    assert sum(line.get_color() == "black" for line in axis.lines) == 2
    assert not any(text.get_text() for text in axis.texts)


def test_only_panels_with_data_are_drawn(tmp_path: Path) -> None:
    first = written(tmp_path / "a.jsonl", rows(STEPS))
    second = written(tmp_path / "b.jsonl", rows(list(reversed(STEPS))))
    less, everything = (exploration_panels(explore(first, [run])) for run in (first, second))
    palette = {str(first): "#000000", "a.jsonl": "#ff0000", "b.jsonl": "#0000ff"}
    assert [panel.name for panel in less if panel not in with_data(less)] == ["win_rates"]
    for panel in everything:
        axis = Figure().subplots()
        draw_panel(panel, axis, palette)
        assert sum(len(line.get_xdata()) > 0 for line in axis.lines) >= 2, panel.name
