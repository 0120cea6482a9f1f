"""Small records for tests."""

from collections.abc import Sequence

import torch

from threepo.models.packing import flatten
from threepo.types import Completion, CreditedRow, Draw, MicroBatch, Problem, Row, Verdict, integers, numbers


def completion(
    prompt: str = "p0",
    rollout: int = 0,
    *,
    reward: float = 0.0,
    tokens: Sequence[int] = (11, 12, 13),
    logprobs: Sequence[float] | None = None,
    prompt_tokens: Sequence[int] = (5, 6),
    draw: Draw | None = None,
    status: str | None = None,
) -> Completion:
    """A graded completion."""
    correct = reward >= 1
    return Completion(
        problem=Problem(id=prompt, prompt=prompt),
        prompt_tokens=tuple(prompt_tokens),
        tokens=integers(tokens),
        logprobs=numbers(logprobs if logprobs is not None else [-1.0] * len(tokens)),
        text="text",
        finish_reason="stop",
        draw=draw,
        rollout=rollout,
        policy_step=0,
        verdict=Verdict(correct, status or ("right" if correct else "wrong"), "x", reward),  # type: ignore[arg-type]
    )


def answered(problem: Problem, text: str, tokens: Sequence[int] = (1,), opening: str = "") -> Completion:
    """A completion of a problem that is not graded yet."""
    logprobs = numbers([-1.0] * len(tokens))
    return Completion(problem, (5, 6), None, 0, integers(tokens), logprobs, text, "stop", 0, opening)


def row(index: int = 0, advantage: float = 1.0, **fields: object) -> CreditedRow:
    """A row around a completion with these fields."""
    return CreditedRow.of(completion(**fields), index, advantage)  # type: ignore[arg-type]


def packed(tokens: torch.Tensor, mask: torch.Tensor) -> MicroBatch:
    """Rows of tokens [R, L], padded on the right; the loss counts token t + 1 where `mask` [R, L-1] is true at t."""
    rows = []
    for index, (ids, counted) in enumerate(zip(tokens.tolist(), mask.tolist(), strict=True)):
        ranges = tuple((t + 1, t + 2) for t, is_counted in enumerate(counted) if is_counted)
        rows.append(Row(index, tuple(ids[: ranges[-1][1]]), ranges))
    return flatten(rows, tokens.device)
