"""Dynamic sampling: which prompts make a batch, in how many rounds, and at what cost; by hand, and in whole runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import threepo.methods.credit
from factories import completion
from runs import outcome, train_config
from threepo import api
from threepo.config import Advantage, DataConfig, IVONConfig, Method, ModelConfig, SamplingConfig, TrainConfig
from threepo.config.method import M3PO
from threepo.data.finite import FiniteProblems
from threepo.errors import UserError
from threepo.methods.method import credit
from threepo.run_folder import checkpoints, read_metrics
from threepo.training.checkpoint import load_train_state
from threepo.training.metrics import dynamic_metrics
from threepo.training.rollouts import until_full
from threepo.types import Group, Problem

PAIR = Method(rollouts_per_prompt=2, optimizer="ivon")


def source(count: int, seed: int = 0) -> FiniteProblems:
    return FiniteProblems("numbers", tuple(Problem(id=f"p{i}", prompt="?") for i in range(count)), seed, count)


def order(problems: FiniteProblems, count: int) -> list[str]:
    """The first `count` problems of the source, one at a time."""
    return [problems.untried(i, 1, ())[0][0].id for i in range(count)]


def config(prompts: int, method: Method = PAIR, **sampling: int) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(path="tiny-qwen2"),
        data=DataConfig(train="sorting", prompts_per_step=prompts),
        method=method,
        optimizer=IVONConfig(),
        sampling=SamplingConfig(**sampling),  # type: ignore[arg-type]
    )


def answers(with_spread: Sequence[str]) -> Callable[[Sequence[Problem]], list[Group]]:
    """Two completions of each problem, of three tokens: one is right if the problem is named, else none."""

    def answer(problems: Sequence[Problem]) -> list[Group]:
        rewards = [(float(problem.id in with_spread), 0.0) for problem in problems]
        completions = [
            completion(problem.id, i, reward=reward)
            for problem, pair in zip(problems, rewards, strict=True)
            for i, reward in enumerate(pair)
        ]
        return credit(PAIR, completions)

    return answer


def ids(groups: Sequence[Group]) -> list[str]:
    return [group.problem.id for group in groups]


def test_prompts_without_spread_are_replaced_one_for_one() -> None:
    """Rounds: (0 and 1), of which 1 has spread; 2; 3; 4, which has spread."""
    problems = source(10)
    p = order(problems, 10)
    found = until_full(config(2, dynamic_rounds=10), problems, 0, answers([p[1], p[4], p[5]]))
    assert (ids(found.groups), ids(found.discarded)) == ([p[1], p[4]], [p[0], p[2], p[3]])
    assert (found.rounds, found.missing, found.drawn) == (4, 0, 5)
    assert ids(found.generated) == [p[1], p[4], p[0], p[2], p[3]]
    assert dynamic_metrics(found) == {
        "sampling/rounds": 4,
        "groups/generated": 5,
        "groups/discarded_share": 0.6,
        "groups/missing": 0,
        "completions/discarded_tokens": 3 * 2 * 3,
    }


def test_the_first_prompts_without_spread_fill_a_batch_when_the_rounds_are_over() -> None:
    problems = source(10)
    p = order(problems, 10)
    found = until_full(config(3, dynamic_rounds=2), problems, 4, answers([p[5]]))
    assert (ids(found.groups), ids(found.discarded)) == ([p[5], p[4], p[6]], [p[7], p[8]])
    assert (found.rounds, found.missing, found.drawn) == (2, 2, 9)


def test_rounds_of_a_fixed_size_discard_what_exceeds_the_batch() -> None:
    problems = source(10)
    p = order(problems, 10)
    found = until_full(config(2, dynamic_rounds=1, prompts_per_round=6), problems, 0, answers([p[1], p[2], p[4], p[5]]))
    assert (ids(found.groups), ids(found.discarded)) == ([p[1], p[2]], [p[4], p[5], p[0], p[3]])
    assert (found.rounds, found.missing, found.drawn) == (1, 0, 6)


def test_a_step_that_has_tried_the_whole_set_ends_its_rounds() -> None:
    problems = source(5)
    found = until_full(config(2, dynamic_rounds=10), problems, 3, answers([]))
    assert sorted(ids(found.generated)) == [f"p{i}" for i in range(5)]
    assert (found.rounds, found.missing) == (3, 2)


def test_a_prompt_is_kept_if_any_of_its_advantage_groups_has_spread() -> None:
    """M3PO with two draws of two: (1, 1) and (0, 0) have no spread, (1, 0) has."""
    rewards = {"a": (1, 1, 0, 0), "b": (0, 0, 1, 0)}
    method = replace(M3PO, draws=2, rollouts_per_prompt=4)
    problems = FiniteProblems("two", tuple(Problem(id=name, prompt="?") for name in rewards), 0, 2)

    def answer(asked: Sequence[Problem]) -> list[Group]:
        return credit(method, [completion(p.id, i, reward=r) for p in asked for i, r in enumerate(rewards[p.id])])

    found = until_full(config(2, method, dynamic_rounds=2), problems, 0, answer)
    assert ids(found.groups) == ["b", "a"]
    assert found.missing == 1


@given(
    count=st.integers(4, 12),
    seed=st.integers(0, 5),
    steps=st.lists(st.tuples(st.integers(1, 4), st.sets(st.integers(0, 11))), max_size=8),
    rounds=st.integers(2, 5),
)
def test_no_problem_comes_twice_in_a_step_or_in_an_epoch(
    count: int, seed: int, steps: list[tuple[int, set[int]]], rounds: int
) -> None:
    problems, drawn, seen = source(count, seed), 0, []
    for wanted, live in steps:
        found = until_full(config(wanted, dynamic_rounds=rounds), problems, drawn, answers([f"p{i}" for i in live]))
        names, stream = ids(found.generated), order(problems, found.drawn)
        assert len(found.groups) == wanted
        assert len(set(names)) == len(names)
        assert set(names) == set(stream[drawn:])
        seen += [(at // count, stream[at]) for at in range(drawn, found.drawn)]
        drawn = found.drawn
    assert len(set(seen)) == len(seen)


# Whole runs

ALTERNATING = "def reward(completions, **_):\n    return [float(i % 2) for i, _ in enumerate(completions)]\n"
"""Every prompt has spread."""
FIRST_LETTER = "def reward(completions, **_):\n    return [float(bool(c) and c[0] < 'P') for c in completions]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("alternating.py").write_text(ALTERNATING)
    Path("first_letter.py").write_text(FIRST_LETTER)
    return tmp_path


def test_where_every_prompt_has_spread_the_run_is_that_without_dynamic_sampling(folder: Path) -> None:
    common = ["reward.function=alternating:reward", "run.steps=3", "optimizer.lr=1e-2"]
    api.train(train_config(folder / "plain", *common))
    api.train(train_config(folder / "dynamic", *common, "sampling.dynamic_rounds=4"))
    plain, dynamic = outcome(folder / "plain"), outcome(folder / "dynamic")
    assert dynamic["tensors"] == plain["tensors"]
    assert dynamic["completions"] == plain["completions"]
    more = {"sampling/rounds", "groups/generated", "groups/discarded_share", "groups/missing"}
    for ours, theirs in zip(dynamic["metrics"], plain["metrics"], strict=True):
        assert {name: ours[name] for name in theirs} == theirs
        assert ours.keys() - theirs.keys() == {*more, "completions/discarded_tokens"}


def test_advantages_are_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed in every round of generation, and reused for the metrics and the update."""
    seen: list[int] = []

    def counted(rewards: torch.Tensor, settings: Advantage) -> torch.Tensor:
        seen.append(len(rewards))
        return grpo.advantages(rewards, settings)

    grpo = threepo.methods.credit.GRPO
    monkeypatch.setattr(threepo.methods.credit, "GRPO", replace(grpo, advantages=counted))
    settings = ["reward.function=first_letter:reward", "model.tiny.tied=false", "method.rollouts_per_prompt=2"]
    api.train(train_config(folder / "run", *settings, "run.steps=3", "sampling.dynamic_rounds=3"))
    rows = read_metrics(folder / "run")
    assert len(seen) == sum(row["sampling/rounds"] for row in rows) > 3
    assert sum(seen) == sum(row["groups/generated"] for row in rows)


