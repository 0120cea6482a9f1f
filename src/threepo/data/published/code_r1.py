"""Code-R1 (ganler/code-r1-12k): programming problems with tests, 2K of LeetCode and 10K of TACO.

`reward_model.ground_truth` is JSON text and becomes the column `tests`: either `functional`, Python that runs after
the program and raises where it is wrong, or `inputs` and `outputs`, what to put in and what must come out; what
`extra_info.prefix` has to run before the program comes along. The published system prompt asks for tags that we do not,
and goes; so does the line that asks for a markdown block, where it is one of the two known: our template asks for such
a block itself.
"""

import json
from typing import Any, TypeGuard

from threepo.data.prompts import CODE, CODE_STDIN
from threepo.data.published_set import Content, PublishedSet
from threepo.data.rows import BrokenRow, Row, text_at, value_at

INSTRUCTIONS = (
    "Please solve the programming task below using a self-contained code snippet in a markdown code block.",
    "Solve the programming task below in a Python markdown code block.",
)
"""With which the published problems of LeetCode and of TACO begin."""


def _read(row: Row) -> Content:
    tests = _tests(text_at(row, "reward_model", "ground_truth"))
    prefix = _prefix(row.get("extra_info"))
    if "functional" in tests and prefix:
        tests["prefix"] = prefix
    problem = _question(value_at(row, "prompt"))
    if "inputs" in tests:
        problem = f"{problem}\n\n{CODE_STDIN}"
    return Content(problem=problem, columns={"tests": tests})


def _prefix(extra: Any) -> str:
    """What has to run before the program; most rows have nothing."""
    if not isinstance(extra, dict | None):
        raise BrokenRow("its extra_info is no set of named values")
    prefix = (extra or {}).get("prefix") or ""
    if not isinstance(prefix, str):
        raise BrokenRow("its extra_info.prefix is no text")
    return prefix


def _question(messages: Any) -> str:
    listed = messages if isinstance(messages, list) else []
    asked = [message for message in listed if isinstance(message, dict) and message.get("role") == "user"]
    if len(asked) != 1:
        raise BrokenRow("its prompt is not a list of chat messages with one of role 'user'")
    question = text_at(asked[0], "content")
    for instruction in INSTRUCTIONS:
        question = question.removeprefix(instruction)
    if not question.strip():
        raise BrokenRow("its prompt holds an instruction, but no problem")
    return question.strip()


def _tests(text: str) -> dict[str, Any]:
    try:
        tests = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenRow(f"its reward_model.ground_truth is not valid JSON: {error}") from error
    if isinstance(tests, dict):
        if isinstance(tests.get("functional"), str) and tests["functional"].strip():
            return {"functional": tests["functional"]}
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if _are_texts(inputs) and _are_texts(outputs) and len(inputs) == len(outputs):
            return {"inputs": inputs, "outputs": outputs}
    raise BrokenRow(
        "its reward_model.ground_truth holds neither 'functional' tests nor 'inputs' and 'outputs', texts, as many of "
        "one as of the other"
    )


def _are_texts(values: Any) -> TypeGuard[list[str]]:
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
