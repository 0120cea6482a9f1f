"""Environments made for TRL's `environment_factory`: a class with `reset`, tools as public methods, and `get_reward`.

    [environment]
    factory = "threepo.plugins.trl_environment:TRLEnvironment"
    settings = { factory = "my_module:MyEnvironment" }

What TRL does: `reset` gets the row of the data, and what it returns is added to the last message of the prompt.
Tools and `get_reward` may be coroutines, which run one after the other within an episode.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

from threepo.environment import Observation, Turn
from threepo.types import Problem
from threepo.user_code import find_object

NO_TOOLS = ("reset", "get_reward")
"""Public methods that are no tools."""


class TRLEnvironment:
    """An object of a class made for TRL; a reply that calls no tool ends the episode. It earns `get_reward()`."""

    def __init__(self, factory: str, **settings: Any) -> None:
        """`settings`: arguments of the class, by name."""
        self._loop: asyncio.AbstractEventLoop | None = None  # one, so that what a coroutine opens the next one can use
        self._own = find_object(factory, "environment.factory")(**settings)
        methods = (name for name, _ in inspect.getmembers(type(self._own), inspect.isfunction))
        names = (name for name in methods if name not in NO_TOOLS and not name.startswith("_"))
        self.tools: list[Callable[..., object]] = [self._waiting(getattr(self._own, name)) for name in names]

    def reset(self, problem: Problem) -> Observation | None:
        """TRL's `reset`, and the prompt with what it returns."""
        prompt = problem.prompt if isinstance(problem.prompt, str) else [dict(message) for message in problem.prompt]
        answer = {"answer": problem.answer} if problem.answer else {}  # published problems have no such column
        told = self._own.reset(**{"prompt": prompt, **answer, **problem.columns})
        if told is None:
            return None
        if not isinstance(told, str):
            raise TypeError(f"reset returned {type(told).__name__}; return a text or None")
        if isinstance(prompt, str):
            return prompt + told
        *before, last = prompt
        return [*before, {**last, "content": last["content"] + told}]

    def end(self, reply: str) -> Turn | None:
        """The reward, at a limit too; None where the class has none, and a reward function is to judge."""
        if not hasattr(self._own, "get_reward"):
            return None
        reward = self._waiting(self._own.get_reward)()
        if reward is None:
            raise ValueError("get_reward returned None; return a number, as every episode is paid here")
        return Turn(reward=reward)

    def _waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A coroutine as a function that waits for it; a function as it is."""
        if not inspect.iscoroutinefunction(method):
            return method

        @functools.wraps(method)
        def wait(*arguments: Any, **named: Any) -> Any:
            self._loop = self._loop or asyncio.new_event_loop()
            return self._loop.run_until_complete(method(*arguments, **named))

        return wait
