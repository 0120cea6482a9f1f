"""Reward functions of one's own, called the way TRL calls them."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from factories import answered
from threepo.config import DataConfig, RewardConfig
from threepo.data.source import open_heldout, open_training
from threepo.errors import UserError
from threepo.evaluation.examination import with_grader
from threepo.rewards.grading import load_grader, refuse_ignored
from threepo.types import Episode, Problem

PROBLEMS = [Problem(id="a", prompt="1+1", answer="2", columns={"unit": "m"}), Problem(id="b", prompt="2+2", answer="4")]
COMPLETIONS = [
    answered(PROBLEMS[0], "2", (7,)),
    answered(PROBLEMS[1], "<think>4</think>5", (8, 9), opening="<think>"),  # which no function sees
]
NUMBERS = itertools.count()
"""Every test has a module of its own name: Python imports a name once."""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory; write it with `write`."""
    monkeypatch.chdir(tmp_path)
    return f"rewards_{next(NUMBERS)}"


def write(module: str, body: str) -> None:
    Path(f"{module}.py").write_text(body)


def test_all_columns_reach_a_function_that_takes_them(module: str) -> None:
    write(
        module,
        "def reward(prompts, completions, answer, **columns):\n"
        "    assert prompts == ['1+1', '2+2'] and columns == {'unit': ['m', None], 'completion_ids': [[7], [8, 9]]}\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n",
    )
    grade = load_grader(RewardConfig(function=f"{module}:reward"), None, PROBLEMS)
    verdicts = grade(COMPLETIONS)
    assert [v.reward for v in verdicts] == [1.0, 0.0]
    assert [v.status for v in verdicts] == ["right", "wrong"]


def test_a_function_gets_only_what_it_names(module: str) -> None:
    write(module, "def reward(completions, unit):\n    return [0.25, None] if unit == ['m', None] else []\n")
    grade = load_grader(RewardConfig(function=f"{module}:reward", correct_from=0.2), None, PROBLEMS)
    verdicts = grade(COMPLETIONS)
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
    grade = load_grader(RewardConfig(function=f"{module}:reward"), None, PROBLEMS)
    assert [v.reward for v in grade([answered(problem, "Hi!"), answered(problem, "Ho!")])] == [1.0, 0.0]


