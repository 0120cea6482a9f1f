"""Paired comparisons by hand, against scipy, and in simulation; and which evaluations can be compared."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from scipy import stats

from runs import TINY
from threepo import api
from threepo.cli import main
from threepo.config.recipes import load_evaluation
from threepo.errors import UserError
from threepo.evaluation.compare import compare_evaluations, compare_scores
from threepo.evaluation.statistics import Interval, bootstrap_interval, sign_flip_p

DIFFERENCES = [0.03, 0.04, -0.01, 0.09, 0.06]
SMALL = ("data.train=sorting", "data.levels=[2]", "eval.problems=4", "eval.samples=2", "eval.max_new_tokens=2")


def test_by_hand() -> None:
    """Differences 1, 0.5, 0, 0.5 of four problems: mean 0.5, sample variance 1/6; 2 of 8 sign choices are as far."""
    first, second = np.array([0, 0.5, 1, 0]), np.array([1, 1, 1, 0.5])
    result = compare_scores([(first, second)])
    assert (result.first, result.second, result.difference) == (0.375, 0.875, 0.5)
    assert result.error == pytest.approx(np.sqrt(1 / 6 / 4))
    assert result.p == 2 / 8
    assert (result.wins, result.losses, result.ties) == (3, 0, 1)
    assert 0 < result.interval[0] < 0.5 < result.interval[1] < 1


def test_several_sets_weigh_the_same() -> None:
    """Differences of 1 on one problem of two, and of 0 on four: (0.5 + 0) / 2; errors 0.5 and 0 give 0.5 / 2."""
    small, large = (np.zeros(2), np.array([0.0, 1.0])), (np.ones(4), np.ones(4))
    result = compare_scores([small, large])
    assert (result.first, result.second, result.difference) == (0.5, 0.75, 0.25)
    assert result.error == pytest.approx(0.25)
    assert result.problems == 6
    assert result.p == 1, "one problem with a difference can go either way"


def test_no_difference_is_no_evidence() -> None:
    scores = np.array([0.0, 1.0, 0.5])
    result = compare_scores([(scores, scores)])
    assert (result.difference, result.error, result.p, result.ties) == (0, 0, 1, 3)


def test_sign_flips_by_hand_and_against_scipy() -> None:
    # Of the 8 signs of (1, 2, 4), only the two with equal signs give a sum as far out as 7.
    assert sign_flip_p([1.0, 2.0, 4.0]) == 2 / 8
    # (1, 1, -1): sums are 3 twice, and 1 or -1 six times: all are as far out as 1.
    assert sign_flip_p([1.0, 1.0, -1.0]) == 1.0
    exact = stats.permutation_test((DIFFERENCES,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(DIFFERENCES) == pytest.approx(exact.pvalue)


def test_signs_of_many_problems_are_drawn_and_never_zero() -> None:
    d = np.random.default_rng(0).normal(0.5, 1.0, 20)
    drawn = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=50_000, rng=1).pvalue
    assert sign_flip_p(d) == pytest.approx(drawn, abs=0.01)
    assert sign_flip_p([1.0] * 40) > 0


def test_the_bootstrap_interval_is_scipys_and_holds_the_mean() -> None:
    reference = stats.bootstrap(
        (DIFFERENCES,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(5)
    )
    found = bootstrap_interval([DIFFERENCES])
    assert (found.low, found.high) == pytest.approx(tuple(reference.confidence_interval), abs=2e-3)
    assert bootstrap_interval([[0.5] * 5]) == Interval(0.5, 0.5, 0.5)
    assert math.isnan(bootstrap_interval([[0.5], [0.1, 0.2]]).low)


def test_error_and_interval_tell_the_truth_in_simulation() -> None:
    """Scores of 8 completions; the difference is 0.1 on average, and problems are shared."""
    generator = np.random.default_rng(1)
    differences, errors, covered = [], [], 0
    for trial in range(100):
        ease = generator.beta(2, 2, size=60) * 0.8
        first, second = (generator.binomial(8, chance) / 8 for chance in (ease, ease + 0.1))
        result = compare_scores([(first, second)], seed=trial)
        differences.append(result.difference)
        errors.append(result.error)
        covered += result.interval[0] <= 0.1 <= result.interval[1]
    assert np.mean(errors) == pytest.approx(np.std(differences), rel=0.15)
    assert 89 <= covered <= 99


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two evaluations on the same problems."""
    folder = tmp_path_factory.mktemp("made")
    for name, *settings in (("a", "run.seed=0"), ("b", "run.seed=1")):
        api.evaluate(load_evaluation("tiny-qwen2", "", [*TINY[1:], *SMALL, *settings]), folder / name)
    return folder


