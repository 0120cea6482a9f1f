"""Opens the sources that a recipe names: problems, conversations or demonstrations."""

import difflib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib.metadata import entry_points
from pathlib import Path
from random import Random
from typing import Any

from threepo.config import DataConfig, DemonstrationConfig
from threepo.config.records import require
from threepo.config.sources import KINDS, is_file, is_source
from threepo.data.finite import FiniteProblems, column_problems, published_problems
from threepo.data.published import CONVERSATIONS, PUBLISHED, PublishedSet
from threepo.data.rows import BrokenRow, Messages, Row, Rows, chat_messages, open_rows
from threepo.data.task import Endless, ProceduralProblems, Split
from threepo.data.tasks import TASKS
from threepo.errors import UserError
from threepo.types import OwnReward, Problem, Verdict

ProblemSource = FiniteProblems | Endless
"""Problems by training step (`batch`), a fixed set to evaluate on (`first`), and those to check first (`known`)."""


@dataclass(frozen=True)
class ProblemSet:
    """Problems, with the verifier that comes with them."""

    problems: ProblemSource
    verifier: Callable[[Problem, str], Verdict] | OwnReward | str | None
    """A name means a verifier of `rewards`; None means a user's own source, for which the recipe names the reward."""
    source: str
    """Source of the problems, as the recipe names it."""
    label: str = ""
    """The name of the results on problems to evaluate on."""
    template: str = ""
    """The text around each prompt of these; empty where the problems have templates of their own, or none."""


@dataclass(frozen=True)
class Conversations:
    """The rows of a source, and how a conversation is read from one."""

    rows: Rows
    read: Callable[[Row], Messages | str]
    """The messages of a row, or one word that says why the published set leaves it out. Raises `BrokenRow`."""
    published: str = ""
    """The name of the published set, which determines what `read` does."""


@dataclass(frozen=True)
class InstalledSource:
    """Opens the sources `KIND:NAME` of one kind, such as `reasoning-gym:NAME`, which an installed package brings.

    The package names it in its entry points, group `threepo.sources`, by the kind.
    """

    open: Callable[[str, Split, DataConfig], ProblemSet]
    """Gets the whole name, `KIND:NAME`; `UserError` if it cannot be opened."""
    endless: bool
    """True if problems are generated without end, and held-out ones too."""


def open_source(name: str, split: Split, settings: DataConfig) -> ProblemSet:
    """Open a procedural task, a source of an installed package, a published set or a user's own source."""
    _refuse_unused(name, settings)
    if name in TASKS:
        task = TASKS[name]
        return ProblemSet(ProceduralProblems(task, split, settings.seed, settings.levels), task.verify, name)
    if installed := installed_source(name):
        return installed.open(name, split, settings)
    published, copy = split_copy(name, PUBLISHED)
    if published:
        return ProblemSet(published_problems(published, copy, split, settings), published.verifier, name)
    if is_source(name):
        return ProblemSet(column_problems(name, settings), None, name)
    kinds = "".join(f"{kind}:NAME, " for kind in installed_kinds())
    listed = f"a task ({', '.join(TASKS)}), a data set ({', '.join(PUBLISHED)}), {kinds}{KINDS}"
    raise unknown("data source", name, [*TASKS, *PUBLISHED], listed)


def open_training(settings: DataConfig) -> ProblemSet:
    """The problems to train on."""
    source = open_source(settings.train, "train", settings)
    has_texts = any(isinstance(problem.prompt, str) for problem in source.problems.known())
    chats = f"needs prompts that are text, but {settings.train} has lists of chat messages"
    for key in ("prompt_template", "system_prompt"):
        value = getattr(settings, key)
        require(has_texts or not value, f"data.{key}", value, f"{chats}; leave it out, or write it into the messages")
    return source


def open_heldout(settings: DataConfig) -> ProblemSet:
    """The problems to evaluate on: `data.eval`, or the held-out part of `data.train`."""
    fix = f"{settings.train} has no held-out problems of its own; name some, or train with eval.every = 0"
    require(bool(settings.eval) or has_heldout(settings.train), "data.eval", settings.eval, fix)
    found = open_source(settings.eval or settings.train, "heldout", settings)
    has_texts = any(isinstance(problem.prompt, str) for problem in found.problems.known())
    if not has_texts and (settings.prompt_template or settings.system_prompt):
        what = "data.prompt_template and data.system_prompt are for prompts that are text"
        print(f"threepo: {what}: the chat messages of {found.source} are read without them", file=sys.stderr)
    return replace(found, label=heldout_label(settings), template=settings.prompt_template if has_texts else "")


def heldout_label(settings: DataConfig) -> str:
    """The name of the results on the held-out problems."""
    source = settings.eval or settings.train
    return Path(source.removesuffix(".gz")).stem if is_file(source) else source


def has_heldout(name: str) -> bool:
    """True if a source brings held-out problems."""
    published, copy = split_copy(name, PUBLISHED)
    if published:
        return bool(published.heldout) and not is_file(copy)
    return is_endless(name)


def is_endless(name: str) -> bool:
    """True if the problems of a source are generated without end, and held-out ones too."""
    installed = installed_source(name)
    return name in TASKS or (installed is not None and installed.endless)