@pytest.mark.parametrize(
    "body",
    [
        "def reward(completions, **_): return (1, 0.5)",
        "import numpy\ndef reward(completions, **_): return numpy.array([1, 0.5])",
        "import torch\ndef reward(completions, **_): return torch.tensor([1, 0.5])",
        "class Reward:\n    def __call__(self, completions): return [True, 0.5]\nreward = Reward()",
        "import functools\ndef f(scale, completions): return [scale, 0.5]\nreward = functools.partial(f, 1.0)",
    ],
)
def test_any_list_of_numbers_will_do(body: str, module: str) -> None:
    write(module, body)
    grade = load_grader(RewardConfig(function=f"{module}:reward"), None, PROBLEMS)
    assert [v.reward for v in grade(COMPLETIONS)] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def reward(**_): return [1.0]", "returned 1 values for 2 completions"),
        ("def reward(**_): return 1.0", "returned float for 2 completions"),
        ("def reward(**_): return '10'", "returned str for 2 completions"),
        ("def reward(**_): return (float(i) for i in range(2))", "returned generator for 2 completions"),
        ("import torch\ndef reward(**_): return torch.tensor(1.0)", "returned float for 2 completions"),
        ("import torch\ndef reward(**_): return torch.ones(2, 3)", "return a finite number"),
        ("def reward(**_): return ['good', 'bad']", "returned 'good'; return a finite number"),
        ("def reward(**_): return [float('nan'), 1.0]", "returned nan"),
        ("def reward(**_):\n    return [{}['key']]", r"raised KeyError: 'key' \(.*\.py:2\)"),
        ("import json\ndef reward(**_):\n    json.loads('')", r"raised JSONDecodeError: .* \(.*rewards_.*\.py:3\)"),
        ("def reward(**_):\n    raise SystemExit(3)", r"raised SystemExit: 3 \(.*:2\)"),
        ("def reward(**_):\n    raise ValueError('two\\nlines')", "raised ValueError: two lines"),
        ("def reward(completions, gold): return []", "needs the argument 'gold'; .* completion_ids, answer, unit"),
        ("def reward(trainer_state, **_): return []", "needs the argument 'trainer_state'"),
        ("def reward(completions, /): return []", "needs the argument 'completions'"),
        ("reward = 3", "module .* has no function or class 'reward'"),
        ("def other(**_): return []", "module .* has no function or class 'reward'"),
        ("def reward(:", r"importing .* raised SyntaxError: .* \(.*\.py, line 1\)"),
        ("x = 1\n1 / 0", r"importing .* raised ZeroDivisionError: division by zero \(.*\.py:2\)"),
        ("import a_package_that_is_not_there", r"importing .* No module named 'a_package_that_is_not_there' \(.*:1\)"),
        ("import sys\nsys.exit('bye')", r"importing .* raised SystemExit: bye"),
    ],
)
def test_wrong_functions_are_refused_by_name(body: str, message: str, module: str) -> None:
    write(module, body)
    with pytest.raises(UserError, match=message) as caught:
        load_grader(RewardConfig(function=f"{module}:reward"), None, PROBLEMS)(COMPLETIONS)
    assert module in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rw_none:reward", "no module 'rw_none'"),
        ("json.no_such:reward", "no module 'json.no_such'"),
        ("reward", "'module:function'"),
        ("rw:f:g", "'module:name'"),
        ("rw.py:f", "mine.py in the current directory is the module mine"),
        ("json:dumps", "needs the argument 'obj'"),
    ],
)
def test_names_of_no_function_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_grader(RewardConfig(function=name), None, PROBLEMS)


def test_the_answer_arrives_as_the_data_have_it(module: str) -> None:
    write(module, "def reward(completions, answer):\n    return [float(a == 6) for a in answer]\n")
    problem = Problem(id="a", prompt="3+3", answer="6", columns={"answer": 6})
    grade = load_grader(RewardConfig(function=f"{module}:reward"), None, [problem])
    assert grade([answered(problem, "6")])[0].reward == 1.0


def test_an_answer_that_the_data_lack_cannot_be_asked_for(module: str) -> None:
    write(module, "def reward(completions, answer):\n    return [0.0]\n")
    lacking = Problem(id="c", prompt="?", columns={"gold": "4"})
    with pytest.raises(UserError, match="needs the argument 'answer'; .* completion_ids, gold$"):
        load_grader(RewardConfig(function=f"{module}:reward"), None, [lacking])


def test_exact_needs_an_answer_of_every_problem() -> None:
    lacking = Problem(id="c", prompt="?", columns={"gold": "4"}, location="data file p.jsonl, row 3")
    with pytest.raises(
        UserError, match=r"p.jsonl, row 3: has no answer, .* are 'gold'; set data.answer_column, fix the data$"
    ):
        load_grader(RewardConfig(function="exact"), None, [*PROBLEMS, lacking])


def test_exact_and_task() -> None:
    grade = load_grader(RewardConfig(function="exact"), None, PROBLEMS)
    assert [v.correct for v in grade(list(map(answered, PROBLEMS, ["<think>x</think> 2", "5"])))] == [True, False]
    with pytest.raises(UserError, match="set it to 'exact', 'math', 'code', 'environment' or your own"):
        load_grader(RewardConfig(), None, PROBLEMS)


