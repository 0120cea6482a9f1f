"""Turns of an episode as tokens: what stands between two replies of a policy, and the tools that a reply calls.

Nothing is tokenised twice. Tokens that the policy has read and written stay as they are, and those that follow are
added: the end of the last reply, the observation, and the beginning of the next reply.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from threepo.config import DataConfig
from threepo.errors import UserError
from threepo.models.prompts import is_special, messages, tokenized, uses_chat
from threepo.types import THINK, THINK_END, Problem

Tokens = tuple[int, ...]
Message = Mapping[str, Any]
REMEMBERED = 1024
"""Observations whose tokens are kept."""
DEEPEST = 64
"""Most levels of a call, its own table included. Arguments of some hundred levels could not be sent."""
_MARK, _THOUGHT = "threepo-reply", "threepo-thought"
"""Words that no template writes, to find in what it renders."""


class ToolCall(NamedTuple):
    """A tool and its arguments, as a reply names them; arguments that are no table of names come as text."""

    name: str
    arguments: Mapping[str, Any] | str


class ToolFormat(NamedTuple):
    """The way in which models of a family write calls of tools."""

    marks: str
    """A text that is in the family's chat templates."""
    pattern: re.Pattern[str]
    """Finds thoughts and calls; the group `thought` is to be kept, the group `call` is JSON. It takes linear time."""
    arguments: str
    """The key of the arguments in the JSON, beside `name`."""

    def calls(self, reply: str) -> list[str]:
        """The JSON of the calls in a reply. Whichever of thought and call begins first is read to its end."""
        return [found["call"] for found in self.pattern.finditer(reply) if found["call"] is not None]

    def without_calls(self, reply: str) -> str:
        """A reply without its calls."""
        return self.pattern.sub(lambda found: found["thought"] or "", reply)


TOOL_FORMATS = {
    "qwen": ToolFormat(
        "<tool_call>",
        re.compile(
            rf"(?P<thought>{THINK}.*?(?:{THINK_END}|\Z))|<tool_call>(?P<call>.*?)(?:</tool_call>|\Z)", re.DOTALL
        ),
        "arguments",
    ),
    "llama": ToolFormat(
        '"parameters"',
        re.compile(
            rf"\A\s*(?P<thought>{THINK}(?:(?!{THINK_END}).)*{THINK_END}\s*)?(?:<\|python_tag\|>\s*)?(?P<call>\{{.*\}})\s*\Z",
            re.DOTALL,
        ),
        "parameters",
    ),
}
"""Formats by family. Qwen2.5 and Qwen3 write the first one, Llama 3 the second."""

OTHER_FORMATS = ("<function=", "<arg_key>")
"""Texts in templates of families that write calls in another way, such as Qwen3-Coder and GLM."""


@dataclass(frozen=True)
class TurnEncoder:
    """Encodes observations for a policy's tokenizer, and reads its tool calls."""

    tokenizer: Any
    stop_tokens: frozenset[int]
    settings: DataConfig
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools, for the chat template."""

    def __post_init__(self) -> None:
        if not self.tools:
            return
        if not self.tokenizer.chat_template:
            raise UserError("environment.factory: has tools, and the tokenizer has no chat template to tell of them")
        form = self.tool_format
        if form is None:
            known = ", ".join(repr(each.marks) for each in TOOL_FORMATS.values())
            raise UserError(
                f"environment.factory: has tools, and the chat template has no format of calls that is known (one "
                f"with {known}); use another tokenizer, or read the calls in `step`"
            )
        if is_special(form.marks, self.tokenizer):
            raise UserError(
                f"environment.factory: has tools, and the tokenizer has {form.marks!r} as a special token, which "
                f"the text of a reply leaves out, so no call would be seen; make it a token that is not special"
            )

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format of the calls that the chat template for tools asks for."""
        template = str(self.tokenizer.get_chat_template(tools=list(self.tools)))
        if any(mark in template for mark in OTHER_FORMATS):
            return None
        return next((form for form in TOOL_FORMATS.values() if form.marks in template), None)

    def refuse_rewriting(self, role: str) -> None:
        """Raise `UserError` if the chat template drops a reply's thoughts once a message of this role follows."""
        if not self.tokenizer.chat_template:
            return
        thinking = f"<think>\n{_THOUGHT}\n</think>\n\n{_MARK}"
        if _THOUGHT in self._rendered(thinking, [{"role": role, "content": "."}]):
            return
        raise UserError(
            "environment: the chat template drops thoughts of earlier turns, so the policy would not read again what "
            "it wrote; set environment.keep_thoughts = true to keep them, or use a tokenizer with another template"
        )

    def prompt(self, problem: Problem, observation: Any) -> tuple[Problem, Tokens]:
        """The problem as the policy reads it first, and its tokens.

        `observation`: instead of the problem's prompt, unless it is None.
        """
        settings = self.settings
        if observation is not None:
            own = observation if isinstance(observation, str) else tuple(observation)
            problem, settings = replace(problem, prompt=own, template=""), replace(settings, prompt_template="{prompt}")
        if not self.tools:
            return problem, tokenized([problem], self.tokenizer, settings)[0]
        return problem, self._tokens(self._template(messages(problem, settings)))

    def following(self, problem: Problem, last: int, observation: str | Sequence[Message]) -> Tokens:
        """The tokens after a reply whose last token is `last`, to the beginning of the next reply.

        `problem`: as the policy has read it (`prompt`). Where its prompt is plain text, so is the observation.
        """
        if isinstance(observation, str) and not (self.tools or uses_chat(problem, self.tokenizer, self.settings)):
            return self._tokens(observation)
        told = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        tokens = self._after_reply(json.dumps(list(told)))
        ended = last in self.stop_tokens and tokens[:1] == (last,)
        return tokens[1:] if ended else tokens  # the reply has written the end of its turn itself

    def calls(self, reply: str, opening: str = "") -> list[ToolCall]:
        """The tools that a reply calls, in order; a call that cannot be read has the name "". Thoughts call none.

        `opening`: what the prompt has written of the reply, such as the beginning of a thought.
        """
        form = self.tool_format if self.tools else None
        return [_read_call(text, form.arguments) for text in form.calls(opening + reply)] if form else []

    @cached_property
    def _after_reply(self) -> Callable[[str], Tokens]:
        """The tokens between a reply and the next one, by the messages as JSON; a game repeats its observations."""

        def encode(observation: str) -> Tokens:
            return self._tokens(self._rendered(_MARK, json.loads(observation)).partition(_MARK)[2])

        return lru_cache(REMEMBERED)(encode)

    def _rendered(self, reply: str, observation: Sequence[Message]) -> str:
        asked = [{"role": "user", "content": "."}, {"role": "assistant", "content": reply}]
        return self._template([*asked, *observation])

    def _template(self, chat: Sequence[Message]) -> str:
        tools = {"tools": list(self.tools)} if self.tools else {}
        try:
            return str(
                self.tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=True, **tools)
            )
        except Exception as error:  # a template is a program, and may raise anything
            roles = ", ".join(str(message.get("role")) for message in chat)
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"environment: the chat template failed on the roles {roles}: {reason}") from error

    def _tokens(self, text: str) -> Tokens:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _read_call(text: str, key: str) -> ToolCall:
    try:
        call = json.loads(text)
        if _depth(call) > DEEPEST:
            raise ValueError("too deep")
        return ToolCall(str(call["name"]), call[key])
    except (ValueError, LookupError, TypeError, RecursionError):  # a reply may be anything
        return ToolCall("", text.strip())


def _depth(value: Any) -> int:
    """Levels of tables and lists in JSON."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, parts), default=0)
