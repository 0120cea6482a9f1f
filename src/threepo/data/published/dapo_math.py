"""DAPO-Math-17k (BytedTsinghua-SIA/DAPO-Math-17k): competition mathematics with short, mostly integer answers.

The published file holds every problem about a hundred times; the first row of each `extra_info.index` is kept. Around
each problem stand instructions to end with a line `Answer: ...`. They would contradict ours, so they are removed.
"""

from threepo.data.prompts import MATH_TRAINING
from threepo.data.published_set import PublishedSet
from threepo.data.rows import BrokenRow, Row
from threepo.types import Problem

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
AFTER = 'Remember to put your answer on its own line after "Answer:".'
"""The published instructions; blank lines separate them from the problem."""


def _read(row: Row) -> Problem:
    (message,) = row["prompt"]
    prompt = message["content"].strip()
    problem = prompt.removeprefix(BEFORE).removesuffix(AFTER).strip()
    if not problem or not prompt.startswith(BEFORE) or not prompt.endswith(AFTER):
        raise BrokenRow("its prompt is not a problem between the instructions of the published rows")
    answer = row["reward_model"]["ground_truth"].strip()
    return Problem(id=row["extra_info"]["index"], prompt=problem, answer=answer)


DAPO_MATH = PublishedSet(
    name="dapo-math-17k",
    summary="competition mathematics, about 17,400 problems",
    hub="BytedTsinghua-SIA/DAPO-Math-17k",
    read=_read,
    template=MATH_TRAINING,
    verifier="math",
)
