"""The published data sets: where the Hugging Face hub has them, how their rows are read, and the text around problems.

To add one: a function that reads a row, and a record at the end of this file. The name of a set means its
copy on the hub; `NAME:COPY` reads the same columns from any other source (config.sources).
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from threepo.config.sources import split_source
from threepo.data.rows import BrokenRow, Messages, Row, Rows, chat_messages, open_rows
from threepo.types import Problem

# Instructions around problems: for mathematics the meaning of the released code's, in our words (the paper has none).
# `{prompt}` stands for the problem's text.

MATH_TRAINING = """\
Solve the mathematics problem below. First reason inside <think> and </think>. After </think>, give nothing but the \
final answer, inside \\boxed{}.

{prompt}

Keep to this layout:
<think>
your reasoning
</think>
\\boxed{your final answer}"""
"""RLVR on mathematics: reasoning in tags, then only the boxed answer (spec 8.1)."""

MATH_EVALUATION = """\
You are an expert in solving mathematics problems. Think step by step, and put your final answer inside \\boxed{}.

Question:
{prompt}"""
"""Evaluation on mathematics: one user turn, which differs from the training prompt (spec 8.1)."""

CODE = """\
Solve the programming problem below in Python. First reason inside <think> and </think>. After </think>, give the \
whole program in one block:
```python
your program
```

{prompt}"""
"""RLVR and evaluation on code: the last Python block is what runs (spec 8.2, 9.3)."""

CODE_STDIN = "The program reads standard input and writes standard output."
"""Text added to a problem whose tests are inputs and outputs."""

CODE_STARTER = "Begin with this code, and keep its names:\n```python\n{starter}\n```"
"""Text added to a problem that gives the signature of its solution; `{starter}` stands for the signature."""


@dataclass(frozen=True)
class PublishedSet:
    """Problems or conversations as their authors published them."""

    name: str
    summary: str
    """A few words for `threepo data list`."""
    hub: str
    """Its id on the hub, with the configuration if there are several."""
    read: Callable[[Row], Any]
    """A row's problem, or its messages. Conversations are read from all splits.

    Rows of the same problem share its id; an empty id means the row's number. One word instead of messages says why
    the row is left out; the run counts rows by that word.
    """
    heldout: str | None = None
    """The hub's split with held-out problems, if there is one."""
    verifier: str | None = None
    """The verifier of problems, which determines the text around them too (`TEMPLATES`); None: conversations."""

    def rows(self, copy: str, split: str) -> Rows:
        """The rows of `copy`, or of the hub where that is empty; a folder may have the hub's configurations too."""
        return open_rows(copy or self.hub, split, split_source(self.hub)[1] or None)

    def item(self, row: Row) -> Any:
        """`read(row)`; `BrokenRow` if the row does not have the published columns."""
        try:
            return self.read(row)
        except BrokenRow:
            raise
        except Exception as error:  # whatever missing columns and damaged values lead to
            raise BrokenRow(f"is not a row of {self.name} as published: {type(error).__name__}: {error}") from error


# Code-R1: programming problems with tests, 2K of LeetCode and 10K of TACO

CODE_R1_INSTRUCTIONS = (
    "Please solve the programming task below using a self-contained code snippet in a markdown code block.",
    "Solve the programming task below in a Python markdown code block.",
)
"""The first lines of the published problems of LeetCode and of TACO. They are removed, because our template asks for a
code block. The published system prompt is not read, because it asks for tags that we do not use."""


def _code_r1(row: Row) -> Problem:
    """The column `tests` comes from `reward_model.ground_truth`, which is JSON text.

    It holds either `functional`, Python that runs after the program and raises an exception where the program is wrong,
    or `inputs` and `outputs`. The code in `extra_info.prefix` runs before the program.
    """
    (question,) = (message["content"].strip() for message in row["prompt"] if message["role"] == "user")
    for instruction in CODE_R1_INSTRUCTIONS:
        question = question.removeprefix(instruction).strip()
    if not question:
        raise BrokenRow("its prompt holds an instruction, but no problem")
    tests = json.loads(row["reward_model"]["ground_truth"])
    functional, inputs, outputs = (tests.get(name) for name in ("functional", "inputs", "outputs"))
    if isinstance(functional, str) and functional.strip():
        prefix = (row.get("extra_info") or {}).get("prefix")
        code = {"functional": functional} | ({"prefix": prefix} if prefix else {})
        return Problem(id="", prompt=question, columns={"tests": code})
    if _are_texts(inputs) and _are_texts(outputs) and len(inputs) == len(outputs):
        cases = {"inputs": inputs, "outputs": outputs}
        return Problem(id="", prompt=f"{question}\n\n{CODE_STDIN}", columns={"tests": cases})
    raise BrokenRow("its ground_truth holds neither 'functional' tests nor 'inputs' and as many 'outputs', as text")


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


