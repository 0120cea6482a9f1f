"""Code-R1 (ganler/code-r1-12k): programming problems with tests, 2K of LeetCode and 10K of TACO.

`reward_model.ground_truth` is JSON text and becomes the column `tests`. It holds either `functional`, Python that runs
after the program and raises an exception where the program is wrong, or `inputs` and `outputs`. Code in
`extra_info.prefix`, which runs before the program, comes along. The published system prompt asks for tags that we do
not use, so it is removed, as is the line that asks for a markdown block: our template asks for one.
"""

import json
from typing import Any

from threepo.data.prompts import CODE, CODE_STDIN
from threepo.data.published_set import PublishedSet
from threepo.data.rows import BrokenRow, Row
from threepo.types import Problem

INSTRUCTIONS = (
    "Please solve the programming task below using a self-contained code snippet in a markdown code block.",
    "Solve the programming task below in a Python markdown code block.",
)
"""The first lines of the published problems of LeetCode and of TACO."""


def _read(row: Row) -> Problem:
    (question,) = (message["content"].strip() for message in row["prompt"] if message["role"] == "user")
    for instruction in INSTRUCTIONS:
        question = question.removeprefix(instruction).strip()
    if not question:
        raise BrokenRow("its prompt holds an instruction, but no problem")
    tests = _tests(json.loads(row["reward_model"]["ground_truth"]))
    prefix = (row.get("extra_info") or {}).get("prefix")
    if "functional" in tests and prefix:
        tests["prefix"] = prefix
    stdin = f"\n\n{CODE_STDIN}" if "inputs" in tests else ""
    return Problem(id="", prompt=question + stdin, columns={"tests": tests})


def _tests(tests: Any) -> dict[str, Any]:
    functional, inputs, outputs = (tests.get(name) for name in ("functional", "inputs", "outputs"))
    if isinstance(functional, str) and functional.strip():
        return {"functional": functional}
    if _are_texts(inputs) and _are_texts(outputs) and len(inputs) == len(outputs):
        return {"inputs": inputs, "outputs": outputs}
    raise BrokenRow("its ground_truth holds neither 'functional' tests nor 'inputs' and as many 'outputs', as text")


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


CODE_R1 = PublishedSet(
    name="code-r1-12k",
    summary="programming in Python, about 12,000 problems with tests",
    hub="ganler/code-r1-12k",
    read=_read,
    template=CODE,
    verifier="code",
    heldout="test",
)
