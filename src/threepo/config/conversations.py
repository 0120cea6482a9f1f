"""Settings of supervised fine-tuning on conversations."""

from dataclasses import dataclass
from typing import Literal

from threepo.config.checks import not_negative, positive, require


@dataclass(frozen=True, kw_only=True)
class ConversationConfig:
    """[conversations]: chats for supervised fine-tuning, of which the assistant's turns are imitated (sft.md)."""

    source: str
    """A source of your own as in `data.train`, with a column `messages`, or with `prompt` and `completion`; or
    `llama-nemotron`, the paper's answers of DeepSeek-R1, or `llama-nemotron-any`, those of all generators, both also
    with `:COPY`."""
    batch_size: int = 128
    """Conversations per optimizer step."""
    epochs: int = 0
    """Passes over the conversations, where run.steps = 0 leaves the length to them; an epoch drops its incomplete last
    batch."""
    seed: int = 0
    """Seed of the conversations' order, which is another one in every epoch."""
    max_tokens: int = 4096
    """Longest conversation, chat template included; the model's context bounds it too."""
    too_long: Literal["error", "drop"] = "error"
    """Longer ones: `error` refuses the source, `drop` leaves them out and counts them."""
    broken_rows: Literal["error", "skip"] = "error"
    """Rows that are no conversation, or that the chat template refuses: `error` refuses the source, `skip` leaves them
    out and counts them."""
    loss_on: Literal["all", "last"] = "all"
    """The turns to imitate: `all` of the assistant's, or the `last` of them alone."""
    chat_template: str = ""
    """A file with a chat template (Jinja) to use in place of the tokenizer's own; it is saved with the model."""
    cache: str = ""
    """Folder for the tokenised conversations, which later runs share; empty: the cache of `datasets`
    (HF_DATASETS_CACHE)."""
    eval: str = ""
    """Held-out conversations, named as in `source`; empty: none."""
    eval_rows: int = 512
    """The first so many of them are read; 0: all."""
    eval_every: int = 100
    """Steps between measurements of the held-out loss at the mean; 0: only at the end."""

    def __post_init__(self) -> None:
        for name in ("source", "eval"):
            value = getattr(self, name)
            known = "name a file, a folder, org/name on the Hugging Face hub, or llama-nemotron"
            require(bool(value) or name == "eval", f"conversations.{name}", value, known)
        positive(self, "conversations", "batch_size", "max_tokens")
        not_negative(self, "conversations", "epochs", "seed", "eval_rows", "eval_every")
