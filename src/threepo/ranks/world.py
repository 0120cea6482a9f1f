"""The processes of a run, called ranks, as one of them sees them: they share values and errors, and agree.

A process on its own is a world of one. Outside this room nothing asks which rank it is or how many there are: a
function that may run on several ranks gets a `World` and uses its verbs, each of which all ranks call. Objects travel
over gloo, whose waits end after a time limit and which notices at once when a rank has died; a model's tensors travel
over the backend of their device. Torch is imported where it is used, because the command line comes here first.
"""

import io
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from threepo.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
Other = TypeVar("Other")


class RankError(Exception):
    """A failure that a rank reports itself: it cannot tell the others, because they wait for it elsewhere.

    It is no `UserError`, because whoever handles those may go on to exchange something with the other ranks.
    """


class AgreedError(UserError):
    """A failure of one rank that all ranks know of."""


class RankLost(RankError):
    """A collective failed: another rank has ended, or does not answer within the time limit."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"another rank has ended, or does not answer within parallel.timeout_s (inside TRL: ddp_timeout); if it "
            f"has no message of its own, it was killed or is stuck: start again to go on from what is saved "
            f"({in_one_line(error)})"
        )


@dataclass(frozen=True)
class World:
    """All ranks of a run. The fields are for this room alone; the default is a process on its own."""

    rank: int = 0
    """The number of this process, from 0. The first rank writes the run folder and speaks to the user."""
    size: int = 1
    gloo: Any = None
    """The process group for objects; None alone."""
    other_gloo: Any = None
    """The process group for objects of `beside`."""

    @property
    def is_alone(self) -> bool:
        """True for a process on its own, unless its weights are sharded over that one process to offload them."""
        return self.gloo is None

    def beside(self) -> "World":
        """The same ranks for another thread, whose exchanges do not meet the exchanges of this world."""
        return replace(self, gloo=self.other_gloo)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank."""
        if self.size == 1:
            return [value]
        packed = io.BytesIO()
        pickle.dump(value, packed)
        try:
            shares = gather_bytes(packed.getbuffer(), self.size, self.gloo)
        except RuntimeError as error:
            raise RankLost(error) from error
        return [pickle.loads(share) for share in shares]

    def concatenate(self, items: Sequence[T]) -> tuple[list[T], slice]:
        """The items of all ranks in one list, and where this rank's own are in it."""
        shares = self.gather(list(items))
        first = sum(map(len, shares[: self.rank]))
        return [item for share in shares for item in share], slice(first, first + len(items))

    def own(self, items: int) -> range:
        """The indices of this rank's share of so many items; no collective."""
        return range(self.rank, items, self.size)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on every rank an `AgreedError` if the body raises on any; alone, its own error.

        A body must not fail between two collectives of its own, in which other ranks would go on to wait.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1 or isinstance(error, RankError):
                raise
            failure = error
        message = None if failure is None else (isinstance(failure, UserError), in_one_line(failure))
        for rank, told in enumerate(self.gather(message)):
            if told:
                if failure is not None and not isinstance(failure, UserError):
                    traceback.print_exception(failure, file=sys.__stderr__)  # the message has none
                raise AgreedError(told[1] if told[0] else f"rank {rank} failed: {told[1]}") from failure

    def share(self, compute: Callable[[], T]) -> list[T]:
        """Call `compute` on every rank and gather the results; an error on any rank is an `AgreedError` on all."""
        with self.together():
            value = compute()
        return self.gather(value)

    def on_first(self, function: Callable[[], T]) -> T:
        """Call the function on the first rank alone; its result, or its error, is every rank's."""
        results = self.share(lambda: function() if self.rank == 0 else None)
        return results[0]  # type: ignore[return-value]

    def only_first(self, make: Callable[[], T], others: Other) -> T | Other:
        """Call `make` on the first rank, which gets its result; the others get `others`. An error is every rank's."""
        with self.together():
            return make() if self.rank == 0 else others

    def deal(self, owners: Sequence[int], compute: Callable[[list[int]], list[T]]) -> list[T]:
        """Divide items among the ranks; returns the results in the items' order, on every rank.

        `owners` has the rank of every item; `compute` gets the indices of this rank's items.
        """
        mine = [index for index, owner in enumerate(owners) if owner == self.rank]
        shares = [iter(results) for results in self.share(lambda: compute(mine))]
        return [next(shares[owner]) for owner in owners]

    def agree(self, facts: Mapping[str, Any], fix: str, everywhere: bool = False) -> None:
        """Raise an `AgreedError` on every rank if two ranks have different values for a fact that both name.

        `facts` by the words of the message, which ends in `fix`; values are compared by their `repr`. `everywhere`: it
        also counts as a difference if a rank does not name a fact.
        """
        told = self.gather({name: repr(value) for name, value in facts.items()})
        differing = {}
        for name in dict.fromkeys(name for own in told for name in own):
            holders: dict[str, list[int]] = {}
            for rank, own in enumerate(told):
                if name in own or everywhere:
                    holders.setdefault(own.get(name, "nothing"), []).append(rank)
            if len(holders) > 1:
                differing[name] = "; ".join(f"{value} on {_listed(ranks)}" for value, ranks in holders.items())
        if differing:
            (name, values), more = next(iter(differing.items())), list(differing)[1:4]
            also = f"; they also disagree about {', '.join(more)}" if more else ""
            raise AgreedError(f"the ranks disagree about {name}: {values}{also}. {fix[0].upper()}{fix[1:]}")

    def all_know(self, error: BaseException) -> bool:
        """True if every rank has this error, so that all can do something together before they end."""
        return self.size == 1 or isinstance(error, AgreedError)

    def console(self) -> "Console":
        """Standard error for progress; only the first rank prints."""
        from threepo.progress import stderr_console

        return stderr_console(quiet=self.rank > 0)