def test_an_environment_that_does_not_pay_is_named() -> None:
    grade = load_grader(RewardConfig(function="environment"), None, PROBLEMS)
    paid, unpaid = (Episode(((0, 1),), (), (("assistant", "2"),), reward, "done") for reward in (1.0, None))
    plain = answered(PROBLEMS[0], "2")
    one, other = (replace(plain, episode=episode) for episode in (paid, unpaid))
    assert [v.status for v in grade([one])] == ["right"]
    for completions, message in (
        ([plain], "there are no episodes; set environment.factory"),
        ([other, other], "pays nothing, as its class has no `step`; name another reward"),
        ([one, other], r"has not paid for 1 of 2 episodes; let `end` return Turn\(\) for these"),
    ):
        with pytest.raises(UserError, match=message):
            grade(completions)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"function": "exact", "scoring": "format_penalty"},
            "'format_penalty': this reward knows 'binary' only",
        ),
        ({"function": "math", "scoring": "passed_share"}, "knows 'binary' and 'format_penalty' only"),
        ({"function": "a:b", "scoring": "passed_share"}, "knows 'binary' only"),
        (
            {"function": "code", "correct_from": 0.5},
            "= 0.5: is read for reward functions of your own, lists and environments only",
        ),
    ],
)
def test_settings_that_a_grader_ignores_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        refuse_ignored(RewardConfig(**settings), [None])
    refuse_ignored(RewardConfig(function="code", scoring="passed_share"), [None])
    refuse_ignored(RewardConfig(function="a:b", correct_from=0.5), [None])
    refuse_ignored(RewardConfig(correct_from=0.5), ["environment"])


def test_of_several_verifiers_one_must_read_a_setting() -> None:
    refuse_ignored(RewardConfig(scoring="passed_share"), ["math", "code"])
    with pytest.raises(UserError, match="knows 'binary' and 'format_penalty' only"):
        refuse_ignored(RewardConfig(scoring="passed_share"), ["math", "math"])


def test_what_training_reads_the_held_out_set_may_leave() -> None:
    data = DataConfig(train="sorting")
    heldout, reward = open_heldout(data), RewardConfig(scoring="format_penalty")
    with pytest.raises(UserError, match="knows 'binary' only"):
        with_grader(heldout, reward, data)
    with_grader(heldout, reward, data, [replace(open_training(data), verifier="math")])


def test_several_functions_pay_their_weighted_sum(module: str) -> None:
    write(module, "def length(completions): return [None if c == 'none' else float(len(c)) for c in completions]")
    names = ("exact", f"{module}:length")
    settings = RewardConfig(function=names, weights=(2.0, 0.5), correct_from=2.0)
    texts = [answered(PROBLEMS[0], text, (7,)) for text in ("2", "xyz", "none")]
    verdicts = load_grader(settings, None, PROBLEMS)(texts)
    assert [v.reward for v in verdicts] == [2.5, 1.5, 0.0]
    assert [v.status for v in verdicts] == ["right", "wrong", "wrong"]
    assert verdicts[1].parts == (("exact", 0.0), (f"{module}:length", 3.0))
    assert math.isnan(verdicts[2].parts[1][1])
    alone = load_grader(RewardConfig(function=(f"{module}:length",)), None, PROBLEMS)(texts[2:])
    assert alone[0].status == "error"
    with pytest.raises(UserError, match=r"has no answer"):
        load_grader(settings, None, [Problem(id="a", prompt="?")])


def test_a_list_keeps_what_a_verifier_says_of_an_answer(module: str) -> None:
    """Else a list would hide completions without an answer, and the reasons for wrong ones, from metrics."""
    write(module, "def length(completions, **_): return [0.5 * len(c) for c in completions]")
    names, texts = (f"{module}:length", "math"), (r"<think>a</think>\boxed{2}", r"\boxed{\frac{2}{}}", "")
    settings = RewardConfig(function=names, weights=(0.0, 1.0), scoring="format_penalty")
    verdicts = load_grader(settings, None, PROBLEMS)([answered(PROBLEMS[0], text, (7,)) for text in texts])
    assert [(v.status, v.reward, v.format_ok) for v in verdicts] == [
        ("right", 1.0, True),
        ("wrong", -1.0, False),
        ("no_answer", -1.0, False),
    ]
    assert verdicts[1].detail == r"not a formula: \frac{2}{}"
