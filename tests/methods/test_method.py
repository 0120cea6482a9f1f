"""The lattice: which draws, which rows, which weights the gradient is taken at."""

from dataclasses import replace

import pytest

from factories import completion
from threepo.config import Correction, Method, SamplingConfig
from threepo.config.method import B3PO, C3PO, C3PO_REPLAY, GRPO, M3PO, THOMPSON
from threepo.config.presets import PRESETS
from threepo.errors import UserError
from threepo.methods.method import (
    credit,
    flat_groups,
    gradient_draws,
    requests,
    rollout_draws,
    split_batch,
    training_batch,
)
from threepo.types import Draw, Group, Problem

SAMPLING = SamplingConfig()
PROBLEMS = [(Problem(id=f"p{i}", prompt=f"p{i}"), (1, 2, i)) for i in range(3)]


def groups_of(method: Method, rewards: dict[tuple[int, int], float] | None = None) -> list[Group]:
    """Credited completions as an engine would return them for three prompts; rewards by (prompt, rollout)."""
    made = requests(PROBLEMS, rollout_draws(method, 1, 2), method.rollouts_per_prompt)
    rows = [
        completion(
            request.problem.id,
            request.rollout,
            draw=request.draw,
            reward=(rewards or {}).get((int(request.problem.id[1:]), request.rollout), 0.0),
        )
        for request in made
    ]
    return credit(method, rows[::-1])[::-1]  # the order of arrival must not matter


def test_the_table_of_the_design() -> None:
    rows = {
        "grpo": (0, "prompt", "mean", "none", "adamw"),
        "b3po": (1, "prompt", "generator", "none", "ivon"),
        "m3po": (4, "draw", "generator", "none", "ivon"),
        "c3po": (4, "prompt", "fresh", "seq_mis", "ivon"),
        "c3po_replay": (4, "prompt", "generator", "none", "ivon"),
        "thompson": (16, "prompt", "fresh", "none", "ivon"),
    }
    for name, row in rows.items():
        m = PRESETS[name].method
        assert (m.draws, m.advantages, m.gradient_at, m.correction.kind, m.optimizer) == row, name
    assert (C3PO.correction.low, C3PO.correction.high, C3PO.correction.weight) == (0.5, 2.0, "ratio")
    assert THOMPSON.greedy
    assert THOMPSON.draws == THOMPSON.rollouts_per_prompt
    assert M3PO.group_size == 4
    assert C3PO.group_size == 16


def test_draws_of_a_step_are_distinct_and_addressed_by_it() -> None:
    assert rollout_draws(GRPO, 1, 2) == [None]
    assert rollout_draws(C3PO, 1, 2) == [Draw(1, 2, i) for i in range(4)]
    method = replace(C3PO, gradient_draws=2)
    fresh = gradient_draws(method, 1, 2)
    assert not set(fresh) & set(rollout_draws(method, 1, 2))
    assert len(set(fresh)) == 2


@pytest.mark.parametrize("method", [row.method for row in PRESETS.values()], ids=list(PRESETS))
def test_every_draw_writes_its_even_share_of_every_prompt(method: Method) -> None:
    draws = rollout_draws(method, 1, 2)
    made = requests(PROBLEMS, draws, method.rollouts_per_prompt)
    assert len(made) == 3 * method.rollouts_per_prompt
    for problem, tokens in PROBLEMS:
        mine = [request for request in made if request.problem is problem]
        assert [request.rollout for request in mine] == list(range(method.rollouts_per_prompt))
        assert {request.prompt_tokens for request in mine} == {tokens}
        for draw in draws:
            assert sum(request.draw == draw for request in mine) == method.rollouts_per_prompt // len(draws)


def test_groups_are_put_back_in_order() -> None:
    groups = groups_of(C3PO)
    assert [group.problem.id for group in groups] == ["p0", "p1", "p2"]
    for group in groups:
        assert [c.rollout for c in group.completions] == list(range(16))
        assert [c.draw.index for c in group.completions] == [n for n in range(4) for _ in range(4)]


def test_pooled_advantages_compare_across_draws_and_separate_ones_do_not() -> None:
    """Draw 0 solves everything and the others nothing: pooled, that is signal; per draw, there is none."""
    rewards = {(0, i): 1.0 for i in range(4)}
    pooled = groups_of(C3PO, rewards)
    assert min(pooled[0].advantages[:4]) > 0 > max(pooled[0].advantages[4:])
    assert [flat_groups(C3PO, group) for group in pooled] == [[False], [True], [True]]
    separate = groups_of(M3PO, rewards)
    assert not any(value for group in separate for value in group.advantages)
    assert [flat_groups(M3PO, group) for group in separate] == [[True] * 4] * 3


