"""Settings of the data: problems, demonstrations, conversations and benchmarks. A source of rows is one of

problems.jsonl  problems.json  problems.csv  problems.parquet    a file; all but parquet may be compressed (.gz)
shards/  shards/:CONFIGURATION:SPLIT                             a folder of such files, or a copy from the hub
org/name  org/name:CONFIGURATION:SPLIT  org/name::SPLIT          a data set on the Hugging Face hub
hf://datasets/org/name/FILE                                      one file of a data set on the hub
"""

import ast
import os
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from threepo.config.records import Count, CountOrZero, NotNegative, Settings, must
from threepo.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")
KINDS = "a .jsonl, .json, .csv or .parquet file, a folder/ of such files, or org/name on the Hugging Face hub"
"""The kinds of sources, in messages."""
HUB_FILE = "hf://datasets/"


def is_file(source: str) -> bool:
    """True if a source is a single file, by its suffix."""
    return source.endswith(SUFFIXES)


def is_local(path: str) -> bool:
    """True if a path is on this machine; a bare word is a name, even if such a folder exists."""
    if not path or path.startswith(HUB_FILE):
        return False
    return is_file(path) or path.startswith(("~", ".", "/")) or ("/" in path and Path(path).is_dir())


def split_source(source: str) -> tuple[str, str, str]:
    """The path or hub name of a source, its configuration and its split; empty where it does not name them."""
    if is_file(source) or Path(source).expanduser().is_dir():
        return source, "", ""
    path, configuration, split, *_ = (*source.split(":"), "", "")
    return path, configuration, split


def split_settings(source: str) -> tuple[str, dict[str, Any]]:
    """The name and the settings of `KIND:NAME(setting=value, ...)`; `UserError` if it is not written so."""
    kind, _, spec = source.partition(":")
    name, parenthesis, rest = spec.partition("(")
    try:
        call: Any = ast.parse(f"settings({rest}" if parenthesis else "settings()", mode="eval").body
        settings = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if call.args or not re.fullmatch(r"[\w.-]+", name):
            raise ValueError("settings have names, and names no blanks")
    except (SyntaxError, ValueError, AttributeError) as error:
        raise UserError(f"data: {source}: write {kind}:NAME or {kind}:NAME(setting=value, ...)") from error
    return name, settings


def is_source(name: str) -> bool:
    """True if a name means a file, a folder, or a data set on the hub."""
    path, _, _ = split_source(name)
    return "/" in path or is_local(path)


def absolute(source: str) -> str:
    """A source, or a published set's NAME:COPY, with `~` and relative paths written out: the same in any directory."""
    name, colon, copy = source.partition(":")
    if colon and not is_local(name) and is_local(split_source(copy)[0]):
        return f"{name}:{absolute(copy)}"
    path, _, _ = split_source(source)
    return os.path.abspath(os.path.expanduser(path)) + source.removeprefix(path) if is_local(path) else source


def _absolute_path(path: str) -> str:
    """A path on this machine, absolute; names of shipped models and ids of the hub stay as they are."""
    local = path and (path.startswith(("~", ".", "/")) or Path(path).exists())
    return os.path.abspath(os.path.expanduser(path)) if local else path


def absolute_folder(path: str) -> str:
    """A folder on this machine, absolute, whether it exists yet or not."""
    return path and os.path.abspath(os.path.expanduser(path))


def _absolute_copy(benchmark: str) -> str:
    name, equals, copy = benchmark.partition("=")
    return f"{name}={absolute(copy)}" if equals else benchmark


Source = Annotated[str, AfterValidator(absolute)]
LocalPath = Annotated[str, AfterValidator(_absolute_path)]
Template = Annotated[str, must(lambda text: not text or "{prompt}" in text, "must contain {prompt}, for the problem")]
Shares = Annotated[
    Mapping[str, NotNegative], must(lambda it: sum(it.values()) > 0, "give at least one a share above 0")
]


