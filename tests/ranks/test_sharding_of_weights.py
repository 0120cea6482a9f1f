"""Whole weights, gathered by ranks that may fail."""

from collections.abc import Iterator

import pytest
import torch

from threepo.posterior.policy_optimizer import Weights
from threepo.ranks.sharding import Gathered
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
    gathered = Gathered(source, draw)

    def load() -> None:
        for name, _ in gathered.weights(other):
            if name == "a":
                raise RuntimeError("no memory")

    with pytest.raises(RuntimeError):
        load()
    gathered.gather_until(2)
    assert source.read == [(other, "a"), (other, "b"), (other, "c"), (draw, "a"), (draw, "b"), (draw, "c")]
