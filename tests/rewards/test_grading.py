"""Reward functions of one's own, called the way TRL calls them."""

from pathlib import Path

import pytest

from threepo.config import RewardConfig
from threepo.errors import UserError
from threepo.rewards.grading import load_grader
from threepo.types import Problem

PROBLEMS = [Problem(id="a", prompt="1+1", answer="2", columns={"unit": "m"}), Problem(id="b", prompt="2+2", answer="4")]
TEXTS = ["2", "<think>4</think>5"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module in the working directory; write it with `write`."""
    monkeypatch.chdir(tmp_path)
    return f"rewards_of_{request.node.name.replace('[', '_').replace(']', '_').replace('-', '_')}"


def write(module: str, body: str) -> None:
    Path(f"{module}.py").write_text(body)


def test_all_columns_reach_a_function_that_takes_them(module: str) -> None:
    write(
        module,
        "def reward(prompts, completions, answer, **columns):\n"
        "    assert prompts == ['1+1', '2+2'] and columns == {'unit': ['m', None]}\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n",
    )
    grade = load_grader(RewardConfig(function=f"{module}:reward"), None)
    verdicts = grade(PROBLEMS, TEXTS)
    assert [v.reward for v in verdicts] == [1.0, 0.0]
    assert [v.status for v in verdicts] == ["right", "wrong"]


def test_a_function_gets_only_what_it_names(module: str) -> None:
    write(module, "def reward(completions, unit):\n    return [0.25, None] if unit == ['m', None] else []\n")
    grade = load_grader(RewardConfig(function=f"{module}:reward", correct_from=0.2), None)
    verdicts = grade(PROBLEMS, TEXTS)
    assert (verdicts[0].reward, verdicts[0].correct) == (0.25, True)
    assert (verdicts[1].reward, verdicts[1].status) == (0.0, "error")


def test_chat_prompts_give_chat_completions(module: str) -> None:
    write(
        module,
        "def reward(prompts, completions, **_):\n"
        "    return [float(c[0]['role'] == 'assistant' and p[-1]['content'] in c[0]['content'])\n"
        "            for p, c in zip(prompts, completions)]\n",
    )
    problem = Problem(id="c", prompt=({"role": "user", "content": "Hi"},))
    grade = load_grader(RewardConfig(function=f"{module}:reward"), None)
    assert [v.reward for v in grade([problem, problem], ["Hi!", "Ho!"])] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def reward(**_): return [1.0]", "returned 1 values for 2 completions"),
        ("def reward(**_): return 1.0", "returned float for 2 completions"),
        ("def reward(**_): return ['good', 'bad']", "returned 'good'; return a finite number"),
        ("def reward(**_): return [float('nan'), 1.0]", "returned nan"),
        ("reward = 3", "is not a function"),
        ("def other(**_): return []", "has no 'reward'"),
    ],
)
def test_wrong_functions_are_refused_by_name(body: str, message: str, module: str) -> None:
    write(module, body)
    with pytest.raises(UserError, match=message):
        load_grader(RewardConfig(function=f"{module}:reward"), None)(PROBLEMS, TEXTS)


def test_missing_modules_are_told_from_broken_ones(module: str) -> None:
    with pytest.raises(UserError, match=f"no module '{module}'"):
        load_grader(RewardConfig(function=f"{module}:reward"), None)
    with pytest.raises(UserError, match="'module:function'"):
        load_grader(RewardConfig(function="reward"), None)
    write(module, "import a_package_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        load_grader(RewardConfig(function=f"{module}:reward"), None)


def test_exact_and_task() -> None:
    grade = load_grader(RewardConfig(function="exact"), None)
    assert [v.correct for v in grade(PROBLEMS, ["<think>x</think> 2", "5"])] == [True, False]
    with pytest.raises(UserError, match="set reward.function to 'exact'"):
        load_grader(RewardConfig(), None)
