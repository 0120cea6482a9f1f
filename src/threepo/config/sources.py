"""Settings of what is read: problems, demonstrations, conversations and benchmarks; and the names of sources.

A source of rows is one of

    problems.jsonl  problems.json  problems.csv  problems.parquet    a file; all but parquet may be compressed (.gz)
    shards/  shards/:CONFIGURATION:SPLIT                             a folder of such files, or a copy from the hub
    org/name  org/name:CONFIGURATION:SPLIT  org/name::SPLIT          a data set on the Hugging Face hub
    hf://datasets/org/name/FILE                                      one file of a data set on the hub
"""

import os
from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from threepo.config.records import Count, CountOrZero, NotNegative, require, settings

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")
KINDS = "a .jsonl, .json, .csv or .parquet file, a folder/ of such files, or org/name on the Hugging Face hub"
"""What messages say of sources."""
HUB_FILE = "hf://datasets/"


def is_file(source: str) -> bool:
    """Whether a source is a single file, by its suffix."""
    return source.endswith(SUFFIXES)


def is_local(path: str) -> bool:
    """Whether a path is on this machine; a word alone is a name, even where a folder is called so."""
    if not path or path.startswith(HUB_FILE):
        return False
    return is_file(path) or path.startswith(("~", ".", "/")) or ("/" in path and Path(path).is_dir())


def split_source(source: str) -> tuple[str, str, str]:
    """The path or hub name of a source, its configuration and its split; empty where it does not name them."""
    if is_file(source) or Path(source).expanduser().is_dir():
        return source, "", ""
    path, configuration, split, *_ = (*source.split(":"), "", "")
    return path, configuration, split


def absolute(source: str) -> str:
    """A source, or a published set's NAME:COPY, with `~` and relative paths written out: the same in any directory."""
    name, colon, copy = source.partition(":")
    if colon and not is_local(name) and is_local(split_source(copy)[0]):
        return f"{name}:{absolute(copy)}"
    path, _, _ = split_source(source)
    return os.path.abspath(os.path.expanduser(path)) + source.removeprefix(path) if is_local(path) else source


def _check_template(template: str) -> str:
    if template and "{prompt}" not in template:
        raise ValueError("must contain {prompt}, where the problem's text goes")
    return template


Template = Annotated[str, AfterValidator(_check_template)]


@settings("data")
class DataConfig:
    """[data]: the problems, and how they are put to the policy."""

    train: str
    """A procedural task (`sorting`, ...), `reasoning-gym:NAME`, a published data set (`gsm8k`, ..., `gsm8k:COPY`), or a
    source of your own: a .jsonl, .json, .csv or .parquet file, a folder of such files, or `org/name` on the Hugging
    Face hub; `org/name:CONFIGURATION:SPLIT` names a configuration and a split. `threepo data list` lists them all.
    `threepo eval` does without where `eval` is set."""
    eval: str = ""
    """The same for held-out problems; empty: the held-out problems of the task in `train`, or the test split of the
    published data set."""
    levels: tuple[int, ...] = ()
    """Difficulty levels of a procedural task, mixed evenly; empty: the task's own default. Nothing else has any."""
    prompts_per_step: Count = 32
    """Prompts per step, P."""
    seed: int = 0
    """Seed of the problems' order, apart from all other seeds: equal seeds give equal prompts at equal steps."""
    prompt_column: str = "prompt"
    """Column of your own source that holds the prompt: text, or a list of chat messages."""
    answer_column: str = "answer"
    """Column of your own source that holds the reference answer; only a reward function of your own can do without. It
    reaches such a function as `answer` too, unless another column has that name."""
    tests_column: str = "tests"
    """Column of your own source that holds the tests of a program, for reward.function = 'code'; it reaches reward
    functions as `tests`."""
    prompt_template: Template = ""
    """Text put around a plain prompt; `{prompt}` marks its place. Empty: what belongs to the published data set, and
    nothing around prompts of tasks and files."""
    system_prompt: str = ""
    """System message put before a plain prompt; needs a tokenizer with a chat template."""
    chat_template: Literal["auto", "never"] = "auto"
    """`auto`: a plain prompt becomes a user message wherever the tokenizer has a chat template."""
    too_long: Literal["error", "drop"] = "error"
    """Problems of a finite data set whose prompt and longest completion exceed the model's context: `error` refuses
    the data before anything runs; `drop` leaves them out and says how many."""
    max_prompt_tokens: CountOrZero = 0
    """Training problems of a finite data set with longer prompts, in tokens with the chat template, are left out and
    counted; 0: no limit. Held-out problems are not limited."""
    broken_rows: Literal["error", "skip"] = "error"
    """Rows of a finite data set that are not as they should be, or lack what the reward needs: `error` refuses the
    data and names the first; `skip` leaves them out, says how many, and names a few."""

    def __post_init__(self) -> None:
        name = "name the problems; `threepo data list` shows what there is"
        require(bool(self.train), "data.train", self.train, name)
        require(
            not self.system_prompt or self.chat_template == "auto",
            "data.system_prompt",
            self.system_prompt,
            "needs a chat template, and data.chat_template = 'never' uses none; set it to 'auto', or put the text into "
            "data.prompt_template",
        )


