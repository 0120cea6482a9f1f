"""RandOpt: the draws that do best on training problems, found another way, are the ones that vote."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from runs import RLVR, train_config
from threepo import api
from threepo.cli import main
from threepo.config import DataConfig, LocalEngineConfig, NoiseConfig, SamplingConfig, TrainConfig
from threepo.config.recipes import load, load_evaluation
from threepo.data.source import open_source
from threepo.errors import Interrupted, ThreepoWarning, UserError
from threepo.evaluation import run as evaluation
from threepo.evaluation.run import best_draws
from threepo.models.policy import load_policy
from threepo.posterior.gaussian import FixedWeights, Posterior
from threepo.rollout.local import LocalEngine
from threepo.types import Draw, Purpose, Request

REWARD = "def reward(completions, **_):\n    return [float(bool(c) and c[0] < 'P') for c in completions]\n"
NOISE = ["noise.unit=rms", "noise.size=1.0"]
RANDOPT = [
    *NOISE,
    "eval.draws=7",
    "eval.best_draws=2",
    "eval.samples=4",
    "eval.selection_problems=12",
    "eval.problems=5",
    "eval.part_size=8",
    "eval.temperature=0",
    "data.train=sorting",
    "data.levels=[2, 3]",
    "reward.function=first_letter:reward",
    "sampling.max_new_tokens=2",
]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that knows nothing: which letter it begins with depends on the draw and the prompt."""
    monkeypatch.chdir(tmp_path)
    Path("first_letter.py").write_text(REWARD)
    config = load(TrainConfig, "", [*RLVR, "model.tiny.tied=false"])
    load_policy(config.model, config.run.seed).save(tmp_path / "model")
    return tmp_path / "model"