PADDED_BYTES = 1 << 20
"""What every rank may receive in one exchange with padding, however unevenly it is shared out."""
ALONE = World()
"""A process that torchrun did not start."""


def gather_bytes(own: memoryview, size: int, group: Any) -> list[memoryview]:
    """The bytes of all ranks of a gloo group, in their order, on every rank.

    Torch's `all_gather_object` pads each share to the largest. If only a few of many ranks have a large one, such as
    those that drive inference servers, memory for that does not suffice; then shares are sent one by one.
    """
    import torch
    import torch.distributed as dist

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.uint8, device="cpu")  # whatever the caller's default device is

    mine = torch.frombuffer(own, dtype=torch.uint8)
    lengths = torch.zeros(size, dtype=torch.int64, device="cpu")
    dist.all_gather(list(lengths.view(size, 1)), torch.tensor([len(own)], device="cpu"), group=group)
    longest, total = int(lengths.max()), int(lengths.sum())
    if longest * size <= max(PADDED_BYTES, 2 * total):
        padded, joined = empty(longest), empty(size, longest)
        padded[: len(own)] = mine
        dist.all_gather(list(joined), padded, group=group)
        return [share.numpy().data[:length] for share, length in zip(joined, lengths.tolist(), strict=True)]
    rank = dist.get_rank(group)
    shares = [mine if source == rank else empty(length) for source, length in enumerate(lengths.tolist())]
    for source, share in enumerate(shares):
        dist.broadcast(share, group=group, group_src=source)
    return [share.numpy().data for share in shares]


def _listed(ranks: Sequence[int]) -> str:
    """The numbers of ranks, for a message; only the first of many."""
    some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"


def is_lost(error: BaseException) -> bool:
    """True if an error comes from a collective, of FSDP2 or of shards, that another rank did not take part in."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def in_one_line(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Let torch compute in so many threads within the body; 0 leaves its own choice."""
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count or before)
        yield
    finally:
        torch.set_num_threads(before)