@settings("demonstrations")
class DemonstrationConfig:
    """[demonstrations]: worked texts of procedural tasks for supervised fine-tuning."""

    tasks: tuple[str, ...]
    """Procedural tasks, mixed evenly."""
    levels: tuple[int, ...] = ()
    """Difficulty levels; empty: each task's own default."""
    behaviours: Mapping[str, NotNegative] = field(default_factory=lambda: {"worked": 1.0})
    """How the texts solve a problem, with their shares: `worked`, `direct`, ... (each task lists its own)."""
    batch_size: Count = 64
    """Demonstrations per optimizer step."""
    seed: int = 0
    """Seed of the demonstrations' order."""

    def __post_init__(self) -> None:
        require(bool(self.tasks), "demonstrations.tasks", self.tasks, 'name at least one task, such as ["sorting"]')
        fix = "give at least one behaviour a share above 0"
        require(sum(self.behaviours.values()) > 0, "demonstrations.behaviours", dict(self.behaviours), fix)


@settings("conversations")
class ConversationConfig:
    """[conversations]: chats for supervised fine-tuning; the loss counts the assistant's turns (sft.md)."""

    source: str
    """A source of your own as in `data.train`, with a column `messages`, or with `prompt` and `completion`; or
    `llama-nemotron`, the paper's answers of DeepSeek-R1, or `llama-nemotron-any`, those of all generators, both also
    with `:COPY`."""
    batch_size: Count = 128
    """Conversations per optimizer step."""
    epochs: CountOrZero = 0
    """Passes over the conversations, when run.steps = 0; an epoch drops its incomplete last batch."""
    seed: CountOrZero = 0
    """Seed of the conversations' order, which differs in every epoch."""
    max_tokens: Count = 4096
    """Longest conversation, chat template included; the model's context bounds it too."""
    too_long: Literal["error", "drop"] = "error"
    """Longer ones: `error` refuses the source, `drop` leaves them out and counts them."""
    broken_rows: Literal["error", "skip"] = "error"
    """Rows that are no conversation, or that the chat template refuses: `error` refuses the source, `skip` leaves them
    out and counts them."""
    loss_on: Literal["all", "last"] = "all"
    """The assistant's turns that the loss counts: `all`, or only the `last`."""
    chat_template: str = ""
    """A file with a chat template (Jinja) to use in place of the tokenizer's own; it is saved with the model."""
    cache: str = ""
    """Folder for the tokenised conversations, which later runs share; empty: the cache of `datasets`
    (HF_DATASETS_CACHE)."""
    eval: str = ""
    """Held-out conversations, named as in `source`; empty: none."""
    eval_rows: CountOrZero = 512
    """Number of held-out rows that are read, from the first; 0: all."""
    eval_every: CountOrZero = 100
    """Steps between measurements of the held-out loss at the mean; 0: only at the end."""

    def __post_init__(self) -> None:
        fix = "name a file, a folder, org/name on the Hugging Face hub, or llama-nemotron"
        require(bool(self.source), "conversations.source", self.source, fix)


@settings("benchmarks")
class BenchmarksConfig:
    """[benchmarks]: published problem sets to evaluate on, in place of those of [data] (docs/evaluation.md)."""

    names: tuple[str, ...] = ()
    """Such as `aime24`; `aime24=COPY` reads a file, a folder or another data set on the hub, and
    `livecodebench:2025-02..2025-04` takes the problems of these months."""
    folder: str = ""
    """Folder with a file or a folder for each benchmark, such as aime24.jsonl; empty: the hub."""
    problems: CountOrZero = 0
    """Number of problems of each, from the first; 0: all."""
    math_prompt: Template = ""
    """How problems of mathematics are put; `{prompt}` marks the problem's place. Empty: as the paper puts them."""
    code_prompt: Template = ""
    """The same for programming."""

    def __post_init__(self) -> None:
        fix = "the rest of [benchmarks] is read with benchmarks only; name some, such as --benchmarks aime24,math500"
        alone = not self.names and any(getattr(self, f.name) for f in fields(self))
        require(not alone, "benchmarks.names", self.names, fix)