@pytest.fixture
def evaluations(made: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(made, tmp_path / "evaluations"))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """An evaluation's completions."""
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(folder / "completions" / "sorting.parquet").to_pylist()
    return rows


def changed(folder: Path, **columns: list[object]) -> None:
    """Replace columns of an evaluation's completions."""
    file, rows = folder / "completions" / "sorting.parquet", rows_of(folder)
    rows = [row | {name: values[i] for name, values in columns.items()} for i, row in enumerate(rows)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def test_two_folders(evaluations: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In A all is wrong. In B, of four problems one is right in both completions, and one in one of them."""
    monkeypatch.chdir(evaluations)
    monkeypatch.setenv("COLUMNS", "200")
    changed(Path("a"), correct=[False] * 8)
    changed(Path("b"), correct=[True, True, True, False, False, False, False, False])
    assert main(["eval", "--compare", "a", "b", "--output", "c"]) == 0
    printed = capsys.readouterr().out
    assert "won/lost/tied" in printed
    lines = [line.replace("│", " ").split() for line in printed.splitlines() if "sorting" in line]
    assert [line[:5] for line in lines] == [
        ["sorting", "1", "0.0", "37.5", "+37.5"],
        ["sorting", "2", "0.0", "50.0", "+50.0"],
    ]
    assert [line[-1] for line in lines] == ["2/0/2"] * 2
    assert "different setting: run.seed = 0 in A, 1 in B" in printed
    written = json.loads(Path("c/comparison.json").read_text())
    for k, better in (("1", 0.375), ("2", 0.5)):
        found = written["benchmarks"]["sorting"]["pass_at"][k]
        assert [found[key] for key in ("first", "second", "difference", "wins", "losses")] == [0, better, better, 2, 0]
    changed(Path("b"), reference_answer=["another"] * 8)
    with pytest.raises(UserError, match="answers of sorting differ: 4 in a and 4 in b, 8 of them in only one"):
        compare_evaluations(Path("a"), Path("b"))
    assert written["average"]["pass_at"]["1"]["problems"] == 4
    summary = json.loads(Path("b/summary.json").read_text())
    summary["fingerprint"]["code of my:reward"] = "1234"
    Path("b/summary.json").write_text(json.dumps(summary))
    changed(Path("b"), reference_answer=[row["reference_answer"] for row in rows_of(Path("a"))])
    different = compare_evaluations(Path("a"), Path("b"))["settings_that_differ"]
    assert {"setting": "code of my:reward", "first": None, "second": "1234"} in different
    for folder, prompt in (("a", "one"), ("b", "another")):  # such as programs, which have tests and no answers
        changed(Path(folder), reference_answer=[""] * 8, prompt=[prompt] * 8)
    with pytest.raises(UserError, match="answers of sorting differ: 4 in a and 4 in b, 8 of them in only one"):
        compare_evaluations(Path("a"), Path("b"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["eval.samples=1"], "have 2 and 1 completions a problem"),
        (["eval.problems=3"], "the problems or answers of sorting differ: 4 in .*a and 3 in .*c"),
        (["data.train=sums"], "a has sorting, .*c has sums; none in both"),
    ],
)
def test_what_cannot_be_compared(evaluations: Path, settings: list[str], message: str) -> None:
    config = load_evaluation("tiny-qwen2", "", [*TINY[1:], *SMALL, *settings])
    if "data.train=sums" in settings:
        config = load_evaluation("tiny-qwen2", "", [*TINY[1:], *SMALL, "data.levels=[3]", *settings])
    api.evaluate(config, evaluations / "c")
    with pytest.raises(UserError, match=message):
        compare_evaluations(evaluations / "a", evaluations / "c")


def test_an_unfinished_one_cannot_be_compared(evaluations: Path) -> None:
    (evaluations / "b" / "summary.json").unlink()
    with pytest.raises(UserError, match="b: is not finished"):
        compare_evaluations(evaluations / "a", evaluations / "b")
