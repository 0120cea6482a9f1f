"""Environments of the `verifiers` package as data and reward."""

import asyncio
import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet
import pytest

pytest.importorskip("verifiers.v1")

import verifiers.v1 as vf
from verifiers.v1.graph import prepare_turn

from runs import RLVR, outcome
from threepo import api
from threepo.cli import main
from threepo.config import DataConfig, RewardConfig, TrainConfig
from threepo.config.recipes import load
from threepo.data.source import open_heldout, open_source, open_training
from threepo.errors import UserError
from threepo.rewards.grading import load_grader, refuse_ignored
from threepo.types import Completion, Problem

WORD_SUMS = '''
"""Sums, answered in a tag."""

import asyncio
import re
from typing import Literal

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: int
    info: dict = {}


class Config(vf.TaskConfig):
    tag: str = "answer"


class Sums(vf.Task[Data, vf.State, Config]):
    def read(self, trace):
        found = re.findall(rf"<{self.config.tag}>(.*?)</{self.config.tag}>", trace.last_reply)
        return found[-1].strip() if found else None

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        await asyncio.sleep(0)
        return float(self.read(trace) == str(self.data.answer))

    @vf.reward(weight=0.2)
    async def layout(self, trace: vf.Trace) -> float:
        return float(self.read(trace) is not None)

    @vf.reward(weight=-0.5)
    async def cut_off(self, trace: vf.Trace) -> float:
        return float(trace.is_truncated)

    @vf.reward(weight=0.001)
    async def exchange(self, task: Data, trace: vf.Trace) -> dict[str, float]:
        thought = trace.assistant_messages[-1].reasoning_content or ""
        return {"asked": float(trace.messages[-2].content == task.prompt), "thought": float(len(thought))}

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class Settings(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    system: bool = False
    task: Config = Config()


class WordSums(vf.Taskset[Sums, Settings]):
    def load(self):
        for i in range(12 if self.config.split == "train" else 4):
            first = i if self.config.split == "train" else 100 + i
            system = "Answer in tags." if self.config.system else None
            yield Sums(Data(prompt=f"{first} + 1", system_prompt=system, answer=first + 1), self.config.task)


__all__ = ["WordSums"]
'''

