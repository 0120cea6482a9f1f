"""Environments behind an OpenEnv server (https://github.com/meta-pytorch/OpenEnv), one session for each episode.

    [environment]
    factory = "threepo.plugins.openenv:OpenEnv"
    settings = { url = "http://127.0.0.1:8000" }

A session is a WebSocket: OpenEnv's `POST /reset` and `POST /step` make a new environment for every request. Columns of
the row are arguments of its `reset`, such as `seed`. Tools of an MCP environment become tools of the policy.
"""

import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from threepo.environment import Observation, Turn
from threepo.errors import UserError
from threepo.types import Problem, final_answer
from threepo.user_code import find_object

MCP_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the action schema of environments whose only actions are calls of tools."""
LONGEST_MESSAGE = 100 << 20
"""Bytes of a message, as OpenEnv's own client allows."""


class OpenEnv:
    """A session of an OpenEnv server."""

    def __init__(self, url: str, observation: str = "", action: str = "") -> None:
        """`url` of the server; your own `module:function` for `observation_text` and `reply_action`."""
        self._url = url.rstrip("/")
        self._schema, self.tools = _schemas(self._url)
        setting = "environment.settings"
        self._text: Callable[..., Observation] = find_object(observation, setting) if observation else observation_text
        self._action: Callable[..., Any] = find_object(action, setting) if action else reply_action

    def reset(self, problem: Problem) -> Observation:
        """Open the session, and begin with the columns of the row."""
        self._session, told = _open(self._url, {"type": "reset", "data": dict(problem.columns)})
        return self._text(told["observation"])

    def step(self, reply: str) -> Turn:
        """The server's answer to a reply; where the environment has tools, a reply that calls none ends the episode."""
        if self.tools:
            return Turn(done=True)
        try:
            told = _ask(self._session, {"type": "step", "data": self._action(reply, self._schema)})
        except BadAction as error:  # the policy may try again
            return Turn(f"error: {error}")
        return Turn(self._text(told["observation"]), told["reward"] or 0.0, told["done"])

    def call_tools(self, calls: Sequence[tuple[str, Any]], reply: str) -> Turn:
        """The results of tools, in their order, and the sum of their rewards."""
        results, reward, done = [], 0.0, False
        for name, arguments in calls:
            try:
                call = {"type": "call_tool", "tool_name": name, "arguments": arguments}
                told = _ask(self._session, {"type": "step", "data": call})
            except BadAction as error:
                results.append({"role": "tool", "content": f"error: {error}"})
                continue
            results.append({"role": "tool", "content": _result_text(told["observation"])})
            reward += told["reward"] or 0.0
            done = told["done"]
            if done:  # the server answers no further call
                break
        return Turn(results, reward, done)


class BadAction(ValueError):
    """A reply is no action of the environment."""


def observation_text(observation: Mapping[str, Any]) -> Observation:
    """The text that the policy reads: the observation's only field, if it is a text, or else all of them as JSON."""
    fields = {name: value for name, value in observation.items() if name != "metadata" and value is not None}
    only = next(iter(fields.values()), None)
    return only if len(fields) == 1 and isinstance(only, str) else json.dumps(fields, ensure_ascii=False)


def reply_action(reply: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The action of a reply without its thoughts: its JSON object, or else the value of the only required field.

    `BadAction` for other replies where the schema requires no field or several.
    """
    text = final_answer(reply)
    if text.startswith("```") and text.endswith("```"):
        text = "\n".join(text.splitlines()[1:-1]).strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, dict):
        return value
    required = schema.get("required", [])
    if len(required) != 1:
        raise BadAction(f"write a JSON object with the fields {', '.join(schema.get('properties', ()))}")
    (name,) = required
    return {name: text if schema["properties"][name].get("type") == "string" else value}


@cache  # an episode's process inherits it
def _schemas(url: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The schema of the server's actions, and the schemas of its tools."""
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=60) as answer:
            schema = json.load(answer)["action"]
    except OSError as error:
        raise UserError(f"environment.settings.url = {url!r}: no OpenEnv server answers there: {error}") from error
    if schema.get("title") not in MCP_ACTIONS:
        return schema, []
    session, told = _open(url, {"type": "step", "data": {"type": "list_tools"}})
    session.close()
    functions = [
        {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
        for tool in told["observation"]["tools"]
    ]
    return schema, [{"type": "function", "function": function} for function in functions]


def _open(url: str, message: Mapping[str, Any]) -> tuple[Any, Any]:
    """A new session, and its answer to a first message."""
    from websockets.sync.client import connect

    session = connect(f"{url.replace('http', 'ws', 1)}/ws", max_size=LONGEST_MESSAGE)
    return session, _ask(session, message)


def _ask(session: Any, message: Mapping[str, Any]) -> Any:
    """The data of the server's answer; `BadAction` if it refuses an action, `RuntimeError` for other errors."""
    from websockets.exceptions import ConnectionClosed

    with suppress(ConnectionClosed):  # a server without room says so before it is asked, and closes
        session.send(json.dumps(message))
    answer = json.loads(session.recv())
    if answer["type"] != "error":
        return answer["data"]
    text = f"{answer['data']['message']} {answer['data'].get('errors', '')}".strip()
    if answer["data"].get("code") == "CAPACITY_REACHED":
        text += "; let it have a session for each episode of a step (max_concurrent_envs)"
    if answer["data"].get("code") == "VALIDATION_ERROR":
        raise BadAction(text)
    raise RuntimeError(f"OpenEnv: {text}")


def _result_text(observation: Mapping[str, Any]) -> str:
    """The text of a tool's result or error."""
    if observation.get("error"):
        return f"error: {observation['error']['message']}"
    result = observation["result"]
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        return "\n".join(str(part.get("text", part)) for part in result["content"])
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
