"""Conversations as tokens, with the ranges that the loss counts (sft.md 2).

The tokenizer's chat template renders a conversation. If the template marks the assistant's text with {% generation %},
these marks give the turns; otherwise a turn is what its message adds to the prompt for it. The function
`apply_chat_template(..., return_assistant_tokens_mask=True)` is not used: its mask includes a token that starts before
the end of a prompt.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, Literal

from transformers.utils.chat_template_utils import render_jinja_template

from threepo.errors import UserError

Span = tuple[int, int]
"""First and one past the last, in characters or tokens."""
_PLAIN = "{{ messages[0]['content'] }}{% generation %}{{ messages[1]['content'] }}{{ eos_token }}{% endgeneration %}"
_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class UnrenderableChat(Exception):
    """The chat template refuses a conversation, such as one with two user messages in a row."""


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text."""

    text: str
    turns: list[Span]
    """The characters of each assistant turn to imitate."""
    location: str
    """File and row, for error messages."""


@dataclass(frozen=True)
class ChatEncoder:
    """Renders and tokenises conversations for one policy."""

    tokenizer: Any
    stop_tokens: frozenset[int]
    """The tokens that end a turn when the policy generates."""
    turns: Literal["all", "last"]

    def __post_init__(self) -> None:
        if not self.tokenizer.is_fast:
            raise UserError("conversations: the tokenizer has no offsets; use a fast tokenizer (tokenizer.json)")

    def template(self, tools: Sequence[Any] = ()) -> str:
        """The chat template, where there are tools the one for them; without any, prompt and completion as they are."""
        if not self.tokenizer.chat_template:
            return _PLAIN
        return str(self.tokenizer.get_chat_template(tools=list(tools) or None))

    @cached_property
    def _lead(self) -> list[int]:
        """Tokens in front of a text: a template writes them itself."""
        begins = self.tokenizer("")["input_ids"][:1] == [self.tokenizer.bos_token_id]
        return [self.tokenizer.bos_token_id] if begins and not self.tokenizer.chat_template else []

    def render(
        self, messages: Sequence[Any], location: str, *, plain: bool = False, tools: Sequence[Any] = ()
    ) -> RenderedChat:
        """The text of a conversation; `UnrenderableChat` if the template refuses it.

        `plain`: prompt and completion are given as text, which needs no template. `tools`: the schemas of tools that
        the policy may call.
        """
        if not plain and not self.tokenizer.chat_template:
            raise UserError(
                f"{location}: is a conversation, and the tokenizer has no chat template; set model.tokenizer to one "
                f"that has, or conversations.chat_template to a file, or give prompt and completion as text"
            )
        first = -1 if self.turns == "last" else 0
        if _MARKS_TURNS.search(self.template(tools)):
            text, turns = self._rendered(messages, tools, return_assistant_tokens_mask=True)
            return RenderedChat(text, turns[first:], location)
        text, _ = self._rendered(messages, tools)
        indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"][first:]
        return RenderedChat(text, [self._turn(messages, tools, i, text, location) for i in indices], location)

    def _turn(self, messages: Sequence[Any], tools: Sequence[Any], index: int, text: str, location: str) -> Span:
        """The characters of message `index`: what it adds to the prompt for it."""
        prompt, _ = self._rendered(messages[:index], tools, add_generation_prompt=True)
        until = text if index == len(messages) - 1 else self._rendered(messages[: index + 1], tools)[0]
        if not text.startswith(prompt) or not text.startswith(until):
            hint = "" if self.turns == "last" else "conversations.loss_on = 'last', or "
            raise UserError(
                f"{location}: the chat template renders message {index + 1} differently as part of the conversation "
                f"than when it is generated (templates of reasoning models drop thoughts), so its tokens are "
                f"unknown; set {hint}conversations.chat_template to a template with {{% generation %}}"
            )
        return len(prompt), len(until)

    def _rendered(self, messages: Sequence[Any], tools: Sequence[Any], **options: Any) -> tuple[str, list[Span]]:
        options |= {"tools": list(tools)} if tools else {}
        template = {"chat_template": self.template(tools), **self.tokenizer.special_tokens_map}
        try:
            texts, turns = render_jinja_template([list(messages)], **template, **options)
        except Exception as error:  # a template is a program, and may raise anything
            raise UnrenderableChat(f"the chat template failed on it: {type(error).__name__}: {error}") from error
        return texts[0], turns[0] if turns else []

    def encode(self, chats: Sequence[RenderedChat]) -> list[tuple[list[int], list[Span]]]:
        """The tokens of each conversation, and the ranges of those that the loss counts: a range for each turn.

        A conversation is tokenised in pieces: what precedes the first turn, which so has the tokens of a prompt in
        reinforcement learning, and from each turn to the next. A range ends with the turn's first stop token;
        `UserError` for a turn without one.
        """
        prompts, others = [], []
        for chat in chats:
            starts = [start for start, _ in chat.turns]
            prompt, *rest = pairwise((0, *starts, len(chat.text)))
            prompts.append(chat.text[slice(*prompt)])
            others += [chat.text[slice(*piece)] for piece in rest]
        pieces = iter(self._continued(others))
        encoded = []
        for chat, (prompt_tokens, _) in zip(chats, self._tokenize(prompts), strict=True):
            tokens, ranges = [*self._lead, *prompt_tokens], []
            for start, end in chat.turns:
                piece, offsets = next(pieces)
                counted = self._until_stop(piece, offsets, end - start, chat.location)
                ranges.append((max(len(tokens), 1), len(tokens) + counted))  # nothing predicts a text's first token
                tokens += piece
            encoded.append((tokens, ranges))
        return encoded

    def _tokenize(self, texts: list[str]) -> list[tuple[list[int], list[Span]]]:
        if not texts:
            return []
        # The caller checks the length.
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))

    def _continued(self, texts: list[str]) -> Iterator[tuple[list[int], list[Span]]]:
        """The tokens of texts that follow others: some tokenizers put a blank in front of what begins a text."""
        for text, (tokens, offsets) in zip(texts, self._tokenize([f"\n{text}" for text in texts]), strict=True):
            kept = [i for i, (_, end) in enumerate(offsets) if end > 1]
            if not kept or offsets[kept[0]][0] < 1:  # the line break is part of the text's first token
                yield self._tokenize([text])[0]
            else:
                yield [tokens[i] for i in kept], [(offsets[i][0] - 1, offsets[i][1] - 1) for i in kept]

    def _until_stop(self, tokens: Sequence[int], offsets: Sequence[Span], length: int, location: str) -> int:
        """Number of tokens of a turn, to its first stop token; it has `length` characters of a piece's tokens."""
        last = bisect_left(offsets, length, key=itemgetter(0))
        for position, token in enumerate(tokens[:last]):
            if token in self.stop_tokens:
                return position + 1
        ending = self.tokenizer.decode(tokens[max(0, last - 3) : last])
        stops = ", ".join(repr(self.tokenizer.decode([token])) for token in sorted(self.stop_tokens)) or "there is none"
        raise UserError(
            f"{location}: the assistant's turn ends in {ending!r} without a token that stops generation ({stops}), so "
            f"the policy would not learn to stop; set model.tokenizer to a tokenizer whose eos_token ends a turn, or "
            f"fix conversations.chat_template"
        )
