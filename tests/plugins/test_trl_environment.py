"""Environments made for TRL, in their processes, with the protocol that TRL 1.16 documents."""

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from chats import CHATML, chat_tokenizer
from runs import RLVR
from threepo.cli import main
from threepo.config import EnvironmentConfig, ModelConfig, TinyConfig
from threepo.environment import Turn
from threepo.models.policy import load_policy
from threepo.rollout.environments import Environments
from threepo.run_folder import read_metrics
from threepo.types import Problem

TOOLS = CHATML.replace("{% for m", "{% if tools %}call with <tool_call>: {{ tools | tojson }}\n{% endif %}{% for m", 1)


class Counter:
    """As a user of TRL writes it."""

    def __init__(self, step: int = 1) -> None:
        self.width = step

    def reset(self, target: int, **kwargs: Any) -> str:
        self.target, self.count = target, 0
        return f" Count to {target}."

    def increment(self, times: int) -> str:
        """Count on.

        Args:
            times: How often.
        """
        self.count += self.width * times
        return f"now {self.count}"

    def get_reward(self) -> float:
        return float(self.count == self.target)

    def _private(self) -> None: ...


class Judged(Counter):
    """Waits for its judge; one object is used by all its coroutines."""

    async def increment(self, times: int) -> str:
        """Count on.

        Args:
            times: How often.
        """
        self.lock = getattr(self, "lock", None) or asyncio.Lock()
        self.loop = asyncio.get_running_loop()
        async with self.lock:
            await asyncio.sleep(0)
            if times < 0:
                raise asyncio.CancelledError
            return super().increment(times)

    async def get_reward(self) -> float:  # type: ignore[override]
        assert self.loop is asyncio.get_running_loop()
        return super().get_reward()


class Pictures(Counter):
    def reset(self, target: int, **kwargs: Any) -> Any:
        return [{"type": "image"}] if target else "none"


@pytest.mark.parametrize("name", ["Counter", "Judged"])
def test_tools_are_its_public_methods_and_get_reward_pays(name: str) -> None:
    own = {"factory": f"{Counter.__module__}:{name}", "step": 2}
    settings = EnvironmentConfig(factory="threepo.plugins.trl_environment:TRLEnvironment", settings=own)
    text = Problem("p", "Begin.", columns={"target": 6})
    chat = Problem("q", ({"role": "user", "content": "Begin."},), columns={"target": 6})
    with closing(Environments(settings)) as environments:
        assert [tool["function"]["name"] for tool in environments.tools] == ["increment"]
        environments.begin(2)
        answers = environments.call({0: ("reset", text, 1), 1: ("reset", chat, 1)})
        assert answers[0].value == "Begin. Count to 6."
        assert answers[1].value == [{"role": "user", "content": "Begin. Count to 6."}]
        calls = [("increment", {"times": 2}), ("increment", {"times": 1})]
        assert environments.call({0: ("tools", calls)})[0].value == ["now 4", "now 6"]
        environments.call({1: ("tools", calls[:1])})
        ended = environments.call({0: ("end", "done"), 1: ("end", "")})
        assert ended[0].value == Turn(reward=1.0)
        assert ended[1].value == Turn(reward=0.0)
        assert not environments.steps


def test_a_tool_that_is_cancelled_tells_the_policy_so() -> None:
    """And does not end the process, which is all that one would see."""
    own = {"factory": f"{Counter.__module__}:Judged"}
    settings = EnvironmentConfig(factory="threepo.plugins.trl_environment:TRLEnvironment", settings=own)
    with closing(Environments(settings)) as environments:
        environments.begin(1)
        environments.call({0: ("reset", Problem("p", "Begin.", columns={"target": 1}), 1)})
        (answer,) = environments.call({0: ("tools", [("increment", {"times": -1})])}).values()
    assert answer.value == ["error: RuntimeError: was cancelled"]


def test_a_reset_that_returns_more_than_text_fails_with_the_reason() -> None:
    own = {"factory": f"{Counter.__module__}:Pictures"}
    settings = EnvironmentConfig(factory="threepo.plugins.trl_environment:TRLEnvironment", settings=own)
    with closing(Environments(settings)) as environments:
        environments.begin(1)
        (answer,) = environments.call({0: ("reset", Problem("p", "Begin.", columns={"target": 1}), 1)}).values()
    assert "reset returned list; return a text or None" in answer.failure


def test_a_run(tmp_path: Path) -> None:
    """Its rewards are those of `get_reward`, and no reply of so small a model calls a tool."""
    tokenizer = chat_tokenizer(TOOLS)
    policy = load_policy(ModelConfig(path="tiny-qwen2", tiny=TinyConfig(hidden_size=32, layers=1, heads=2, kv_heads=1)))
    policy.model.resize_token_embeddings(len(tokenizer))
    policy.model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(0, 250, 4)]
    policy.model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": "Go."}], "target": i % 2} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [setting for setting in RLVR if not setting.startswith(("data.train", "data.levels", "model.", "eval."))]
    settings += [f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'rows.jsonl'}", "run.steps=2"]
    settings += ["reward.function=environment", "environment.factory=threepo.plugins.trl_environment:TRLEnvironment"]
    settings += [f"environment.settings={{factory='{Counter.__module__}:Counter'}}", f"run.folder={tmp_path / 'run'}"]
    assert main(["train", *settings]) == 0
    assert len(read_metrics(tmp_path / "run")) == 2
    for row in pyarrow.parquet.read_table(tmp_path / "run" / "completions" / "step-000000.parquet").to_pylist():
        episode = json.loads(row["episode"])
        assert episode["begin"][-1][1] in ("Go. Count to 0.", "Go. Count to 1.")
        assert row["reward"] == episode["reward"] == ("Count to 0" in episode["begin"][-1][1])