def completions(folder: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(folder / "completions" / f"{name}.parquet").to_pylist()
    return rows


def test_the_best_are_chosen_and_of_equals_the_first() -> None:
    right = {3: [1, 1, 0], 0: [1, 0, 0], 2: [1, 1, 1], 1: [1, 1, 0]}
    rows = [
        {"draw_index": Purpose.EVALUATION + number, "correct": bool(one)} for number in right for one in right[number]
    ]
    assert best_draws(rows, 3) == {"scores": {0: 1 / 3, 1: 2 / 3, 2: 1.0, 3: 2 / 3}, "best": [2, 1, 3]}


def test_the_draws_that_solve_most_training_problems_vote(model: Path, tmp_path: Path) -> None:
    """The engine itself counts the problems that each draw solves; it decodes greedily, so there is one answer."""
    config = load_evaluation(str(model), "", RANDOPT)
    summary = api.evaluate(config, tmp_path / "out")
    policy = load_policy(config.model)
    posterior = Posterior.around(policy.model.named_parameters(), NoiseConfig(unit="rms", size=1.0))
    engine = LocalEngine(policy, LocalEngineConfig())
    problems = open_source("sorting", "train", DataConfig(train="sorting", levels=(2, 3))).problems.first(12)
    solved = {}
    for number in range(7):
        draw = Draw(0, 0, number, Purpose.EVALUATION)
        engine.load(FixedWeights(policy.model, posterior), [draw], 0)
        asked = [Request(p, policy.encode_prompt(p, config.data, 2), draw, 0) for p in problems]
        texts = [c.text for c in engine.generate(asked, SamplingConfig(temperature=0.0, max_new_tokens=2), 0)]
        solved[number] = sum(bool(text) and text[0] < "P" for text in texts)
    assert len(set(solved.values())) > 2, "choose other noise: the draws hardly differ"
    expected = sorted(solved, key=lambda number: (-solved[number], number))[:2]
    assert summary["selection"]["best"] == expected
    assert summary["selection"]["scores"] == {str(n): pytest.approx(k / 12) for n, k in solved.items()}
    rows = completions(tmp_path / "out", "sorting")
    assert [row["draw_index"] - Purpose.EVALUATION for row in rows] == [
        expected[0],
        expected[0],
        *[expected[1]] * 2,
    ] * 5
    selection = completions(tmp_path / "out", "sorting.selection")
    assert Counter(row["draw_index"] - Purpose.EVALUATION for row in selection) == dict.fromkeys(range(7), 12)
    scores = summary["benchmarks"]["sorting"]
    by_draw = {n: sum(r["correct"] for r in rows if r["draw_index"] == Purpose.EVALUATION + n) / 10 for n in expected}
    assert scores["pass_at_1_by_draw"] == {str(n): pytest.approx(by_draw[n]) for n in expected}


@pytest.mark.parametrize("stop", [5, 10])
def test_an_interrupted_search_ends_like_one_that_was_not(
    stop: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is interrupted in the selection, and among the chosen draws."""
    config = load_evaluation(str(model), "", RANDOPT)
    expected = api.evaluate(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        write, written = evaluation.write_parquet, []

        def interrupted(path: Path, rows: Any) -> None:
            write(path, rows)
            written.append(path)
            if len(written) == stop:
                raise Interrupted(15, "here")

        patch.setattr(evaluation, "write_parquet", interrupted)
        with pytest.raises(Interrupted):
            api.evaluate(config, tmp_path / "parts")
    assert len(written) == stop
    assert api.evaluate(config, tmp_path / "parts") == expected
    for name in ("sorting", "sorting.selection"):
        assert completions(tmp_path / "parts", name) == completions(tmp_path / "whole", name)
    assert {file.name for file in (tmp_path / "parts").iterdir()} == {
        "summary.json",
        "evaluation.json",
        "completions",
        "eval.lock",
    }


def test_the_command_shows_the_choice(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(model), *RANDOPT, "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    best = json.loads((tmp_path / "out" / "summary.json").read_text())["selection"]["best"]
    assert f"draws {best[0]}, {best[1]}: the best of 7 on 12 problems of sorting" in said


def test_what_cannot_be_chosen_is_refused(tmp_path: Path) -> None:
    for settings, message in (
        (["data.train=sorting", "eval.best_draws=8"], "eval.best_draws = 8: must be below eval.draws = 0"),
        (["data.train=sorting", "eval.draws=8", "eval.best_draws=3"], "best_draws = 3: must divide eval.samples = 8"),
        (["data.eval=a.jsonl", "eval.draws=8", "eval.best_draws=4"], "data.train is missing: eval.best_draws are"),
        (["benchmarks.names=['gsm8k']", "eval.draws=8", "eval.best_draws=4"], "data.train is missing: eval.best_draws"),
        (["benchmarks.names=['gsm8k']", "data.train=gsm8k"], "data.train: is not read with benchmarks"),
    ):
        with pytest.raises(UserError, match=message):
            load_evaluation("some/model", "", settings)
    with pytest.raises(UserError, match="eval.best_draws = 4: draws are not chosen while training"):
        train_config(tmp_path, "method.preset=c3po", "eval.samples=8", "eval.draws=8", "eval.best_draws=4")
    settings = ["benchmarks.names=['math500']", "data.train=mine.jsonl", "eval.draws=9", "eval.best_draws=4"]
    found = load_evaluation("m", "", [*settings, "data.prompt_column=question", "data.seed=3"]).data
    assert (Path(found.train).name, found.prompt_column, found.seed) == ("mine.jsonl", "question", 3)


def test_draws_that_are_chosen_on_held_out_problems_are_warned_of(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"sort {i}", "answer": "1"} for i in range(12, 18)]
    Path("same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [*RANDOPT, "data.levels=[]", "data.train=same.jsonl", "data.eval=same.jsonl", "eval.problems=4"]
    with pytest.warns(ThreepoWarning, match="same, with draws that are chosen on .*: 4 of the 4 held-out ones"):
        api.evaluate(load_evaluation(str(model), "", settings), tmp_path / "out")