BROKEN = """
import verifiers.v1 as vf


class Task(vf.Task):
    {body}


class Set(vf.Taskset[Task, vf.TasksetConfig]):
    {kind}

    def load(self):
        return [Task(vf.TaskData(prompt={prompt}, image={image}), self.config.task) for _ in range(2)]

{after}
__all__ = {names}
"""
ONE = "@vf.reward\n    async def one(self, trace) -> float:\n        return 1.0"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write an environment where Python finds it, as an installed package is; each test has modules of its own."""
    folder = tmp_path / "installed"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def write(text: str, name: str = "word_sums") -> str:
        name = f"{name}_{tmp_path.name}"
        (folder / f"{name}.py").write_text(text)
        return f"verifiers:{name}"

    return write


def broken(
    body: str = ONE, *, kind: str = "INFINITE = False", prompt: str = "'hi'", image=None, after="", names="['Set']"
) -> str:
    return BROKEN.format(body=body, kind=kind, prompt=prompt, image=image, after=after, names=names)


def answered(problem: Problem, text: str, finish_reason: str = "stop", opening: str = "") -> Completion:
    return Completion(
        problem=problem,
        prompt_tokens=(1, 2, 3),
        draw=None,
        rollout=0,
        tokens=(4, 5),
        logprobs=(-0.1, -0.2),
        text=text,
        finish_reason=finish_reason,
        policy_step=0,
        opening=opening,
    )


def test_tasks_become_problems(install) -> None:
    name = install(WORD_SUMS)
    source = open_training(DataConfig(train=name)).problems
    assert source.problems[3] == Problem(f"{name}/3", "3 + 1", "4", {"answer": 4, "info": {}})
    assert source.problems[3].label == f"{name}, row 4"
    assert source.counts()["problems"] == 12

    chats = open_training(DataConfig(train=f"{name}(system=True)")).problems
    assert chats.problems[0].prompt == (
        {"role": "system", "content": "Answer in tags."},
        {"role": "user", "content": "0 + 1"},
    )
    part = open_training(DataConfig(train=f"{name}(select={{'include': {{'idx': '4:7'}}}})")).problems
    assert [problem.answer for problem in part.problems] == ["5", "6", "7"]


def test_held_out_problems_are_named(install) -> None:
    name = install(WORD_SUMS)
    with pytest.raises(UserError, match="has no held-out problems of its own"):
        open_heldout(DataConfig(train=name))
    heldout = open_heldout(DataConfig(train=name, eval=f"{name}(split='test')"))
    assert [problem.answer for problem in heldout.problems.first(9)] == ["101", "102", "103", "104"]


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>4</answer>", 1.2),
        ("<answer>5</answer>", 0.2),
        ("4", 0.0),
        ("<think>four</think><answer>4</answer>", 1.204),
        ("<think>4, so <answer>4</answer>", 1.2),
        ("", 0.0),
    ],
)
def test_rewards_are_those_of_verifiers(system: bool, text: str, reward: float, install) -> None:
    """The other side is made by the code with which verifiers records a model's response."""
    name = install(WORD_SUMS).removeprefix("verifiers:")
    source = f"verifiers:{name}(system={system})"
    opened = open_source(source, "train", DataConfig(train=source))
    problem = opened.problems.first(4)[3]
    grade = load_grader(RewardConfig(), opened.verifier, [problem])
    (verdict,) = grade([answered(problem, text)])

    config = vf.taskset_config_type(name)(id=name, system=system)
    task = list(vf.load_taskset(config))[3]
    trace = vf.Trace(
        task=vf.TraceTask(type="Sums", data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
    )
    prompt = [vf.UserMessage(content="3 + 1")]
    if system:
        prompt.insert(0, vf.SystemMessage(content="Answer in tags."))
    thinking, end, reply = text.removeprefix("<think>").partition("</think>")
    message = vf.AssistantMessage(content=reply if end else text, reasoning_content=thinking if end else None)
    response = vf.Response(id="1", created=0, model="policy", message=message, finish_reason="stop")
    prepare_turn(trace, prompt).commit(response)
    asyncio.run(task.score(trace))
    assert verdict.reward == pytest.approx(trace.reward, abs=0)
    assert verdict.reward == pytest.approx(reward + 0.001)
    assert verdict.correct == (reward >= 1)


def test_rewards_see_what_was_cut_off_and_thought(install) -> None:
    opened = open_training(DataConfig(train=install(WORD_SUMS)))
    problem = opened.problems.first(1)[0]
    settings = RewardConfig(correct_from=0.7)
    refuse_ignored(settings, [opened.verifier])
    grade = load_grader(settings, opened.verifier, [problem])
    cut, thought = grade(
        [
            answered(problem, "<answer>1</answer>", "length"),
            answered(problem, "ab</think><answer>1</answer>", opening="<think>"),
        ]
    )
    assert (cut.reward, cut.correct) == (pytest.approx(0.701), True)
    assert thought.reward == pytest.approx(1.203)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "raise ValueError('no such unit')",
            r"row 1: its reward raised ValueError: no such unit \(.*broken_.*py:\d+\)",
        ),
        ("return float('nan')", "row 1: its reward is nan, which must be a finite number"),
        ("return 'high'", "row 1: its reward raised ValueError: could not convert"),
    ],
)
def test_an_error_in_a_reward_ends_the_run(body: str, message: str, install) -> None:
    name = install(
        broken(f"{ONE}\n\n    @vf.reward\n    async def bad(self, trace) -> float:\n        {body}"), "broken"
    )
    opened = open_training(DataConfig(train=name))
    grade = load_grader(RewardConfig(), opened.verifier, opened.problems.known())
    with pytest.raises(UserError, match=message):
        grade([answered(opened.problems.first(1)[0], "")])


RUNTIME = "@vf.reward\n    async def run(self, trace, runtime) -> float:\n        return 1.0"
SETUP = f"async def setup(self, runtime):\n        pass\n\n    {ONE}"
INTERCEPT = f"@vf.intercept\n    async def change(self, request: vf.Request):\n        return None\n\n    {ONE}"
TOOLS = f"@classmethod\n    def toolsets(cls, config):\n        return [object()]\n\n    {ONE}"
ENV = "class Talk(vf.SingleAgentEnv):\n    async def run(self, task, agents):\n        pass\n"
JUDGED = f"def __init__(self, data, config):\n        super().__init__(data, Judged())\n\n    {ONE}"
JUDGE = "class Judged(vf.TaskConfig):\n    judge: vf.JudgeConfig = vf.JudgeConfig()\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (broken(after=ENV, names="['Set', 'Talk']"), "its Talk has turns or agents of its own; play it as an episode"),
        (broken(TOOLS), "it gives the model tools"),
        (broken(RUNTIME), r"it needs a sandbox \(runtime\) for run;"),
        (broken(SETUP), r"it needs a sandbox \(runtime\) for setup;"),
        (broken(INTERCEPT), "it changes requests or responses"),
        (broken(f"NEEDS_CONTAINER = True\n    {ONE}"), "it needs a container"),
        (broken(image="'python:3.11'"), "it needs a container"),
        (broken(JUDGED, after=JUDGE), "a judge model scores it"),
        (broken("pass"), "it has no rewards"),
        (broken(kind="INFINITE = True"), "has no end; take some of its tasks, for example with select="),
        (broken(prompt="None"), "row 1: has no prompt"),
        (
            broken(prompt="[vf.UserMessage(content=[vf.TextContentPart(text='hi')])]"),
            "list of chat messages, each with",
        ),
        (broken(names="[]"), "is no taskset of verifiers 0.4: TypeError: taskset module"),
        (
            "def load_environment():\n    return None\n",
            "is no taskset of verifiers 0.4: AttributeError: .*no `__all__`",
        ),
        ("import sys\n\nsys.exit('set a key')\n", "is no taskset of verifiers 0.4: SystemExit: set a key"),
        ("import verifiers as vf\n\nvf.SingleTurnEnv\n", "has no attribute 'SingleTurnEnv'"),
    ],
)
def test_environments_that_need_more_are_refused(text: str, message: str, install) -> None:
    name = install(text, "more")
    with pytest.raises(UserError, match=message) as caught:
        open_training(DataConfig(train=name))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("(split='dev')", "split: Input should be 'train' or 'test'"),
        ("(spilt='test')", "spilt: Extra inputs are not permitted"),
        ("(select={'limits': 3})", "limits: Extra inputs are not permitted"),
        ("(3)", "write verifiers:NAME or verifiers:NAME"),
    ],
)
def test_settings_are_checked(settings: str, message: str, install) -> None:
    with pytest.raises(UserError, match=message):
        open_training(DataConfig(train=install(WORD_SUMS) + settings))