@cache
def installed_source(name: str) -> InstalledSource | None:
    """The source that an installed package has for `KIND:NAME`; None if there is none."""
    kind, colon, _ = name.partition(":")
    found = [entry.load() for entry in entry_points(group="threepo.sources", name=kind)] if colon else []
    return found[0] if found else None


def installed_kinds() -> list[str]:
    """The kinds of sources that installed packages have."""
    return sorted({entry.name for entry in entry_points(group="threepo.sources")})


def open_conversations(name: str) -> Conversations:
    """Open a user's own source of conversations, or a published set with all its splits."""
    published, copy = split_copy(name, CONVERSATIONS)
    if published:
        return Conversations(published.rows(copy, "all"), published.item, published.name)
    if not is_source(name):
        raise unknown("conversations", name, CONVERSATIONS, f"{', '.join(CONVERSATIONS)}, {KINDS}")
    rows = open_rows(name)
    return Conversations(rows, partial(_from_columns, typed=rows.typed))


def _from_columns(row: Row, typed: bool) -> Messages:
    """The messages of a user's own row: its `messages`, or its `prompt` and `completion`, each text or messages."""
    if row.get("messages") is not None:
        messages = chat_messages(row["messages"], "messages", typed=typed)
    elif row.get("prompt") is not None and row.get("completion") is not None:
        prompt = chat_messages(row["prompt"], "prompt, if it is not text,", "user", typed=typed)
        answer = chat_messages(row["completion"], "completion, if it is not text,", "assistant", typed=typed)
        messages = prompt + answer
    else:
        raise BrokenRow(f"has neither messages nor prompt and completion; its columns are {', '.join(map(repr, row))}")
    if not any(message["role"] == "assistant" for message in messages):
        raise BrokenRow("has no message of the assistant, so nothing to imitate")
    return messages


Demonstration = tuple[Problem, str]
"""A problem of the training split, and a completion of it."""


@dataclass(frozen=True)
class Demonstrations:
    """Endless demonstrations for supervised fine-tuning; the i-th is a function of the settings and i."""

    settings: DemonstrationConfig

    def __post_init__(self) -> None:
        for name in self.settings.tasks:
            if not is_endless(name):
                kinds = [f"{kind}:NAME" for kind in installed_kinds() if is_endless(f"{kind}:")]
                raise UserError(f"demonstrations.tasks: unknown task {name!r}; there are {', '.join([*TASKS, *kinds])}")
            known = TASKS[name].behaviours if name in TASKS else ("direct",)
            for behaviour in self.settings.behaviours.keys() - set(known):
                raise UserError(f"demonstrations.behaviours.{behaviour}: {name} has only {', '.join(known)}")

    @cached_property
    def _problems(self) -> list[Any]:
        """The endless problems of each task."""
        levels = {name: self.settings.levels if name in TASKS else () for name in self.settings.tasks}
        data = [DataConfig(train=name, seed=self.settings.seed, levels=levels[name]) for name in self.settings.tasks]
        return [open_source(one.train, "train", one).problems for one in data]

    def demonstration(self, index: int) -> Demonstration:
        """Demonstration number `index`; tasks take turns, behaviours are drawn by their shares."""
        settings = self.settings
        number, place = divmod(index, len(settings.tasks))
        name, problem = settings.tasks[place], self._problems[place].problem(number)
        rng = Random(f"demonstration/{settings.seed}/{index}")
        (behaviour,) = rng.choices(list(settings.behaviours), list(settings.behaviours.values()))
        if name not in TASKS and not problem.answer:
            raise UserError(f"demonstrations.tasks: {name} has no answers to imitate; leave it out")
        return problem, TASKS[name].demonstrate(problem, behaviour) if name in TASKS else problem.answer

    def batch(self, step: int) -> list[Demonstration]:
        """The demonstrations of one optimizer step."""
        size = self.settings.batch_size
        return [self.demonstration(step * size + i) for i in range(size)]


def split_copy(name: str, published: Mapping[str, PublishedSet]) -> tuple[PublishedSet | None, str]:
    """The published set that SET or SET:COPY names, and its copy; None for other names."""
    known, colon, copy = name.partition(":")
    if colon and not copy and known in published:
        raise UserError(f"data source {name!r}: names no copy; write {known}, or {known}:COPY")
    return published.get(known), copy


def unknown(kind: str, name: str, known: Collection[str], listed: str) -> UserError:
    """The error for a name that is none of `known` and no source of rows."""
    near = difflib.get_close_matches(name.partition(":")[0], known, n=1)
    return UserError(f"{kind} {name!r}: unknown; {f'did you mean {near[0]}?' if near else f'name {listed}'}")


def _refuse_unused(name: str, settings: DataConfig) -> None:
    """Raise `UserError` for a setting that none of the recipe's sources uses."""
    named = {settings.train, settings.eval, name} - {""}
    for key, kind, is_unused in (
        ("levels", "procedural tasks", settings.levels and not named & set(TASKS)),
        ("max_prompt_tokens", "data sets", settings.max_prompt_tokens and is_endless(settings.train)),
        ("broken_rows", "data sets", settings.broken_rows != "error" and all(map(is_endless, named))),
    ):
        fix = f"is only for {kind}, not for {settings.train}; leave it out"
        require(not is_unused, f"data.{key}", getattr(settings, key), fix)
