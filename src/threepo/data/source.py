"""From the names of problems in a recipe to the problems."""

import difflib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from threepo.config import DataConfig
from threepo.config.sources import KINDS, is_file
from threepo.data.columns import column_problems
from threepo.data.published import PUBLISHED
from threepo.data.reasoning_gym import PREFIX, ReasoningGymProblems
from threepo.data.rows import is_source
from threepo.data.task import ProceduralProblems, Split
from threepo.data.tasks import TASKS
from threepo.errors import UserError
from threepo.types import Problem, Verdict, VerifierName


class ProblemSource(Protocol):
    """Problems by training step, and a fixed set to evaluate on; finite (data.finite) or endless (data.task)."""

    def batch(self, step: int, size: int) -> list[Problem]:
        """The problems of training step `step`; the same for every method and every resumed run."""

    def first(self, count: int) -> Sequence[Problem]:
        """Up to `count` problems, always the same."""

    def known(self) -> Sequence[Problem]:
        """What can be checked before training: all problems of a finite source, one example of an endless source."""


@dataclass(frozen=True)
class OpenedSource:
    """Problems, and the verifier that comes with them."""

    problems: ProblemSource
    verifier: Callable[[Problem, str], Verdict] | VerifierName | None
    """A name where it is one of `rewards`; None for a user's own source, whose reward the recipe names."""


def open_source(name: str, split: Split, settings: DataConfig) -> OpenedSource:
    """Open a procedural task, a published data set or a user's own source; `UserError` says what there is."""
    _refuse_unread(name, settings)
    if name in TASKS:
        task = TASKS[name]
        return OpenedSource(ProceduralProblems(task, split, settings.seed, settings.levels), task.verify)
    if name.startswith(PREFIX):
        gym = ReasoningGymProblems(name.removeprefix(PREFIX), split, settings.seed)
        return OpenedSource(gym, gym.verify)
    published, copy = split_copy(name, PUBLISHED)
    if published:
        return OpenedSource(PUBLISHED[published].open(copy, split, settings), PUBLISHED[published].verifier)
    if is_source(name):
        return OpenedSource(column_problems(name, settings), None)
    near = difflib.get_close_matches(name.partition(":")[0], [*TASKS, *PUBLISHED], n=1)
    known = f"name a task ({', '.join(TASKS)}), a data set ({', '.join(PUBLISHED)}), {PREFIX}NAME, {KINDS}"
    raise UserError(f"data source {name!r}: unknown; {f'did you mean {near[0]}?' if near else known}")


def open_training(settings: DataConfig) -> OpenedSource:
    """The problems to train on."""
    source = open_source(settings.train, "train", settings)
    if not any(isinstance(problem.prompt, str) for problem in source.problems.known()):
        for key in ("prompt_template", "system_prompt"):
            if getattr(settings, key):
                raise UserError(
                    f"data.{key} = {getattr(settings, key)!r}: is for prompts that are plain text, and those of "
                    f"{settings.train} are lists of chat messages; leave it out, or put it into the messages"
                )
    return source


def open_heldout(settings: DataConfig) -> OpenedSource:
    """The problems to evaluate on: `data.eval`, or the held-out part of `data.train`."""
    if settings.eval:
        return open_source(settings.eval, "heldout", settings)
    if not has_heldout(settings.train):
        raise UserError(
            f"data.eval = '': {settings.train} has no held-out problems of its own; name some, or set eval.every = 0"
        )
    return open_source(settings.train, "heldout", settings)


def has_heldout(name: str) -> bool:
    """Whether a source has held-out problems of its own."""
    published, copy = split_copy(name, PUBLISHED)
    if published:
        return bool(PUBLISHED[published].heldout) and not is_file(copy)
    return name in TASKS or name.startswith(PREFIX)


def split_copy(name: str, published: Collection[str]) -> tuple[str, str]:
    """The published set that a name begins with, and the copy that it names; ("", "") for other names."""
    known, colon, copy = name.partition(":")
    if known not in published:
        return "", ""
    if colon and not copy:
        raise UserError(f"data source {name!r}: names no copy; write {known}, or {known}:COPY")
    return known, copy


def _refuse_unread(name: str, settings: DataConfig) -> None:
    """Raise `UserError` for a setting that none of the recipe's sources reads."""
    named = {settings.train, settings.eval, name} - {""}
    endless = {source for source in named if source in TASKS or source.startswith(PREFIX)}
    if settings.levels and not named & set(TASKS):
        levels = list(settings.levels)
        raise UserError(f"data.levels = {levels}: only procedural tasks have levels, not {name}; leave it out")
    unread = {
        "max_prompt_tokens": settings.max_prompt_tokens and settings.train in endless,
        "broken_rows": settings.broken_rows != "error" and endless == named,
    }
    for key in (key for key, refused in unread.items() if refused):
        raise UserError(
            f"data.{key} = {getattr(settings, key)!r}: is for data sets, and {settings.train} generates its problems; "
            f"leave it out"
        )