def test_an_environment_that_is_not_installed_is_refused() -> None:
    with pytest.raises(UserError, match="taskset 'nowhere-to-be-found' not found"):
        open_training(DataConfig(train="verifiers:nowhere-to-be-found"))


def test_a_notebook_is_refused(install) -> None:
    opened = open_training(DataConfig(train=install(WORD_SUMS)))
    problem = opened.problems.first(1)[0]
    grade = load_grader(RewardConfig(), opened.verifier, [problem])

    async def cell() -> None:
        grade([answered(problem, "1")])

    with pytest.raises(UserError, match="cannot be scored in a notebook"):
        asyncio.run(cell())


def test_another_thread_is_refused(install) -> None:
    """As with rollouts made ahead, where mathematics would be paid 0."""
    opened = open_training(DataConfig(train=install(WORD_SUMS)))
    problem = opened.problems.first(1)[0]
    grade = load_grader(RewardConfig(), opened.verifier, [problem])
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(UserError, match=r"main thread only; set overlap.lag = 0, and"),
    ):
        threads.submit(grade, [answered(problem, "1")]).result()


def test_rollouts_ahead_are_refused_before_a_run_begins(install, tmp_path: Path) -> None:
    small = [setting for setting in RLVR if not setting.startswith("data.")]
    own = [*small, f"data.train={install(WORD_SUMS)}", f"run.folder={tmp_path / 'run'}", "overlap.lag=1"]
    with pytest.raises(UserError, match="rewards can be had in the main thread only; set it to 0"):
        api.train(load(TrainConfig, "", own))
    assert not (tmp_path / "run").exists()


def test_a_setup_without_a_sandbox_is_called(install) -> None:
    text = broken(
        "async def setup(self, trace):\n        trace.info['seen'] = trace.num_turns\n\n"
        "    async def finalize(self, trace):\n        trace.info['end'] = trace.num_turns\n\n"
        "    @vf.reward\n    async def both(self, trace) -> float:\n"
        "        return 10.0 * trace.info['end'] + trace.info['seen']"
    )
    opened = open_training(DataConfig(train=install(text, "setup")))
    problem = opened.problems.first(1)[0]
    assert load_grader(RewardConfig(), opened.verifier, [problem])([answered(problem, "")])[0].reward == 10.0


def test_a_recipe_trains_with_an_environment_resumes_and_notices_a_change(install, tmp_path: Path, capsys) -> None:
    name = install(WORD_SUMS)
    recipe, small = tmp_path / "recipe.toml", [setting for setting in RLVR if not setting.startswith("data.")]
    recipe.write_text(
        f"[data]\ntrain = \"{name}(split='train')\"\neval = \"{name}(split='test')\"\nprompts_per_step = 4\n"
    )
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert main(["train", str(recipe), *small, f"run.folder={whole}", "run.steps=2"]) == 0
    assert main(["train", str(recipe), *small, f"run.folder={halves}", "run.steps=1"]) == 0
    assert main(["train", "--resume", str(halves), "run.steps=2"]) == 0
    assert outcome(halves) == outcome(whole)
    rewards = pyarrow.parquet.read_table(whole / "completions" / "step-000000.parquet").column("reward").to_pylist()
    assert {round(reward, 3) for reward in rewards} <= {-0.499, 0.001}, "0.001 for the prompt, -0.5 if it is cut off"

    capsys.readouterr()
    assert main(["data", "show", name, "--index", "2"]) == 0
    shown = capsys.readouterr().out
    assert "12 of 12 rows" in shown
    assert shown.endswith(f"--- answer {'-' * 69}\n3\n")

    del sys.modules[name.removeprefix("verifiers:")]
    # Of another length: Python takes a text of the same second and the same length for the one that it has compiled.
    install(WORD_SUMS.replace("answer=first + 1", "answer=first + 20"))
    importlib.invalidate_caches()
    assert main(["train", "--resume", str(halves), "run.steps=3"]) == 2
    assert f"the problems of {name}(split='train') have changed since the run began" in capsys.readouterr().err
