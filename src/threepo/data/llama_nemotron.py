"""The paper's conversations for a warm start: answers of reasoning models, with their thoughts.

https://huggingface.co/datasets/nvidia/Llama-Nemotron-Post-Training-Dataset, configuration SFT, all splits. Columns
read: `input` (messages, or the user's text) and `output`.
"""

import re
from collections.abc import Mapping
from typing import Any

from threepo.data.rows import BrokenRow, Row, value_at

HUB, CONFIGURATION = "nvidia/Llama-Nemotron-Post-Training-Dataset", "SFT"

_THOUGHT_THEN_ANSWER = re.compile(r"<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)


def conversation(row: Row) -> list[Any] | str:
    """The messages of a row, or why the paper leaves it out: `no_thought` or `not_two_messages`.

    Kept are a user's message and an answer that begins with a thought, after which there is more. The system prompt,
    which stands in a column of its own, is not used, and neither are the names of the generators: the thought alone
    tells who reasoned.
    """
    asked, output = value_at(row, "input"), value_at(row, "output")
    if not isinstance(output, str):
        raise BrokenRow("its output is no text")
    found = _THOUGHT_THEN_ANSWER.match(output)
    if not found or not found["thought"].strip() or not found["answer"].strip():
        return "no_thought"
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if not isinstance(messages, list):
        raise BrokenRow("its input is neither text nor a list of messages")
    if len(messages) != 1 or not isinstance(messages[0], Mapping) or messages[0].get("role") != "user":
        return "not_two_messages"
    return [*messages, {"role": "assistant", "content": output}]
