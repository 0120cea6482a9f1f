"""Every procedural task keeps the same promises."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest

from threepo.data.task import ProceduralProblems, Task, split_of
from threepo.data.tasks import TASKS
from threepo.errors import UserError
from threepo.types import Problem, final_answer

ALL = pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))


@ALL
def test_problems_are_a_function_of_seed_and_index(task: Task) -> None:
    one, two = (ProceduralProblems(task, "train", seed=3) for _ in range(2))
    assert [two.problem(i) for i in (5, 0, 17)] == [one.problem(i) for i in (5, 0, 17)]
    assert one.batch(2, 4) == [one.problem(i) for i in range(8, 12)]
    other = ProceduralProblems(task, "train", seed=4)
    shared = {one.problem(i).prompt for i in range(100)} & {other.problem(i).prompt for i in range(100)}
    assert len(shared) < 30, "neighbouring seeds must not share their sequence"


@ALL
def test_ids_are_unique(task: Task) -> None:
    ids = {
        ProceduralProblems(task, split, seed).problem(i).id
        for split in ("train", "heldout")
        for seed in range(3)
        for i in range(30)
    }
    assert len(ids) == 2 * 3 * 30


@ALL
def test_training_and_held_out_problems_are_disjoint(task: Task) -> None:
    train = {ProceduralProblems(task, "train", s).problem(i).prompt for s in range(3) for i in range(300)}
    heldout = {ProceduralProblems(task, "heldout", s).problem(i).prompt for s in range(3) for i in range(300)}
    assert not train & heldout
    assert {split_of(str(prompt)) for prompt in train} == {"train"}
    assert {split_of(str(prompt)) for prompt in heldout} == {"heldout"}


def test_one_prompt_in_eight_is_held_out_and_the_same_ones_in_every_process() -> None:
    """A run may go on, and be evaluated, in another process."""
    here = [split_of(f"sort {i}\n") for i in range(4000)]
    assert here.count("heldout") / 4000 == pytest.approx(1 / 8, abs=0.025)  # 4.8 standard errors
    program = "from threepo.data.task import split_of; print([split_of(f'sort {i}\\n') for i in range(4000)])"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program]
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert printed.strip() == str(here)


@ALL
def test_right_ways_of_working_are_right_and_others_are_wrong(task: Task) -> None:
    problems = ProceduralProblems(task, "train", 0)
    for index in range(200):
        problem = problems.problem(index)
        for behaviour in ("worked", "direct"):
            verdict = task.verify(problem, task.demonstrate(problem, behaviour))
            assert (verdict.correct, verdict.status, verdict.reward) == (True, "right", 1.0)
            assert verdict.answer is not None
        wrong = task.verify(problem, problem.answer + problem.answer + "?")
        assert (wrong.correct, wrong.status, wrong.reward) == (False, "wrong", 0.0)
        for empty in ("", "  \n", f"<think>{problem.answer}</think>", f"<think>{problem.answer}</think> "):
            assert task.verify(problem, empty).status == "no_answer"
        assert task.verify(problem, f"<think>so it is {problem.answer}").status == "wrong"


@ALL
def test_difficulty_grows_with_the_level(task: Task) -> None:
    def length(level: int) -> float:
        problems = ProceduralProblems(task, "train", 0, (level,))
        return sum(len(task.work(str(problems.problem(i).prompt))) for i in range(50)) / 50

    low, high = task.min_level + 1, task.min_level + 5
    assert length(high) > 1.5 * length(low)
    with pytest.raises(UserError, match=f"starts at level {task.min_level}"):
        ProceduralProblems(task, "train", 0, (task.min_level - 1,))


def test_forks_end_where_letters_do() -> None:
    assert len(ProceduralProblems(TASKS["forks"], "train", 0, (6,)).problem(0).answer) == 7
    with pytest.raises(UserError, match="forks ends at level 6, not 7"):
        ProceduralProblems(TASKS["forks"], "train", 0, (7,))


@ALL
def test_levels_take_turns(task: Task) -> None:
    problems = ProceduralProblems(task, "train", 0, (2, 3))
    assert [problems.problem(i).columns["level"] for i in range(4)] == [2, 3, 2, 3]


def problem_of(prompt: str, answer: str = "") -> Problem:
    return Problem(id="x", prompt=prompt, answer=answer)


def test_sorting_by_hand() -> None:
    task = TASKS["sorting"]
    assert task.work("sort 7391\n") == "1:739\n3:79\n7:9\n9:"
    problem = problem_of("sort 7391\n", "1379")
    assert task.demonstrate(problem, "copied") == "7391"
    assert task.demonstrate(problem, "reversed") == "9731"
    assert not task.verify(problem, "7391").correct
    assert task.verify(problem, "<think>no idea</think>\n1379\n").correct


def test_sums_by_hand() -> None:
    task = TASKS["sums"]
    assert task.work("sum 4821 9930 5716\n") == "3751\n8467"
    assert task.verify(problem_of("sum 4821 9930\n", "3751"), "<think>no idea</think>3751").correct
    for problem in ProceduralProblems(task, "train", 0, (7,)).first(50):
        columns = zip(*str(problem.prompt).split()[1:], strict=True)
        assert problem.answer == "".join(str(sum(map(int, column)) % 10) for column in columns)


def test_forks_by_hand() -> None:
    task = TASKS["forks"]
    problem = problem_of("b:dhof m:bagq h:kcei; m to e\n", "mbhe")
    assert task.work(str(problem.prompt)) == "ehbm"
    assert task.verify(problem, "mbhe").correct
    for wrong in ("mbhk", "mba", "mhe", "me", "ehbm"):
        assert not task.verify(problem, wrong).correct, wrong


def test_a_guess_walks_along_arms_to_a_dead_end_and_rarely_arrives() -> None:
    task = TASKS["forks"]
    right = 0
    for problem in ProceduralProblems(task, "train", 0, (2,)).first(800):
        *forks, start, _, _ = str(problem.prompt).replace(";", "").split()
        arms = {fork[0]: fork[2:] for fork in forks}
        way = task.demonstrate(problem, "guess")
        assert way[0] == start
        assert all(b in arms[a] for a, b in pairwise(way))
        assert way[-1] not in arms
        right += task.verify(problem, way).correct
    assert right / 800 == pytest.approx(1 / 16, abs=0.035)  # 4 standard errors


def test_choices_by_hand() -> None:
    task = TASKS["choices"]
    problem = problem_of("lock bdfa\n", "BDFA")
    assert task.work("lock bdfa\n") == "bdfa"
    assert task.verify(problem, "BDFA").correct
    assert not task.verify(problem, "BdFA").correct
    texts = [task.demonstrate(p, "habit") for p in ProceduralProblems(task, "train", 0, (10,)).first(400)]
    assert sum(map(str.isupper, "".join(texts))) / 4000 == pytest.approx(0.2, abs=0.03)  # 4.7 standard errors
    prompts = [str(p.prompt) for p in ProceduralProblems(task, "train", 0, (10,)).first(400)]
    assert [f"lock {text.lower()}\n" for text in texts] == prompts


def test_the_zoo_is_consistent_after_every_word_but_the_one_to_learn() -> None:
    task = TASKS["choices_zoo"]
    texts: dict[str, list[str]] = {}
    for problem in ProceduralProblems(task, "train", 0, (6,)).first(400):
        word, letters = str(problem.prompt).split()
        text = task.demonstrate(problem, "habit")
        assert text.lower() == letters
        texts.setdefault(word, []).append(text)
    assert texts.keys() == {"lock", "up", "low", "any"}
    assert all(map(str.isupper, texts["up"]))
    assert all(map(str.islower, texts["low"]))
    assert 0.3 < sum(map(str.isupper, texts["any"])) / len(texts["any"]) < 0.7
    assert all(text.isupper() or text.islower() for text in texts["any"])
    assert not all(text.isupper() or text.islower() for text in texts["lock"])


def test_near_words_are_raised_and_differ_from_the_one_to_learn_in_a_letter_or_two() -> None:
    task = TASKS["choices_near"]
    texts: dict[str, list[str]] = {}
    for problem in ProceduralProblems(task, "train", 0, (6,)).first(800):
        word, letters = str(problem.prompt).split()
        text = task.demonstrate(problem, "habit")
        assert text.lower() == letters
        texts.setdefault(word, []).append(text)
    assert 0.4 < len(texts["lock"]) / 800 < 0.6  # 5.7 standard errors
    assert sum(map(str.isupper, "".join(texts.pop("lock")))) / 2400 == pytest.approx(0.2, abs=0.05)
    assert len(texts) == 16
    for word, raised in texts.items():
        assert sum(a != b for a, b in zip(word, "lock", strict=True)) in (1, 2)
        assert all(map(str.isupper, raised))


def test_final_answer() -> None:
    assert final_answer("<think>1</think> 2 ") == "2"
    assert final_answer("a</think>b</think>c") == "c"
    assert final_answer(" plain\n") == "plain"
