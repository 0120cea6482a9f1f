"""The final answer of a completion; shared by tasks and reward functions."""

from threepo.types import Problem, Verdict

THINK, THINK_END = "<think>", "</think>"


def final_answer(completion: str) -> str:
    """The text after the last `</think>`, or the whole text if there is none; without surrounding blanks."""
    return completion.rpartition(THINK_END)[2].strip()


def judge(given: str, correct: bool) -> Verdict:
    """The verdict on a final answer; an empty one is no answer."""
    if not given:
        return Verdict(correct=False, status="no_answer", answer=None)
    return Verdict(correct=correct, status="right" if correct else "wrong", answer=given)


def exact_match(problem: Problem, completion: str) -> Verdict:
    """Right if the final answer equals the reference answer, whatever the number of blanks between words."""
    given = final_answer(completion)
    return judge(given, given.split() == problem.answer.split())


def lacks_answer(problem: Problem) -> str:
    """Why a grader that needs a reference answer cannot grade a problem; empty if it can."""
    if problem.answer.strip():
        return ""
    empty = "answer" in problem.columns and not str(problem.columns["answer"] or "").strip()
    others = ", ".join(repr(name) for name in problem.columns if name != "answer" or not empty)
    reason = "has no answer, which reward.function needs" + ("; its answer column is empty" if empty else "")
    if empty and not others:
        return reason
    return f"{reason}; its other columns are {others or 'none'}; set data.answer_column"
