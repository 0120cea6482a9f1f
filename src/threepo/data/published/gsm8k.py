"""GSM8K (openai/gsm8k): word problems of grade-school mathematics. The published answer is a worked solution.

The reference answer follows its last `####`; the commas that group its digits are removed.
"""

import re

from threepo.data.prompts import MATH_TRAINING
from threepo.data.published_set import PublishedSet
from threepo.data.rows import BrokenRow, Row
from threepo.types import Problem

_GROUPING = re.compile(r"(?<=\d),(?=\d{3})")
"""A comma between thousands."""


def _read(row: Row) -> Problem:
    solution = row["answer"].strip()
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise BrokenRow("its answer has no #### with the final answer after it")
    answer = _GROUPING.sub("", answer.strip())
    return Problem(id="", prompt=row["question"].strip(), answer=answer, columns={"solution": solution})


GSM8K = PublishedSet(
    name="gsm8k",
    summary="grade-school word problems, 7,473 and 1,319 held out",
    hub="openai/gsm8k",
    read=_read,
    template=MATH_TRAINING,
    verifier="math",
    configuration="main",
    heldout="test",
)
