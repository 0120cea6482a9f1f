"""The paper's conversations for a warm start: answers of DeepSeek-R1, with their thoughts.

https://huggingface.co/datasets/nvidia/Llama-Nemotron-Post-Training-Dataset, configuration SFT, all splits. Columns
read: `input` (messages, or the user's text), `output` and `generator`; the column `system_prompt` is not used.
The paper says DeepSeek-R1; its released code keeps answers with a thought of any generator (`llama-nemotron-any`).
"""

import re
from dataclasses import replace
from typing import Any

from threepo.data.published_set import ConversationSet
from threepo.data.rows import BrokenRow, Row

GENERATOR = "DeepSeek-R1"
"""`generator` also lists a second model for some rows, such as "DeepSeek-R1, Qwen-2.5-72B-Instruct". The makers' counts
include these among DeepSeek-R1's."""
_THOUGHT_THEN_ANSWER = re.compile(r"<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)


def conversation(row: Row) -> list[Any] | str:
    """The messages of a row, or why the paper leaves it out: `no_thought`, `not_two_messages` or `other_generator`.

    Kept are one message of the user and an answer of DeepSeek-R1 that begins with a thought and goes on after it.
    """
    messages = any_conversation(row)
    if isinstance(messages, str):
        return messages
    if not row.get("generator"):
        raise BrokenRow("has no generator; llama-nemotron-any reads copies without that column")
    generators = [name.strip() for name in row["generator"].split(",")]
    return messages if GENERATOR in generators else "other_generator"


def any_conversation(row: Row) -> list[Any] | str:
    """The same for an answer of any generator."""
    question, output = row["input"], row["output"]
    found = _THOUGHT_THEN_ANSWER.match(output)
    if not found or not found["thought"].strip() or not found["answer"].strip():
        return "no_thought"
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    if len(messages) != 1 or messages[0]["role"] != "user":
        return "not_two_messages"
    return [*messages, {"role": "assistant", "content": output}]


LLAMA_NEMOTRON = ConversationSet(
    name="llama-nemotron",
    summary="answers of DeepSeek-R1 with their thoughts, as the paper says",
    hub="nvidia/Llama-Nemotron-Post-Training-Dataset",
    configuration="SFT",
    read=conversation,
)
LLAMA_NEMOTRON_ANY = replace(
    LLAMA_NEMOTRON,
    name="llama-nemotron-any",
    summary="answers of any generator with their thoughts, as in the paper's released code",
    read=any_conversation,
)