class DataConfig(Settings, table="data"):
    """[data]: the problems, and how prompts are made of them."""

    train: Annotated[Source, must(bool, "name the problems; `threepo data list` shows what there is")]
    """A procedural task, a published data set, or your own file, folder or hub data set (docs/data.md); `threepo data
    list` lists all. `threepo eval` needs only `eval`."""
    eval: Source = ""
    """Held-out problems, as in `train`; empty: the task's, or the published set's test split."""
    levels: tuple[int, ...] = ()
    """Difficulty levels of a procedural task, mixed evenly; empty: its default."""
    prompts_per_step: Count = 32
    """Prompts per step, over all ranks."""
    seed: int = 0
    """Seed of the problems' order."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    answer_column: str = "answer"
    """Column with the reference answer."""
    tests_column: str = "tests"
    """Column with the tests for reward.function = 'code'."""
    prompt_template: Template = ""
    """Text around a text prompt, which replaces `{prompt}`; empty: the published set's own, or none."""
    system_prompt: str = ""
    """System message before a text prompt; needs a chat template."""
    chat_template: Literal["auto", "never"] = "auto"
    """`auto`: a text prompt becomes a user message if the tokenizer has a chat template."""
    too_long: Literal["error", "drop"] = "error"
    """Problems whose prompt and longest completion exceed the model's context: `error` refuses, `drop` leaves out."""
    max_prompt_tokens: CountOrZero = 0
    """Longer training prompts, chat template included, are left out; 0: no limit."""
    broken_rows: Literal["error", "skip"] = "error"
    """Rows that are malformed or lack what the reward needs: `error` refuses the data, `skip` leaves them out."""

    def __post_init__(self) -> None:
        fix = "needs a chat template; set data.chat_template = 'auto', or put the text into data.prompt_template"
        self.only_if(self.chat_template == "auto", fix, "system_prompt")


class DemonstrationConfig(Settings, table="demonstrations"):
    """[demonstrations]: worked texts of procedural tasks for supervised fine-tuning."""

    tasks: Annotated[tuple[str, ...], must(bool, 'name at least one task, such as ["sorting"]')]
    """Procedural tasks, or `reasoning-gym:NAME` with `direct` as its only behaviour, mixed evenly."""
    levels: tuple[int, ...] = ()
    """Difficulty levels; empty: each task's default."""
    behaviours: Shares = field(default_factory=lambda: {"worked": 1.0})
    """Share of each way to solve a problem: `worked`, `direct`, ... (each task lists its own)."""
    batch_size: Count = 64
    """Demonstrations per optimizer step."""
    seed: int = 0
    """Seed of the demonstrations' order."""


class ConversationConfig(Settings, table="conversations"):
    """[conversations]: chats for supervised fine-tuning; the loss counts the assistant's turns (sft.md)."""

    source: Annotated[Source, must(bool, "name a file, a folder, org/name on the Hugging Face hub, or llama-nemotron")]
    """Your own file, folder or hub data set, as in `data.train`, or `llama-nemotron` or `llama-nemotron-any`, also with
    `:COPY` (docs/sft.md)."""
    batch_size: Count = 128
    """Conversations per optimizer step."""
    epochs: CountOrZero = 0
    """Passes over the conversations if run.steps = 0; each drops its incomplete last batch."""
    seed: CountOrZero = 0
    """Seed of the conversations' order."""
    max_tokens: Count = 4096
    """Longest conversation in tokens, chat template included."""
    too_long: Literal["error", "drop"] = "error"
    """Rows longer than `max_tokens` or the model's context: `error` refuses the source, `drop` leaves them out."""
    broken_rows: Literal["error", "skip"] = "error"
    """Rows that are no conversation, or not for the chat template: `error` refuses the source, `skip` leaves them
    out."""
    loss_on: Literal["all", "last"] = "all"
    """Turns of the assistant that the loss counts."""
    chat_template: LocalPath = ""
    """File with a chat template (Jinja) that replaces the tokenizer's."""
    cache: Annotated[str, AfterValidator(absolute_folder)] = ""
    """Folder for the tokenised conversations; empty: the cache of `datasets`."""
    eval: Source = ""
    """Held-out conversations, named as in `source`; empty: none."""
    eval_rows: CountOrZero = 512
    """Held-out rows that are read; 0: all."""
    eval_every: CountOrZero = 100
    """Steps between measurements of the held-out loss; 0: only at the end."""


class BenchmarksConfig(Settings, table="benchmarks"):
    """[benchmarks]: published problem sets to evaluate on, instead of the problems of [data] (docs/evaluation.md)."""

    names: tuple[Annotated[str, AfterValidator(_absolute_copy)], ...] = ()
    """`aime24`, ...; `aime24=COPY` reads another source."""
    problems: CountOrZero = 0
    """Problems of each, from the first; 0: all."""
    math_prompt: Template = ""
    """Template of mathematics problems, with `{prompt}` for the problem; empty: ours."""
    code_prompt: Template = ""
    """Template of programming problems; empty: ours."""

    def __post_init__(self) -> None:
        self.only_if(self.names != (), "needs benchmarks; name some, such as --benchmarks aime24,math500")
