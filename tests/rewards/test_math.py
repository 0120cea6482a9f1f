"""The verifier of mathematics as a whole: verdicts, rewards, and what hostile completions may not do."""

import time
from collections import Counter
from pathlib import Path

import pytest

from factories import answered
from threepo.config import RewardConfig
from threepo.data.published import MATH_TRAINING
from threepo.errors import UserError
from threepo.rewards import math
from threepo.rewards.grading import load_grader
from threepo.rewards.math import MOST_CHARACTERS, MathGrader
from threepo.types import Problem

RIGHT = r"<think>so</think> \boxed{5}"
HANGING = [r"\cos(9^{9^{9^9}})", "((((9!)!)!)!)"]
"""Answers at which the process must be killed."""


@pytest.fixture(scope="module")
def grader() -> MathGrader:
    return MathGrader(RewardConfig(function="math", workers=2, timeout_s=3, memory_mib=400))


@pytest.fixture(scope="module")
def penalizing() -> MathGrader:
    return MathGrader(RewardConfig(scoring="format_penalty", timeout_s=0.3, workers=1))


def test_the_outcomes(grader: MathGrader, penalizing: MathGrader) -> None:
    """The last of them is an error, for which the grader with little time is enough."""
    completions = [RIGHT, r"\boxed{\sqrt{36}}", "I do not know", r"\boxed{\frac{2}{}}"]
    verdicts = grader.grade(completions, [r"\sqrt{25}"] * 4) + penalizing.grade([rf"\boxed{{{HANGING[0]}}}"], ["5"])
    assert [v.status for v in verdicts] == ["right", "wrong", "no_answer", "wrong", "error"]
    assert [v.correct for v in verdicts] == [True, False, False, False, False]
    assert [v.reward for v in verdicts] == [1.0, 0.0, 0.0, 0.0, -1.0]
    assert [v.answer for v in verdicts] == ["5", r"\sqrt{36}", None, r"\frac{2}{}", HANGING[0]]
    assert [v.detail for v in verdicts] == ["", "", "", r"not a formula: \frac{2}{}", "time-out"]
    assert [v.format_ok for v in verdicts] == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("opening", "text", "reward", "status"),
    [
        ("", RIGHT, 1.0, "right"),
        ("", r"<think>so</think> \boxed{6}", 0.0, "wrong"),
        ("", r"<think>so</think> It is \boxed{5}", 0.0, "right"),
        ("", r"It is \boxed{6}", -1.0, "wrong"),
        ("", "so and so and so and", -1.0, "no_answer"),
        # An error pays what a wrong answer in that layout pays.
        ("", rf"<think>so</think> \boxed{{{HANGING[0]}}}", 0.0, "error"),
        # What the prompt has opened belongs to the layout, and a thought that is not finished holds no answer.
        ("<think>", r"so</think> \boxed{5}", 1.0, "right"),
        ("<think>", r"so</think> \boxed{6}", 0.0, "wrong"),
        ("<think>", r"It is \boxed{5}", -1.0, "no_answer"),
        ("<think>", r"<think>so</think> \boxed{5}", 0.0, "right"),
        ("", r"so</think> \boxed{5}", 0.0, "right"),
    ],
)
def test_the_layout_may_count(opening: str, text: str, reward: float, status: str, penalizing: MathGrader) -> None:
    problem = Problem(id="a", prompt="?", answer="5")
    (verdict,) = penalizing([answered(problem, text, opening=opening)])
    assert (verdict.reward, verdict.status) == (reward, status)
    assert verdict.format_ok is (reward == (status == "right"))


def test_a_recipe_gets_it_by_name() -> None:
    problems = [Problem(id="a", prompt="?", answer="27.0"), Problem(id="b", prompt="?", answer=r"so \boxed{1/2}")]
    grade = load_grader(RewardConfig(function="math"), None, problems)
    texts = [r"\boxed{27}", "Answer: $0.5$."]
    assert [v.correct for v in grade(list(map(answered, problems, texts)))] == [True, True]
    with pytest.raises(UserError, match="has no answer, which reward.function needs"):
        load_grader(RewardConfig(function="math"), None, [Problem(id="a", prompt="?")])


def test_the_training_prompt_promises_no_more_than_the_default_scoring_keeps() -> None:
    problem = Problem(id="a", prompt="?", answer="5")
    (verdict,) = MathGrader(RewardConfig(function="math"))([answered(problem, r"It is \boxed{5}")])
    assert verdict.reward == 1.0
    assert "wrong" not in MATH_TRAINING, "another layout is paid"


def test_called_as_trl_calls_rewards() -> None:
    texts = [r"\boxed{5}", r"\boxed{6}", ""]
    assert math.reward(texts, answer=["5"] * 3, completion_ids=[[1]] * 3, level=[1, 2, 3]) == [1.0, 0.0, 0.0]
    assert math.reward(texts, answer=[5] * 3) == [1.0, 0.0, 0.0]
    with pytest.raises(UserError, match="is None, a NoneType; it must be text or a number"):
        math.reward(texts, answer=["5", None, ["5"]])
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert math.reward(completions=chats, answer=["5"] * 3, prompts=[[]] * 3) == [1.0, 0.0, 0.0]
    assert math.grade(r"\boxed{5}", "5").correct
    with pytest.raises(UserError, match="answer: is empty"):
        math.grade(r"\boxed{5}", " ")


