"""Environments of a real OpenEnv server on the loopback."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

pytest.importorskip("openenv.core")

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_fastapi_app,
)

from threepo.config import EnvironmentConfig
from threepo.environment import Turn
from threepo.errors import UserError
from threepo.plugins.openenv import BadAction, observation_text, reply_action
from threepo.rollout.environments import Environments
from threepo.types import Problem


class Guess(Action):
    number: int


class Answer(Observation):
    hint: str


class Game(Environment):
    """Guess a number, the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int = 0, **_: Any) -> Answer:
        self.secret, self.tries = seed, 0
        return Answer(hint="Guess!")

    def step(self, action: Guess, **_: Any) -> Answer:
        if action.number < 0:
            raise ArithmeticError("negative")
        self.tries += 1
        right = action.number == self.secret
        hint = "lower" if action.number > self.secret else "higher"
        return Answer(hint=hint, done=right, reward=right)

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


class Desk(MCPEnvironment):
    """Has a tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("desk")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            self.added += 1
            return a + b

        self.added = 0
        super().__init__(server)

    def reset(self, **_: Any) -> Observation:
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State(step_count=self.added)


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def settings(url: str, **more: str) -> EnvironmentConfig:
    return EnvironmentConfig(factory="threepo.plugins.openenv:OpenEnv", settings={"url": url, **more}, timeout_s=20.0)


def test_sessions_are_episodes_of_their_own() -> None:
    problems = [Problem(str(seed), "", columns={"seed": seed}) for seed in (3, 5)]
    with served(create_fastapi_app(Game, Guess, Answer, max_concurrent_envs=2)) as url:
        with closing(Environments(settings(url))) as environments:
            for _ in range(2):  # sessions of the step before have ended
                environments.begin(2)
                begun = environments.call({i: ("reset", problem, 1) for i, problem in enumerate(problems)})
                assert [answer.value for answer in begun.values()] == ["Guess!"] * 2
            assert environments.call({0: ("step", "<think>4</think> 4"), 1: ("step", '```\n{"number": 4}\n```')}) == {
                0: (Turn("lower"), ""),
                1: (Turn("higher"), ""),
            }
            mistaken = environments.call({0: ("step", "four"), 1: ("step", '{"n": 4}')})
            assert all("error: Invalid message" in outcome.value.observation for outcome in mistaken.values())
            found = environments.call({0: ("step", "3"), 1: ("step", "-1")})
            assert found[0].value == Turn("higher", 1.0, True)
            assert "RuntimeError: OpenEnv: negative" in found[1].failure
            environments.begin(3)
            crowd = environments.call(dict.fromkeys(range(3), ("reset", problems[0], 1))).values()
            (failure,) = (outcome.failure for outcome in crowd if outcome.failure)
            assert "let it have a session for each episode of a step (max_concurrent_envs)" in failure
        own = settings(url, observation="worlds:doubled_hint", action="worlds:number_action")
        with closing(Environments(own)) as environments:
            environments.begin(1)
            assert environments.call({0: ("reset", problems[0], 1)})[0].value == "Guess!Guess!"
            assert environments.call({0: ("step", "two")})[0].value == Turn("higherhigher")
    with pytest.raises(UserError, match="no OpenEnv server answers there"):
        Environments(settings(url))


def test_tools_of_an_mcp_environment() -> None:
    with (
        served(create_fastapi_app(Desk, CallToolAction, CallToolObservation, max_concurrent_envs=2)) as url,
        closing(Environments(settings(url))) as environments,
    ):
        (tool,) = environments.tools
        assert tool["function"]["name"] == "add"
        assert tool["function"]["description"] == "Add two numbers."
        assert tool["function"]["parameters"]["required"] == ["a", "b"]
        environments.begin(1)
        environments.call({0: ("reset", Problem("p", ""), 1)})
        calls = [("add", {"a": 2, "b": 3}), ("add", {"a": 2}), ("sub", {}), ("add", "2")]
        turn = environments.call({0: ("tools", calls, "")})[0].value
        texts = [message["content"] for message in turn.observation]
        assert texts[0] == "5"
        assert all(text.startswith("error: ") for text in texts[1:])
        assert environments.call({0: ("step", "5")})[0].value == Turn(done=True)


def test_default_texts_and_actions() -> None:
    assert observation_text({"said": "hi", "metadata": {"a": "b"}}) == "hi"
    assert observation_text({"phase": "playing", "moves": [0, 1]}) == '{"phase": "playing", "moves": [0, 1]}'
    assert observation_text({"a": "x", "b": "y", "c": None}) == '{"a": "x", "b": "y"}'
    text = {"required": ["message"], "properties": {"message": {"type": "string"}}}
    assert reply_action("<think>hm</think>7", text) == {"message": "7"}
    assert reply_action("[" * 100_000, text) == {"message": "[" * 100_000}
    with pytest.raises(BadAction, match="the fields a, b"):
        reply_action("7", {"properties": {"a": {}, "b": {}}})
