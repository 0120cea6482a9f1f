"""The processes of environments: a first one forks one for every episode, which answers the trainer's calls.

They are trusted code: time and memory have limits, and what an environment has started ends with it, but this is no
sandbox. environments.py is the trainer's side.
"""

import ctypes
import fcntl
import inspect
import math
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, NamedTuple

from threepo.config.environment import EnvironmentConfig
from threepo.environment import Turn
from threepo.errors import UserError
from threepo.user_code import described, find_object
from threepo.workers import Outcome, owner

LONGEST_TEXT = 1 << 20
"""Most characters of an observation."""
SWEEPING_S = 5
"""Seconds in which what episodes leave behind must end."""


class Abilities(NamedTuple):
    """The ways to act in an environment."""

    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of the tools."""
    steps: bool
    """True if the class has `step`."""
    ends: bool
    """True if the class has `end`, which hears that an episode is over."""
    pays: bool
    """True if the class has `step` or `call_tools`: an episode without a reward of theirs has earned 0."""


def serve() -> None:
    """The first process: import the class, then fork a process whenever asked."""
    link = owner()
    settings: EnvironmentConfig = link.recv()
    if sys.platform == "linux":  # what an episode leaves behind becomes a child of this process
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    with suppress(ImportError):
        import numpy.random  # noqa: F401  # so that it has a seed, and no fork imports it, which takes 10 ms
    try:
        factory = find_object(settings.factory, "environment.factory")
        link.send(_abilities(factory(**settings.settings), settings.factory))
    except UserError as error:
        link.send(str(error))
        return
    except (Exception, SystemExit) as error:
        link.send(f"environment.factory = {settings.factory!r}: raised {described(error)} when made")
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets children that have ended
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # the end of the link says that the trainer has gone
    shared: set[int] = set()  # what the class has started for all episodes, such as a server
    pid = 0
    try:
        with suppress(EOFError, ConnectionError):  # the trainer has gone
            while (what := link.recv()) != "leave":
                if what == "sweep":
                    if pid:
                        _sweep(shared)
                    shared = _descendants()  # while no episode lives
                    link.send(what)
                    continue
                theirs, life = recv_handle(link), recv_handle(link)
                pid = os.fork()
                if not pid:
                    link.close()
                    _live(factory, settings, Connection(theirs), life)
                os.close(theirs)
                os.close(life)
                link.send(pid)
    finally:
        _sweep(set())  # also where no process can be forked any more
    with suppress(ConnectionError):
        link.send("leave")


def _children(pid: int) -> set[int]:
    """Children of a process, of this one also what these have left behind, on Linux."""
    found: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found |= set(map(int, file.read_text().split()))
    return found


def _descendants() -> set[int]:
    """Children of this process, and all that they have started, which becomes a child of this one if they end."""
    found: set[int] = set()
    new = {os.getpid()}
    while new := {child for pid in new for child in _children(pid)} - found:
        found |= new
    return found


def _sweep(spared: set[int]) -> None:
    """End all children, and what these leave behind, but for some."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # some ended before the kernel was to forget them
            pass
    deadline = time.monotonic() + SWEEPING_S
    while children := _children(os.getpid()) - spared:
        if time.monotonic() > deadline:
            print(f"threepo: processes of environments do not end: {sorted(children)}", file=sys.stderr)
            return
        for pid in children:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _abilities(environment: Any, name: str) -> Abilities:
    """The ways to act in an environment; `UserError` if there is none."""
    tools = list(getattr(environment, "tools", ()))
    steps, ends = (callable(getattr(environment, method, None)) for method in ("step", "end"))
    if not (tools or steps or ends):
        raise UserError(f"environment.factory = {name!r}: has neither `step` nor `tools` nor `end` (docs/episodes.md)")
    own_calls = hasattr(environment, "call_tools")
    if not tools or own_calls:
        return Abilities(tools, steps, ends, steps or own_calls)
    if waits := [tool.__name__ for tool in tools if inspect.iscoroutinefunction(tool)]:
        raise UserError(f"environment.factory = {name!r}: the tool {waits[0]} is a coroutine; make it a function")
    from transformers.utils import get_json_schema

    try:
        return Abilities([get_json_schema(tool) for tool in tools], steps, ends, steps)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"environment.factory = {name!r}: a tool has no schema: {reason}; give it type hints and a docstring with "
            f"a section `Args:`"
        ) from error