def test_where_the_gradient_is_taken() -> None:
    def draws_of(method: Method) -> list[tuple[Draw | None, int]]:
        batch = training_batch(method, SAMPLING, groups_of(method), 1, 2)
        return [(draw, len(rows)) for draw, rows in batch.parts.items()]

    assert draws_of(GRPO) == [(None, 48)]
    assert draws_of(B3PO) == [(Draw(1, 2, 0), 48)]
    assert draws_of(C3PO) == [(Draw(1, 2, 4), 48)]
    assert draws_of(replace(C3PO, gradient_draws=2)) == [(Draw(1, 2, 4), 48), (Draw(1, 2, 5), 48)]
    # With one generator, the first gradient draw is that generator (paper section 5.3).
    assert draws_of(replace(C3PO, draws=1)) == draws_of(B3PO)
    assert draws_of(replace(C3PO, draws=1, gradient_draws=2)) == [(Draw(1, 2, 0), 48), (Draw(1, 2, 1), 48)]
    for method in (M3PO, C3PO_REPLAY):
        assert draws_of(method) == [(Draw(1, 2, i), 12) for i in range(4)]
        for draw, rows in training_batch(method, SAMPLING, groups_of(method), 1, 2).parts.items():
            assert {row.completion.draw for row in rows} == {draw}


def test_the_batch_carries_the_correction_that_applies() -> None:
    def correction_of(method: Method, sampling: SamplingConfig = SAMPLING) -> Correction | None:
        return training_batch(method, sampling, groups_of(method), 1, 2).correction

    assert correction_of(C3PO) == C3PO.correction
    assert correction_of(replace(C3PO, draws=1)) == Correction(), "the generator's own gradient is on-policy"
    assert correction_of(replace(C3PO, draws=1, gradient_draws=2)) == C3PO.correction
    for_the_engine = replace(B3PO, correction=Correction(kind="token_tis"))
    assert correction_of(for_the_engine) == for_the_engine.correction, "the engine's log-probs may differ all the same"
    for cut in (SamplingConfig(top_p=0.9), SamplingConfig(top_k=5)):
        assert correction_of(replace(C3PO, correction=Correction()), cut) is None
        assert correction_of(THOMPSON, cut) == Correction(), "greedy decoding cuts nothing"


def test_the_trainer_has_the_temperature_of_the_rollouts() -> None:
    warm = SamplingConfig(temperature=1.4)
    assert training_batch(GRPO, warm, groups_of(GRPO), 1, 2).temperature == 1.4
    assert training_batch(THOMPSON, warm, groups_of(THOMPSON), 1, 2).temperature == 1, "of greedy rollouts: 1"


def test_rows_are_numbered_prompt_major() -> None:
    batch = training_batch(C3PO_REPLAY, SAMPLING, groups_of(C3PO_REPLAY), 1, 2)
    for rows in batch.parts.values():
        for row in rows:
            assert row.index == int(row.completion.problem.id[1:]) * 16 + row.completion.rollout


def test_fewer_prompts_than_mini_batches_make_a_mini_batch_each() -> None:
    batch = training_batch(GRPO, SAMPLING, groups_of(GRPO), seed=0, step=0)
    assert [len(piece.parts[None]) for piece in split_batch(batch, 8)] == [GRPO.rollouts_per_prompt] * 3


def test_several_fresh_draws_count_alike_whatever_a_correction_drops() -> None:
    method = replace(C3PO, gradient_draws=2)
    assert training_batch(method, SAMPLING, groups_of(method), seed=0, step=0).normalize == "part"
    assert training_batch(C3PO, SAMPLING, groups_of(C3PO), seed=0, step=0).normalize == "step"


def test_draws_of_a_stream_do_not_count_alike_as_they_have_different_numbers_of_groups() -> None:
    fresh = replace(C3PO, gradient_draws=2)
    for method, mixed, expected in ((M3PO, False, "part"), (M3PO, True, "step"), (fresh, True, "part")):
        batch = training_batch(method, SAMPLING, groups_of(method), 0, 0, mixed=mixed)
        assert batch.normalize == expected, (method.name, mixed)


@pytest.mark.parametrize("method", [GRPO, C3PO, C3PO_REPLAY, M3PO], ids=lambda m: m.name)
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_mini_batches_keep_prompts_together_and_lose_nothing(method: Method, pieces: int) -> None:
    batch = training_batch(method, SAMPLING, groups_of(method), 1, 2)
    minis = split_batch(batch, pieces)
    assert len(minis) == pieces
    prompts = [{row.completion.problem.id for part in mini.parts.values() for row in part} for mini in minis]
    assert sum(map(len, prompts)) == 3
    for mini in minis:
        assert list(mini.parts) == list(batch.parts)
    rows = sorted(row.index for mini in minis for part in mini.parts.values() for row in part)
    assert rows == list(range(48))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draws": 3}, r"method.draws = 3: must divide method.rollouts_per_prompt = 16; set one of 1, 2, 4, 8, 16"),
        ({"draws": 32}, r"method.draws = 32: must divide"),
        ({"gradient_at": "fresh"}, r"method.gradient_at = 'fresh': needs draws"),
        ({"advantages": "draw"}, r"method.advantages = 'draw': needs draws"),
        ({"draws": 4, "gradient_draws": 2}, r"gradient_draws = 2: only gradient_at = 'fresh'"),
        ({"draws": 4, "greedy": True}, r"greedy = true: .* draws = rollouts_per_prompt \(now 4 and 16\)"),
        (
            {"normalize": "part"},
            r"method.normalize = 'part': only gradient_at = 'generator' has parts .* set normalize",
        ),
        ({"draws": 4, "gradient_at": "fresh", "normalize": "part"}, r"method.normalize = 'part': only"),
        ({"rollouts_per_prompt": 0}, r"rollouts_per_prompt = 0: must be greater than 0"),
    ],
)
def test_points_outside_the_lattice_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Method(**settings)
