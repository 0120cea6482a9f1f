"""Settings of what is read: problems, demonstrations, conversations and benchmarks."""

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Annotated, Literal

from pydantic import AfterValidator

from threepo.config.records import Count, CountOrZero, NotNegative, require, settings


def _check_template(template: str) -> str:
    if template and "{prompt}" not in template:
        raise ValueError("must contain {prompt}, where the problem's text goes")
    return template


Template = Annotated[str, AfterValidator(_check_template)]


@settings("data")
class DataConfig:
    """[data]: the problems, and how they are put to the policy."""

    train: str
    """A procedural task (`sorting`, ...), `reasoning-gym:NAME`, a published data set (`gsm8k`, ..., or `gsm8k:PLACE`
    for a copy of it), or a .jsonl, .jsonl.gz or .parquet file; `threepo data list` names them all. `threepo eval`
    does without where `eval` is set."""
    eval: str = ""
    """The same for held-out problems; empty: the held-out half that a procedural task in `train` has, or the test split
    of a published data set there."""
    levels: tuple[int, ...] = ()
    """Difficulty levels of a procedural task, mixed evenly; empty: the task's own default. Nothing else has any."""
    prompts_per_step: Count = 32
    """Prompts per step, P."""
    seed: int = 0
    """Seed of the problems' order, apart from all other seeds: equal seeds give equal prompts at equal steps."""
    prompt_column: str = "prompt"
    """Column of a file that holds the prompt: text, or a list of chat messages."""
    answer_column: str = "answer"
    """Column of a file that holds the reference answer; only a reward function of your own can do without. It
    reaches such a function as `answer` too, as the file has it, unless another column has that name."""
    tests_column: str = "tests"
    """Column of a file that holds the tests of a program, for reward.function = 'code'; it reaches reward functions as
    `tests`."""
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
    """A .jsonl, .jsonl.gz or .parquet file with a column `messages`, or with `prompt` and `completion`; or
    `llama-nemotron`, the paper's, of which `llama-nemotron:PLACE` is a copy: a file, a folder from the hub, or another
    id there."""
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
    """Folder for the tokenised conversations, which later runs share; empty: `threepo` in the user's cache folder."""
    eval: str = ""
    """Held-out conversations, named as in `source`; empty: none."""
    eval_rows: CountOrZero = 512
    """Number of held-out rows that are read, from the first; 0: all."""
    eval_every: CountOrZero = 100
    """Steps between measurements of the held-out loss at the mean; 0: only at the end."""

    def __post_init__(self) -> None:
        fix = "name a .jsonl, .jsonl.gz or .parquet file, or llama-nemotron"
        require(bool(self.source), "conversations.source", self.source, fix)


@settings("benchmarks")
class BenchmarksConfig:
    """[benchmarks]: published problem sets to evaluate on, in place of those of [data] (docs/evaluation.md)."""

    names: tuple[str, ...] = ()
    """Such as `aime24`; `aime24=FILE` reads a local .jsonl, .jsonl.gz or .parquet file in place of the Hugging Face
    hub, and `livecodebench:2025-02..2025-04` takes the problems of these months."""
    folder: str = ""
    """Folder with a file for each benchmark, such as aime24.jsonl; empty: the hub."""
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
