"""The ranks of a run: which of them this process is, what they exchange, and what they agree on.

torchrun starts one process for each device, and tells it by environment variables who it is. Nothing but this room asks
how many ranks there are (only `workers` asks with how many it shares a machine). Objects travel over gloo, whose
waits end after a time limit and which notices at once when a rank has died; a model's tensors travel over the backend
of their device. Torch is imported only for use, because the command line asks here who speaks.
"""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

from threepo.errors import UserError

T = TypeVar("T")

_LAST_WORDS_S = 5.0
"""Seconds in which a rank that has lost another says so, before its neighbours end it."""
_PR_SET_PDEATHSIG = 1
"""From <sys/prctl.h>: the signal that a process gets when its parent ends."""


class RankError(Exception):
    """A failure that a rank says itself: it cannot tell the others, because they wait for it elsewhere.

    No `UserError`, because what handles those may go on to exchange something with the other ranks.
    """


class AgreedError(UserError):
    """A failure of one rank that all ranks know of."""


class RankLost(RankError):
    """A collective failed: another rank has ended, or does not answer within the time limit."""

    neighbours: Sequence[int]
    """Handles of the processes of the other ranks that the same torchrun has started, for `end_neighbours`."""

    def __init__(self, error: BaseException, neighbours: Sequence[int] = ()) -> None:
        self.neighbours = neighbours
        super().__init__(
            f"another rank has ended, or does not answer within parallel.timeout_s; if it has no message of its own, "
            f"it was killed or is stuck: start again to go on from what is saved ({words_of(error)})"
        )


@dataclass(frozen=True)
class Ranks:
    """All ranks of a run, seen from one of them. The default is a process on its own."""

    rank: int = 0
    """The number of this process, from 0."""
    size: int = 1
    """How many there are."""
    gloo: Any = None
    """The process group for objects; None alone."""

    @property
    def first(self) -> bool:
        """Whether this rank writes the run folder and speaks to the user."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank. All must call, as for every method below."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, value, group=self.gloo)
        except RuntimeError as error:
            raise RankLost(error) from error
        return found

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

    def deal(self, owners: Sequence[int], compute: Callable[[list[int]], list[T]]) -> list[T]:
        """Lets each rank compute the items that it owns; returns all results in the order of the items, on every rank.

        `owners` has the rank of every item; `compute` gets the indices of this rank's items. What it raises on one
        rank is raised on all.
        """
        mine = [index for index, owner in enumerate(owners) if owner == self.rank]
        with self.together():
            computed = compute(mine)
        shares = [iter(share) for share in self.gather(computed)]
        return [next(shares[owner]) for owner in owners]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on every rank an `AgreedError` if the body raised on any; alone, its own error.

        A body must not fail between two collectives of its own that other ranks would go on to wait in.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1 or isinstance(error, RankError):
                raise
            failure = error
        if self.size == 1:
            return
        found = self.gather(None if failure is None else (isinstance(failure, UserError), words_of(failure)))
        failed = [(rank, *told) for rank, told in enumerate(found) if told]
        if not failed:
            return
        rank, is_users, words = failed[0]
        if failure is not None and not isinstance(failure, UserError):
            traceback.print_exception(failure, file=sys.__stderr__)  # the message has none
        raise AgreedError(words if is_users else f"rank {rank} failed: {words}") from failure


def _listed(ranks: Sequence[int]) -> str:
    """Ranks by their numbers, for a message; only the first of many."""
    some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"


ALONE = Ranks()
"""A process that torchrun did not start."""


def started() -> Ranks:
    """This process among those that torchrun has started, which have not met yet."""
    return Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))


@contextmanager
def joined(timeout_s: float) -> Iterator[Ranks]:
    """Meet the other ranks that torchrun has started, for the body. Alone, there is nobody to meet.

    A rank that waits longer than `timeout_s` for another, or whose partner has ended, raises `RankLost`.
    """
    here = started()
    if here.size == 1:
        yield ALONE
        return
    import torch
    import torch.distributed as dist

    patience = timedelta(seconds=timeout_s)
    if sys.platform == "linux":  # torchrun itself may be killed; then its ranks are asked to stop, and save
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    has_gpus = torch.cuda.is_available()
    if has_gpus:  # a scheduler may have shown each rank its own GPU alone, which is number 0 there
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if torch.cuda.device_count() > 1 else 0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo", timeout=patience)
    gloo = dist.new_group(backend="gloo", timeout=patience)
    here = replace(here, gloo=gloo)
    neighbours = _neighbours(here)
    try:
        # A rank that closes its connections early may close them on another's last collective.
        try:
            yield here
        except AgreedError:  # which all ranks have
            with suppress(RuntimeError):
                dist.barrier(group=gloo)
            raise
        dist.barrier()
    except RankLost as lost:
        lost.neighbours = neighbours
        raise
    except RuntimeError as error:
        if is_lost(error):
            raise RankLost(error, neighbours) from error
        raise
    finally:
        dist.destroy_process_group()


def _neighbours(here: Ranks) -> list[int]:
    """Handles of the processes of the other ranks of this node's torchrun; none where the system has no handles."""
    node, me = (os.environ.get("GROUP_RANK"), os.getppid()), os.getpid()
    found = here.gather((node, me))
    if sys.platform != "linux" or not hasattr(os, "pidfd_open") or not node[0]:
        return []
    with suppress(OSError):  # an old kernel, or a container that forbids it
        return [os.pidfd_open(process) for where, process in found if where == node and process != me]
    return []


def end_neighbours(neighbours: Sequence[int]) -> None:
    """End the ranks of these handles, which cannot go on either, once those that know it have had time to say so.

    A stuck rank does not obey torchrun's SIGTERM, and torchrun's time limit is long, so that a step can be saved.
    """
    time.sleep(_LAST_WORDS_S)
    for process in neighbours:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)


def is_lost(error: BaseException) -> bool:
    """Whether an error comes from a collective, of FSDP2 or of shards, that another rank did not take part in."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def words_of(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
