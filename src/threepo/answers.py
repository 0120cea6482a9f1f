"""Reading the final answer out of a completion; shared by tasks and reward functions."""

from threepo.types import Problem, Verdict

THINK, THINK_END = "<think>", "</think>"


def final_answer(completion: str) -> str:
    """What stands after the last `</think>`, or the whole text where there is none; without surrounding blanks."""
    return completion.rpartition(THINK_END)[2].strip()


def judge(given: str, correct: bool) -> Verdict:
    """The verdict on a final answer; an empty one is no answer."""
    if not given:
        return Verdict(correct=False, status="no_answer", answer=None)
    return Verdict(correct=correct, status="right" if correct else "wrong", answer=given)


def exact_match(problem: Problem, completion: str) -> Verdict:
    """Right when the final answer is the reference answer, the width of blanks aside."""
    given = final_answer(completion)
    return judge(given, given.split() == problem.answer.split())


def lacks_answer(problem: Problem, function: str) -> str:
    """Why `reward.function`, which needs a reference answer, cannot grade a problem; empty if it can."""
    if problem.answer.strip():
        return ""
    columns = ", ".join(map(repr, problem.columns)) or "none"
    return (
        f"has no answer, and reward.function = {function!r} needs one; its columns besides the prompt are {columns}; "
        f"set data.answer_column"
    )
