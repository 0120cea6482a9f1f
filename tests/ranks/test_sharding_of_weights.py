"""Whole weights, gathered by ranks that may fail."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from threepo.posterior.policy_optimizer import Weights
from threepo.ranks.sharding import GatheredWeights
from threepo.ranks.world import RankError
from threepo.types import Draw


class Source:
    """Counts what is read."""

    def __init__(self) -> None:
        self.read: list[tuple[Draw | None, str]] = []

    def weights(
        self, draw: Draw | None, into: Weights | None = None, *, gather: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        assert gather
        for name in ("a", "b", "c"):
            self.read.append((draw, name))
            yield name, torch.zeros(1)


def test_a_rank_that_fails_while_it_loads_reads_what_the_others_wait_for() -> None:
    source, draw, other = Source(), Draw(0, 0, 0), Draw(0, 0, 1)
    gathered = GatheredWeights(source, draw, 1, 2, {})

    def load() -> None:
        for name, _ in gathered.weights(other):
            if name == "a":
                raise RuntimeError("no memory")

    with pytest.raises(RuntimeError):
        load()
    gathered.finish()
    assert source.read == [(other, "a"), (other, "b"), (other, "c"), (draw, "a"), (draw, "b"), (draw, "c")]


def test_a_rank_that_cannot_make_a_draw_leaves_at_once() -> None:
    """It would take part in collectives of other tensors than those that the others wait for."""

    class Failing(Source):
        def weights(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in super().weights(*arguments, **options):
                if name == "b":
                    raise RuntimeError("no memory")
                yield name, value

    source, draw, other = Failing(), Draw(0, 0, 0), Draw(0, 0, 1)
    gathered = GatheredWeights(source, draw, 1, 2, {})
    with pytest.raises(RankError, match="no memory"):
        list(gathered.weights(other))
    gathered.finish()
    assert source.read == [(other, "a"), (other, "b")]


def test_a_rank_with_fewer_draws_has_gathered_all_before_it_turns_to_its_engine() -> None:
    source, draw, own = Source(), Draw(0, 0, 0), Draw(0, 0, 1)
    gathered = GatheredWeights(source, draw, 1, 2, {})
    assert len(list(gathered.weights(own))) == 3
    assert [of for of, _ in source.read] == [own] * 3 + [draw] * 3
    gathered.finish()
    assert len(source.read) == 6, "read a third time"
