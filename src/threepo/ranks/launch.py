"""Start and end of a rank: torchrun starts a process for each device, and tells it by environment variables who it is.

Before the ranks have met, they can only know their numbers; so one may speak for all, and ends wait for each other.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from itertools import count
from typing import Any, NoReturn

from threepo.ranks.world import ALONE, AgreedError, RankError, RankLost, World, is_lost

_PATIENCE_S = 15.0
"""Seconds in which the first rank can report what all have to report; it may take so long to end its engine."""
_LAST_WORDS_S = 5.0
"""Seconds in which another rank may say why it has ended, before a rank that has lost it ends all."""
_met: list[tuple[Any, int, int]] = []
_meetings = count()
_PR_SET_PDEATHSIG = 1
"""Constant of <sys/prctl.h>: the signal that a process gets when its parent ends."""


def ranks_started() -> int:
    """Number of ranks that torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def _store(patience: timedelta) -> tuple[Any, int, int]:
    """Torchrun's store, this rank and the number of ranks; without torchrun's, the first rank opens one, once."""
    import torch.distributed as dist

    if ranks_started() == 1:
        return dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    if not _met:
        _met.append(next(iter(dist.rendezvous("env://", timeout=patience))))  # type: ignore[attr-defined]
    return _met[0]


@contextmanager
def join_world(timeout_s: float, offload: bool = False) -> Iterator[World]:
    """Meet the other ranks that torchrun has started, for the body. Alone, there is nobody to meet.

    A rank that waits longer than `timeout_s` for another, or whose partner has ended, raises `RankLost`. With
    `offload`, a process on its own is a world of one rank: FSDP2, which moves the weights, works in such a group only.
    """
    if ranks_started() == 1 and not offload:
        yield ALONE
        return
    import torch
    import torch.distributed as dist

    patience = timedelta(seconds=timeout_s)
    if sys.platform == "linux" and ranks_started() > 1:
        # Torchrun itself may be killed: its ranks are then asked to stop, and save.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    has_gpus = torch.cuda.is_available()
    if has_gpus:  # a scheduler may have shown each rank its own GPU alone, which is number 0 there
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    store, rank, size = _store(patience)
    store.set_timeout(patience)
    # Torch counts its groups anew each time, and would find the addresses of the last meeting under their names.
    meeting = dist.PrefixStore(f"meeting-{next(_meetings)}", store)  # type: ignore[attr-defined]
    backend = "cpu:gloo,cuda:nccl" if has_gpus else "gloo"
    dist.init_process_group(backend, timeout=patience, store=meeting, rank=rank, world_size=size)
    groups = (dist.new_group(backend="gloo", timeout=patience) for _ in range(2))
    world = World(rank, size, *groups)
    try:
        # A rank that closes its connections early may close them on another's last collective.
        try:
            yield world
        except AgreedError:  # which all ranks have
            with suppress(RuntimeError):
                dist.barrier(group=world.gloo)
            raise
        dist.barrier()
    except RuntimeError as error:
        if "Duplicate GPU" in str(error):
            raise RankError("several ranks share a GPU: start one for each, or set model.device = 'cpu'") from error
        if is_lost(error):
            raise RankLost(error) from error
        raise
    finally:
        dist.destroy_process_group()


@contextmanager
def one_voice() -> Iterator[None]:
    """Within the body, only the first rank prints: the others print the same."""
    if _rank() == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def report_end(message: str, failure: type[Exception] | None = None) -> None:
    """Print why this rank ends, once for all ranks that have the same reason; torchrun ends all when one has ended."""
    rank = _rank()
    if rank == 0:
        print(f"threepo: {message}", file=sys.stderr, flush=True)
    else:
        if not (failure and issubclass(failure, RankError)):
            time.sleep(_PATIENCE_S if failure else 1.0)
        if failure and not issubclass(failure, AgreedError):  # still here, so the first has not failed
            print(f"threepo: rank {rank}: {message}", file=sys.stderr, flush=True)
    if failure and issubclass(failure, RankLost):
        time.sleep(_LAST_WORDS_S)


def leave(status: int) -> NoReturn:
    """End this process with an exit status."""
    if ranks_started() > 1:
        # Without the interpreter's end: meshes of devices keep their gloo groups alive, and a thread of such a group
        # that lets go of a tensor then aborts the process ("terminate called without an active exception").
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