def _live(factory: Callable[..., Any], settings: EnvironmentConfig, link: Connection, life: int) -> None:
    """The process of an episode."""
    try:
        os.setsid()  # what it starts ends with it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which the user's terminal does not send here
        fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)
        # What a script starts with `&`, for example, ignores SIGINT.
        for number in (signal.SIGCHLD, signal.SIGIO, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if sys.platform == "linux":  # macOS does not hold a process to its address space
            own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            most = own + settings.memory_mib * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        null = os.open(os.devnull, os.O_RDWR)  # for what libraries print
        for stream in range(3):
            os.dup2(null, stream)
        environment: Any = None
        while True:
            kind, *arguments = link.recv()
            try:
                if kind == "reset":
                    problem, seed = arguments
                    random.seed(seed)
                    if "numpy" in sys.modules:
                        sys.modules["numpy"].random.seed(seed % 2**32)
                    environment = factory(**settings.settings)
                    outcome = Outcome(_reset(environment, problem))
                else:
                    outcome = Outcome(_answer(environment, settings.timeout_s, kind, *arguments))
            except MemoryError:
                outcome = Outcome(failure="memory")
            except (Exception, SystemExit) as error:
                outcome = Outcome(failure=described(error))
            link.send(outcome)
    except Exception:  # seen by the user only before the output goes nowhere
        traceback.print_exc()
    finally:
        os._exit(0)  # no clean-up of the first process may run here


def _reset(environment: Any, problem: Any) -> Any:
    reset = getattr(environment, "reset", None)
    found = reset(problem) if reset else None
    return None if found is None else _observation(found)


def _answer(environment: Any, timeout_s: float, kind: str, *arguments: Any) -> Turn | list[str] | None:
    """An environment's answer to a call; see `Environments.call`."""
    if kind == "step":
        return _turn(environment.step(*arguments))
    if kind == "end":
        last = environment.end(*arguments)
        return None if last is None else _turn(last)
    if hasattr(environment, "call_tools"):
        return _turn(environment.call_tools(*arguments))
    return _use_tools(list(environment.tools), arguments[0], timeout_s)


def _turn(found: Any) -> Turn:
    if not isinstance(found, Turn):
        raise TypeError(f"returned {type(found).__name__}; return a threepo.Turn")
    done: Any = found.done  # of a user's class, whatever its type says
    if isinstance(done, str):  # such as "false" of a model that judges
        raise TypeError(f"returned the text {done!r} as done; return True or False")
    reward = _number("the reward", found.reward)
    metrics = {str(name): _number(str(name), value) for name, value in found.metrics.items()}
    return Turn(_observation(found.observation), reward, bool(done), metrics)


def _number(name: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {value} as {name}; return a finite number")
    return number


def _observation(found: Any) -> Any:
    """A text, or messages of a role and a content, and nothing else that might not survive being sent."""
    if isinstance(found, str):
        if len(found) > LONGEST_TEXT:
            raise ValueError(f"an observation has {len(found)} characters, more than {LONGEST_TEXT}")
        return found.encode("utf-8", "replace").decode()  # no tokenizer takes half of a surrogate pair
    if not isinstance(found, Sequence) or not found or not all(isinstance(message, Mapping) for message in found):
        raise TypeError(f"an observation is {type(found).__name__}; return a text or chat messages")
    if not all(isinstance(message.get(key), str) for message in found for key in ("role", "content")):
        raise TypeError("a message of an observation has no role and content as text")
    return [{key: _observation(message[key]) for key in ("role", "content")} for message in found]


def _use_tools(tools: Sequence[Callable[..., Any]], calls: Sequence[tuple[str, Any]], timeout_s: float) -> list[str]:
    """The result of each call as text; the mistakes of the policy too, which may call again.

    No call begins once half of the time for the whole reply has passed.
    """
    by_name = {tool.__name__: tool for tool in tools}
    results: list[str] = []
    began = time.monotonic()
    for name, arguments in calls:
        if name not in by_name or not isinstance(arguments, Mapping):
            known = ", ".join(by_name)
            results.append(f"error: write a call in the format that the prompt shows, with one of the names {known}")
            continue
        if time.monotonic() - began > timeout_s / 2:
            results.append("error: not run, as earlier calls of this reply took too long")
            continue
        try:
            results.append(_observation(str(by_name[name](**arguments))))
        except MemoryError:
            raise
        except Exception as error:
            results.append(_observation(f"error: {type(error).__name__}: {error}"[:1000]))
    return results