def test_trl_is_told_what_the_verifier_could_not_judge(penalizing: MathGrader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "_default_grader", lambda: penalizing)
    assert math.reward([rf"\boxed{{{HANGING[0]}}}", RIGHT], answer=["5", "5"]) == [None, 1.0]


def test_a_pair_is_looked_at_once(grader: MathGrader, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, run = [], grader._pool.map
    monkeypatch.setattr(grader._pool, "map", lambda items: seen.extend(items) or run(items))
    verdicts = grader.grade([r"\boxed{\sqrt{49}}", r"\boxed{x}"] * 16 + [r"\boxed{7}"] * 16, ["7"] * 48)
    assert seen == [(r"\sqrt{49}", "7"), ("x", "7")]
    assert [v.correct for v in verdicts] == [True, False] * 16 + [True] * 16


PIECES = [
    *(r"\boxed{", r"\boxed{x", r"\boxed{5}", r"\boxed{\boxed{5}\text{b}", r"\boxed ", r"\boxed a", r"\text{"),
    *(r"\text{a}", "{", "}", "{}", "\\", r"\{", r"\frac{", r"\frac{1}{2}", r"\sqrt{", " ", "\n", ",", "1", "1,", "a"),
    *("=", "(", "$", "½", "Answer:", "answer: ", "**", "<think>", "</think>", "<think></think>", r"\boxed{ "),
    *(r"\text  ", r"x=1, ", "5 cm "),
]
PLACES = [
    *[("", ""), (r"\boxed{", "}"), ("<think>", r"</think> \boxed{5}"), ("Answer: ", "")],
    *[(r"\boxed{a", r"\boxed{5}}"), (r"<think></think>\boxed{", "} x"), (r"<think></think>\boxed{", "}")],
]


@pytest.mark.parametrize("piece", PIECES)
def test_a_long_completion_costs_the_trainer_little(piece: str, grader: MathGrader) -> None:
    """Grading in the trainer's own process has no time limit, so it must be quick for any completion.

    The processor time of this process alone counts. A busy or slow machine may exceed 15 ms for 80 kB without a fault;
    there the cost must at least grow in proportion to the length: sixteenfold, where a quadratic one grows 256-fold.
    """

    def cost(size: int, before: str, after: str) -> float:
        begin = time.process_time()
        grader.grade([before + (piece * size)[:size] + after], ["5"])
        return time.process_time() - begin

    for place in PLACES:
        if (long := cost(80_000, *place)) > 0.015:
            assert min(long, cost(80_000, *place)) < 40 * min(cost(5_000, *place) for _ in range(3))


def test_long_answers_are_compared_where_time_is_limited(grader: MathGrader, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, run = [], grader._pool.map
    monkeypatch.setattr(grader._pool, "map", lambda items: seen.extend(items) or run(items))
    given, reference = ", ".join(map(str, range(70))), ", ".join(map(str, reversed(range(70))))
    texts = [rf"\boxed{{{answer}}}" for answer in (given, "1, 2", "7" * 10**6)]
    assert [v.correct for v in grader.grade(texts, [reference, "2, 1", "7"])] == [True, True, False]
    assert seen == [(given, reference)]
    (found,) = grader.grade([rf"\boxed{{{'7' * 2001}.0}}"], ["7" * 2001])
    assert found.correct, "the reference is as long"


def test_hostile_completions(grader: MathGrader, tmp_path: Path) -> None:
    touch = f"__import__('os').system('touch {tmp_path / 'here'}')"
    tokens = ("<think>", "</think>", "answer ", r"\boxed" + "\\", r"\boxed{", "{", "}", "\\", "\0", "\u202e", "x")
    wrong = [touch, rf"\text{{{touch}}}", rf"\operatorname{{{touch}}}(1)", "\ud800"]
    wrong += ["1000000000!", "10^{10^{10}}", r"\frac00", "x^{x^{x^x}}", ",".join("1" * 900)]
    wrong += ["1+" * 500_000 + "1", "7" * 1900, "7" * 10**6, r"\frac{1}{" * 150 + "2" + "}" * 150]
    wrong += ["(" * 900 + "5" + ")" * 900, "{" * 900 + "6" + "}" * 900]
    hostile = {
        "error": [rf"\boxed{{{answer}}}" for answer in HANGING],  # first: the others need new processes
        "right": ["\u202e\\boxed{5}", r"\boxed{" + "{" * 5 + "5" + "}" * 8, r"\boxed{0005}"],
        "no_answer": ["", r"\boxed{", *(token * 100_000 for token in tokens)],
        "wrong": ["Answer:" * 100_000, *(rf"\boxed{{{answer}}}" for answer in wrong)],
    }
    completions = [(status, completion) for status, group in hostile.items() for completion in group]
    verdicts = grader.grade([completion for _, completion in completions], ["5"] * len(completions))
    found = [(verdict.status, completion[:80]) for verdict, (_, completion) in zip(verdicts, completions, strict=True)]
    assert found == [(status, completion[:80]) for status, completion in completions]
    assert Counter(v.status for v in verdicts) == {"right": 3, "no_answer": 13, "wrong": 16, "error": 2}
    assert all(len(v.answer or "") <= MOST_CHARACTERS for v in verdicts)
    assert not (tmp_path / "here").exists()


def test_too_little_memory_is_refused_by_name() -> None:
    grader = MathGrader(RewardConfig(memory_mib=20))
    with pytest.raises(UserError, match=r"reward.memory_mib = 20: is too small .* set it to \d+ or more"):
        grader.grade([r"\boxed{\sqrt{4}}"], ["2"])