# DAPO-Math-17k: competition mathematics with short, mostly integer answers

DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_AFTER = 'Remember to put your answer on its own line after "Answer:".'
"""The published instructions before and after each problem. They contradict our template, so they are removed."""


def _dapo_math(row: Row) -> Problem:
    """The published file holds every problem about a hundred times, each time with the same `extra_info.index`."""
    (message,) = row["prompt"]
    prompt = message["content"].strip()
    problem = prompt.removeprefix(DAPO_BEFORE).removesuffix(DAPO_AFTER).strip()
    if not problem or not prompt.startswith(DAPO_BEFORE) or not prompt.endswith(DAPO_AFTER):
        raise BrokenRow("its prompt is not a problem between the instructions of the published rows")
    return Problem(row["extra_info"]["index"], problem, row["reward_model"]["ground_truth"].strip())


# GSM8K: word problems of grade-school mathematics


def _gsm8k(row: Row) -> Problem:
    """The published answer is a worked solution; the final answer follows its last `####`, with commas in thousands."""
    solution = row["answer"].strip()
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise BrokenRow("its answer has no #### with the final answer after it")
    answer = re.sub(r"(?<=\d),(?=\d{3})", "", answer.strip())
    return Problem(id="", prompt=row["question"].strip(), answer=answer, columns={"solution": solution})


# Llama-Nemotron-Post-Training-Dataset: the paper's conversations for a warm start


def _llama_nemotron(row: Row, generator: str) -> Messages | str:
    """The messages of a row, or why it is left out: `no_thought`, `not_two_messages` or `other_generator`.

    Kept are one message of the user and an answer that begins with a thought and goes on after it. The paper takes the
    answers of the generator DeepSeek-R1; its released code takes the answers of any generator, which is "" here.
    """
    question, output = row["input"], row["output"]
    found = re.match(r"<think>(?P<thought>.*?)</think>(?P<answer>.*)", output, re.DOTALL)
    if not found or not found["thought"].strip() or not found["answer"].strip():
        return "no_thought"
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    if len(messages) != 1 or messages[0]["role"] != "user":
        return "not_two_messages"
    if generator and not row.get("generator"):
        raise BrokenRow("has no generator; llama-nemotron-any reads copies without that column")
    # Some rows list a second model, such as "DeepSeek-R1, Qwen-2.5-72B-Instruct"; the authors count them as R1's.
    if generator and generator not in [name.strip() for name in row["generator"].split(",")]:
        return "other_generator"
    return chat_messages([*messages, {"role": "assistant", "content": output}], "messages")


TEMPLATES: dict[str | None, str] = {"math": MATH_TRAINING, "code": CODE}
"""The text around the problems of a verifier; `{prompt}` stands for the problem."""
PUBLISHED = {
    "code-r1-12k": PublishedSet(
        name="code-r1-12k",
        summary="programming in Python, about 12,000 problems with tests",
        hub="ganler/code-r1-12k",
        read=_code_r1,
        heldout="test",
        verifier="code",
    ),
    "dapo-math-17k": PublishedSet(
        name="dapo-math-17k",
        summary="competition mathematics, about 17,400 problems",
        hub="BytedTsinghua-SIA/DAPO-Math-17k",
        read=_dapo_math,
        verifier="math",
    ),
    "gsm8k": PublishedSet(
        name="gsm8k",
        summary="grade-school word problems, 7,473 and 1,319 held out",
        hub="openai/gsm8k:main",
        read=_gsm8k,
        heldout="test",
        verifier="math",
    ),
}
CONVERSATIONS = {
    "llama-nemotron": PublishedSet(
        name="llama-nemotron",
        summary="answers of DeepSeek-R1 with their thoughts, as the paper says",
        hub="nvidia/Llama-Nemotron-Post-Training-Dataset:SFT",
        read=partial(_llama_nemotron, generator="DeepSeek-R1"),
    ),
    "llama-nemotron-any": PublishedSet(
        name="llama-nemotron-any",
        summary="answers of any generator with their thoughts, as in the paper's released code",
        hub="nvidia/Llama-Nemotron-Post-Training-Dataset:SFT",
        read=partial(_llama_nemotron, generator=""),
    ),
}
