"""Environments of the `verifiers` package as episodes, in their processes."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

pytest.importorskip("verifiers.v1")

from runs import RLVR
from threepo.cli import main
from threepo.config import DataConfig, EnvironmentConfig
from threepo.data.source import open_training
from threepo.environment import Turn
from threepo.errors import UserError
from threepo.plugins.verifiers_episodes import VerifiersEnvironment
from threepo.rollout.environments import Environments
from threepo.types import Problem

GUESS = '''
"""Guess a number; the environment answers, as a user would."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: int


class Task(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def tries(self, trace: vf.Trace) -> float:
        return -float(len(trace.assistant_messages))

    @vf.metric
    async def cut(self, trace: vf.Trace) -> float:
        return float(trace.is_truncated)

    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "I give up"


class Set(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(Data(prompt="Which number?", system_prompt="Play.", answer=7), self.config.task) for _ in range(4)]


class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    bonus: float = 2.0


class Env(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated and segment.last_reply != str(task.data.answer):
                segment = await talk.turn(f"not {segment.last_reply}")
        talk.trace.record_reward("found", float(not segment.terminated), self.config.bonus)

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_metric("turns", trace.num_turns)


__all__ = ["Set", "Env"]
'''

SHOP = '''
"""A shop, which keeps what was bought in the rollout's state."""

import pydantic_config
import verifiers.v1 as vf


class State(vf.State):
    bought: list[str] = []
    money: int = 0


class Shop(vf.Toolset[pydantic_config.BaseConfig, State]):
    async def setup_task(self, task):
        self.prices = {"apple": 3, "pear": task.price}

    @vf.tool
    async def buy(self, item: str, times: int = 1) -> str:
        """Buy an item."""
        self.state.bought += [item] * times
        self.state.money += self.prices[item] * times
        return f"{self.state.money} in all"


class Data(vf.TaskData):
    price: int


class Task(vf.Task[Data, State]):
    @classmethod
    def toolsets(cls, config):
        return [Shop(pydantic_config.BaseConfig())]

    async def setup(self, trace, runtime):
        await runtime.write("note", b"7")

    @vf.reward
    async def right(self, trace: vf.Trace, runtime) -> float:
        return float(trace.last_reply == str(trace.state.money) and await runtime.read("note") == b"7")

    @vf.metric
    async def seen(self, trace: vf.Trace) -> dict[str, float]:
        thought = trace.assistant_messages[0].reasoning_content or ""
        called = [message.tool_calls for message in trace.assistant_messages if message.tool_calls]
        return {"turns": trace.num_turns, "thought": len(thought), "calls": sum(map(len, called)),
                "results": len(trace.tool_messages), "content": len(trace.assistant_messages[0].content)}


class Set(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(Data(prompt="Buy.", price=4), self.config.task)]


__all__ = ["Set"]
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write an environment where Python finds it, as an installed package is; each test has modules of its own."""
    folder = tmp_path / "installed"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def write(text: str) -> str:
        name = f"played_{tmp_path.name}"
        (folder / f"{name}.py").write_text(text)
        return name

    return write


FACTORY = "threepo.plugins.verifiers_episodes:VerifiersEnvironment"


def first_problem(name: str) -> Problem:
    return open_training(DataConfig(train=f"verifiers-episodes:{name}")).problems.first(1)[0]


def made(name: str, **env: Any) -> VerifiersEnvironment:
    """The environment in this process, which has imported verifiers already, in its first state."""
    environment = VerifiersEnvironment(taskset={"id": name}, **env)
    environment.begun = environment.reset(first_problem(name))
    return environment


def test_an_environment_with_several_turns(install: Callable[[str], str]) -> None:
    name = install(GUESS)
    settings = {"taskset": {"id": name}, "bonus": 4.0}
    with closing(Environments(EnvironmentConfig(factory=FACTORY, settings=settings, memory_mib=2048))) as environments:
        assert environments.tools == []
        environments.begin(1)
        calls = [("reset", first_problem(name), 1), ("step", "<think>5?</think>5"), ("step", "7"), ("end", "")]
        begun, wrong, right, ended = (environments.call({0: call})[0].value for call in calls)
    assert begun == [{"role": "system", "content": "Play."}, {"role": "user", "content": "Which number?"}]
    assert (wrong, right) == (Turn("not 5"), Turn(done=True))
    assert ended == Turn(reward=4 - 0.5 * 2, metrics={"cut": 0, "turns": 2, "found": 1, "tries": -2})


def test_its_rubric_scores_what_a_limit_has_ended(install: Callable[[str], str]) -> None:
    name = install(GUESS)
    paid = Turn(reward=-0.5, metrics={"cut": 1, "turns": 1, "found": 0, "tries": -1})
    game = made(name)
    assert game.step("5") == Turn("not 5")
    assert game.end("") == paid
    assert made(name).end("7, or") == paid, "a reply that was cut"
    game = made(name)
    assert game.step("I give up") == Turn(done=True), "a @stop ends it before the next reply"
    assert game.end("").metrics == {**paid.metrics, "cut": 0}
    game = made(name, player={"max_turns": 3})
    assert [game.step("5").done for _ in range(3)] == [False, False, True], "the agent's own limit"


def test_tools_a_state_and_a_sandbox(install: Callable[[str], str]) -> None:
    shop = made(install(SHOP), agent={"runtime": {"type": "subprocess"}})
    (tool,) = shop.tools
    assert (tool["function"]["name"], tool["function"]["description"]) == ("shop_buy", "Buy an item.")
    assert tool["function"]["parameters"]["required"] == ["item"]
    assert shop.begun == "Buy."
    two = [("shop_buy", {"item": "pear", "times": 2}), ("shop_buy", {"item": "apple"})]
    told = shop.call_tools(two, "so </think>I buy. <tool_call>{}</tool_call><tool_call>{}</tool_call>").observation
    assert [tuple(message.values()) for message in told] == [("tool", "8 in all"), ("tool", "11 in all")]
    wrong = [("shop_buy", {"item": "plum"}), ("sell", {}), ("shop_buy", "pear"), ("shop_buy", {})]
    texts = [message["content"] for message in shop.call_tools(wrong, "").observation]
    assert texts[0].endswith("'plum'")
    assert texts[1] == "error: unknown tool 'sell'"
    assert texts[2] == "error: tool arguments must be a JSON object; resend as an object"
    assert "Field required" in texts[3]
    assert shop.step("11") == Turn(done=True)
    metrics = {"turns": 3, "thought": 3, "calls": 6, "results": 6, "content": 6, "right": 1}
    assert shop.end("") == Turn(reward=1.0, metrics=metrics)


def test_the_environment_may_open_the_conversation(install: Callable[[str], str]) -> None:
    name = install(
        GUESS.replace('prompt="Which number?"', "prompt=None").replace(
            "segment = await talk.turn()\n", 'segment = await talk.turn("Which number do I think of?")\n', 1
        )
    )
    source = f"verifiers-episodes:{name}"
    problems = open_training(DataConfig(train=source)).problems
    assert problems.first(1)[0].prompt == "task", "nobody reads it, and a model without chat template needs one"
    game = made(name)
    assert [message["content"] for message in game.begun] == ["Play.", "Which number do I think of?"]
    assert game.step("7") == Turn(done=True)


def test_limits_of_tokens_are_refused(install: Callable[[str], str]) -> None:
    with pytest.raises(UserError, match=r"player.max_output_tokens = 5: is not counted here.*environment.max_tokens"):
        made(install(GUESS), player={"max_output_tokens": 5})


def test_settings_of_tasks_belong_to_the_environment(install: Callable[[str], str]) -> None:
    name = install(GUESS)
    with pytest.raises(UserError, match="task: episodes make their tasks themselves; write environment.settings"):
        first_problem(f"{name}(task={{'metrics': {{'size': {{'fn': 'builtins:len'}}}}}})")


def test_what_fails_names_the_reason(install: Callable[[str], str]) -> None:
    name = install(GUESS.replace("segment = await talk.turn()\n", "segment = await talk.turn()\n            1 / 0\n"))
    with pytest.raises(RuntimeError, match="verifiers: EnvError: .*ZeroDivisionError"):
        made(name).step("5")


def test_an_environment_with_two_agents_is_refused(install: Callable[[str], str]) -> None:
    name = install(GUESS.replace("    bonus:", "    judge: vf.AgentConfig = vf.AgentConfig()\n    bonus:"))
    with pytest.raises(UserError, match="has the agents player, judge, not one"):
        made(name)


def test_a_run_of_episodes(install: Callable[[str], str], tmp_path: Path) -> None:
    text = GUESS.replace('system_prompt="Play.", ', "").replace("answer=7", "answer=7, name=f\"n{len('ab')}\"")
    name = install(text)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[data]\ntrain = "verifiers-episodes:{name}"\nprompts_per_step = 2\n[environment]\nmemory_mib = 2048\n'
        f'max_turns = 3\nfactory = "threepo.plugins.verifiers_episodes:VerifiersEnvironment"\n'
        f'settings = {{ taskset = {{ id = "{name}" }} }}\n'
    )
    settings = [setting for setting in RLVR if not setting.startswith("data.")]
    settings += ["run.steps=1", "reward.function=environment", f"run.folder={tmp_path / 'run'}"]
    assert main(["train", str(recipe), *settings]) == 0
    table = pyarrow.parquet.read_table(tmp_path / "run" / "completions" / "step-000000.parquet").to_pylist()
    for row in table:
        episode = json.loads(row["episode"])
        assert episode["status"] in ("turns", "tokens")
        assert row["reward"] == -0.5 * sum(role == "assistant" for role, _ in episode["transcript"])
