"""Prompt tokens of problems: templates and chat messages. Needs a tokenizer but no model."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from threepo.config import DataConfig
from threepo.errors import UserError
from threepo.types import Problem


def tokenized(problems: Sequence[Problem], tokenizer: Any, settings: DataConfig) -> list[tuple[int, ...]]:
    """Prompt tokens of the problems, in one call per kind of prompt, which is much faster than one per problem."""
    texts = [prompt_text(problem, tokenizer, settings) for problem in problems]
    chats = [uses_chat(problem, tokenizer, settings) for problem in problems]
    encoded = {}
    for chat in set(chats):  # a chat template writes the special tokens itself
        mine = [text for text, uses in zip(texts, chats, strict=True) if uses == chat]
        encoded[chat] = iter(tokenizer(mine, add_special_tokens=not chat)["input_ids"])
    tokens = [tuple(next(encoded[chat])) for chat in chats]
    end = (tokenizer.eos_token_id,)
    if not all(chats) and tuple(tokenizer("")["input_ids"][-1:]) == end:  # it ends every text, and a prompt goes on
        tokens = [ids if chat or ids[-1:] != end else ids[:-1] for ids, chat in zip(tokens, chats, strict=True)]
    for problem, ids in zip(problems, tokens, strict=True):
        if not ids:
            raise UserError(f"{problem.label}: its prompt is empty; every problem needs at least one token")
    return tokens


def is_special(mark: str, tokenizer: Any) -> bool:
    """True if the tokenizer has a mark as special tokens, which the text of a completion leaves out."""
    ids = tokenizer(mark, add_special_tokens=False)["input_ids"]
    written, read = (tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True))
    return mark in written and mark not in read


def prompt_text(problem: Problem, tokenizer: Any, settings: DataConfig) -> str:
    """The text of the prompt; `UserError` if the tokenizer cannot render it."""
    if not uses_chat(problem, tokenizer, settings):
        fix = "the tokenizer has no chat template for it; use one that has, or write the text into data.prompt_template"
        settings.only_if(False, fix, "system_prompt")
        return problem.templated(settings.prompt_template)
    if not tokenizer.chat_template:
        raise UserError(
            f"{problem.label}: its prompt is a list of chat messages, but the tokenizer has no chat template; "
            f"use a tokenizer with one, or give the prompts as text"
        )
    try:
        chat = messages(problem, settings)
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program, and may raise anything
        raise UserError(
            f"{problem.label}: the tokenizer's chat template failed on it: {type(error).__name__}: {error}"
        ) from error


def messages(problem: Problem, settings: DataConfig) -> list[Mapping[str, str]]:
    """A problem as chat messages: its own, or a user message after the system prompt, if there is one."""
    if not isinstance(problem.prompt, str):
        return [dict(message) for message in problem.prompt]
    system = [{"role": "system", "content": settings.system_prompt}] if settings.system_prompt else []
    return [*system, {"role": "user", "content": problem.templated(settings.prompt_template)}]


def note_dates(tokenizer: Any, settings: DataConfig) -> None:
    """Say that a chat template writes the date of the day into prompts, if so."""
    if settings.chat_template == "auto" and "strftime_now" in str(tokenizer.chat_template):
        what = "the tokenizer's chat template writes today's date into prompts, so on another day they are others, and"
        fix = "set model.tokenizer to a copy with a fixed date in its template"
        print(f"threepo: {what} a resumed run or evaluation is not the same: {fix}", file=sys.stderr)


def uses_chat(problem: Problem, tokenizer: Any, settings: DataConfig) -> bool:
    own = not isinstance(problem.prompt, str)
    return own or (settings.chat_template == "auto" and bool(tokenizer.chat_template))