def test_costs_and_completions_are_those_of_all_rounds(folder: Path) -> None:
    """Groups of two: a random policy leaves more than half of them without spread."""
    settings = ["reward.function=first_letter:reward", "model.tiny.tied=false", "method.rollouts_per_prompt=2"]
    api.train(train_config(folder / "run", *settings, "run.steps=4", "sampling.dynamic_rounds=3"))
    rows, drawn = read_metrics(folder / "run"), 0
    assert max(row["sampling/rounds"] for row in rows) > 1
    for row in rows:
        table = pyarrow.parquet.read_table(folder / "run" / "completions" / f"step-{row['step']:06d}.parquet")
        written = table.to_pylist()
        discarded = [one for one in written if one["gradient_logprob_sum"] is None]
        assert len(written) == 2 * row["groups/generated"]
        assert len(written) - len(discarded) == 2 * 4
        assert {one["advantage"] for one in discarded} <= {None}
        learned = [one for one in written if one["advantage"] is not None]
        for pair in zip(learned[::2], learned[1::2], strict=True):
            (low, high) = sorted(pair, key=lambda one: one["reward"])
            equal = low["reward"] == high["reward"]  # the deviation of two is their difference / sqrt(2)
            assert (low["advantage"], high["advantage"]) == pytest.approx(
                (0, 0) if equal else (-(0.5**0.5), 0.5**0.5), abs=1e-3
            )
        assert len(discarded) == len(written) * row["groups/discarded_share"]
        assert sum(one["num_tokens"] for one in discarded) == row["completions/discarded_tokens"]
        assert sum(one["reward"] for one in written) / len(written) == pytest.approx(row["reward/mean"])
        # Endless problems are numbered, and none is left out.
        assert {int(one["problem_id"].rpartition("/")[2]) for one in written} == {
            *range(drawn, drawn + row["groups/generated"])
        }
        drawn += row["groups/generated"]
    assert load_train_state(checkpoints(folder / "run")[-1][1]).drawn == drawn


def test_a_round_smaller_than_the_batch_is_refused() -> None:
    with pytest.raises(UserError, match="prompts_per_round = 3: must hold a batch, data.prompts_per_step = 4"):
        config(4, dynamic_rounds=2, prompts_per_round=3)
