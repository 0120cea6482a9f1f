"""The records that travel between the rooms of threepo. Torch appears here in annotations only.

Legend: P prompts a step, N draws a step, G completions of one prompt; of a micro-batch, R rows, T tokens and K tokens
that the loss counts.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, Literal

from threepo.errors import UserError

if TYPE_CHECKING:
    import torch

    from threepo.config import Correction


def integers(values: Iterable[int]) -> array[int]:
    """Tokens of a row in 4 bytes each, which numpy and torch read without a copy; a tuple takes 8 and more."""
    return array("i", values)


def numbers(values: Iterable[float]) -> array[float]:
    """Log-probs of a row in 8 bytes each; a tuple takes 32, and as many objects to make."""
    return array("d", values)


THINK, THINK_END = "<think>", "</think>"
VerdictStatus = Literal["right", "wrong", "no_answer", "error"]


class Purpose(IntEnum):
    """The use of a draw, whose value is added to its index, so that no two uses under one seed and step share noise.

    Add a use at the end: changing a value changes the noise of saved posteriors.
    """

    TRAINING = 0
    """Rollouts, then the fresh gradient draws, which continue the numbering; also the draws of a saved posterior."""
    EVALUATION = 1 << 20
    FINE_TUNING = 1 << 21
    PROBE = 1 << 22

    __repr__ = Enum.__str__


@dataclass(frozen=True)
class Arm:
    """A place and a size for the noise of a draw, as one of several that a run tries (methods/arms.py).

    Examples:
        >>> str(threepo.Arm("attention", 0.65))
        'attention 0.65'
    """

    place: str
    """Parameters that have noise, as a key of `noise.where`: `all`, a kind of layer, or a pattern of names."""
    size: float
    """Factor of the sigma that [noise] and the optimizer give these parameters."""

    @classmethod
    def parse(cls, text: str) -> Arm:
        """The arm that `str` wrote like this; `UserError` for another text."""
        found = re.fullmatch(r"\s*(\S.*?)\s+([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*", text)
        if not found:
            raise UserError(f"arm {text!r}: must be a place and a size, such as 'norm 0.3'")
        return cls(found[1], float(found[2]))

    def __post_init__(self) -> None:
        if not 0 < self.size < math.inf:
            raise UserError(f"arm {self.place!r}: its size {self.size!r} must be above 0 and finite")

    def __str__(self) -> str:
        return f"{self.place} {repr(self.size).removesuffix('.0')}"  # exact, so that the log has the address


@dataclass(frozen=True)
class Draw:
    """The address of one sample of the weights, from which anyone can make the same weights again.

    Noise is a function of (seed, step, purpose, index, parameter name, element index), times sign and arm's size.

    Examples:
        >>> threepo.Draw(seed=0, step=3, index=1)
        Draw(seed=0, step=3, index=1, purpose=Purpose.TRAINING, sign=1, arm=None)
    """

    seed: int
    """The run's noise seed."""
    step: int
    """The training step (0-based) that the draw belongs to."""
    index: int
    """Number of the draw within its step and purpose. In training, 0 to N-1 generate; fresh draws follow."""
    purpose: Purpose = Purpose.TRAINING
    sign: Literal[1, -1] = 1
    """-1: the other half of an antithetic pair, which has the opposite noise."""
    arm: Arm | None = None
    """Place and size of the noise; None: as [noise] says. It changes no number of the noise, only where they go."""

    @property
    def number(self) -> int:
        """Purpose and index as one number, for the key of the noise and the log of completions."""
        assert 0 <= self.index < Purpose.EVALUATION, "a larger index would share noise with another purpose"
        return self.purpose + self.index


@dataclass(frozen=True)
class Problem:
    """A prompt, with all that its reward needs.

    Examples:
        >>> threepo.Problem(id="sum-1", prompt="2 + 2 = ", answer="4").label
        'problem sum-1'
    """

    id: str
    """Unique within its data source and the same in every run: sampling and pairing go by it."""
    prompt: str | tuple[Mapping[str, str], ...]
    """A text, or chat messages of the form {"role": ..., "content": ...}."""
    answer: str = ""
    """The reference answer, where there is one."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of its row in the source; reward functions get them by name."""
    location: str = field(default="", compare=False)
    """Source and row, for messages."""
    template: str = "{prompt}"
    """Text that a policy reads for a prompt that is a text; `{prompt}` in it stands for the prompt."""

    @property
    def label(self) -> str:
        """Name in messages."""
        return self.location or f"problem {self.id}"

    def templated(self, prompt_template: str) -> str:
        """Text that a policy reads for a text prompt, by `data.prompt_template` or, if empty, its own template."""
        assert isinstance(self.prompt, str)
        return (prompt_template or self.template).replace("{prompt}", self.prompt)


@dataclass(frozen=True)
class Verdict:
    """A verifier's judgement of one completion.

    Examples:
        >>> threepo.Verdict(correct=True, status="right", answer="4").reward
        1.0
    """

    correct: bool
    status: VerdictStatus
    """`no_answer`: nothing to grade was found. `error`: the verifier itself failed, which is not the policy's fault."""
    answer: str | None
    """The answer read from the completion; None where there was none."""
    reward: float = math.nan
    """Number that the policy earns; by default 1.0 if correct and 0.0 otherwise."""
    detail: str = ""
    """Reason, if the verifier gives one, such as `time-out` or `runtime error` of a program."""
    format_ok: bool | None = None
    """True if the completion has the layout that its prompt requires; None if it requires none."""
    parts: tuple[tuple[str, float], ...] = ()
    """Reward of each of several reward functions, by name; NaN where it could not judge."""

    def __post_init__(self) -> None:
        if math.isnan(self.reward):
            object.__setattr__(self, "reward", float(self.correct))


def final_answer(completion: str) -> str:
    """The text after the last `</think>`, or the whole text if there is none; without surrounding blanks."""
    return completion.rpartition(THINK_END)[2].strip()


def judge(given: str, correct: bool) -> Verdict:
    """The verdict on a final answer; an empty one is no answer."""
    if not given:
        return Verdict(correct=False, status="no_answer", answer=None)
    return Verdict(correct=correct, status="right" if correct else "wrong", answer=given)


def exact_match(problem: Problem, completion: str) -> Verdict:
    """The verdict: right if the final answer equals the reference answer, ignoring the number of blanks."""
    given = final_answer(completion)
    return judge(given, given.split() == problem.answer.split())


@dataclass(frozen=True)
class Request:
    """A completion to generate."""

    problem: Problem
    prompt_tokens: tuple[int, ...]
    draw: Draw | None
    """Draw that generates it; None: the mean weights."""
    rollout: int
    """Position among the completions of its prompt in this step, over all draws; part of the row's random address."""
    turn: int = field(default=0, kw_only=True)
    """Number of the reply within its episode; part of the random address, too."""


EpisodeStatus = Literal["done", "turns", "tokens", "failed"]


@dataclass(frozen=True)
class Episode:
    """The turns, the pay and the end of a completion that is an episode (docs/episodes.md)."""

    own: tuple[tuple[int, int], ...]
    """Ranges (first, one past the last) of the completion's tokens that are replies of the policy, in order."""
    begin: tuple[tuple[str, str], ...]
    """Messages that the environment let the policy read first, as (role, text); empty: the problem's own prompt."""
    transcript: tuple[tuple[str, str], ...]
    """Replies and observations after that, in order; the policy's role is `assistant`."""
    reward: float | None
    """Sum paid by the environment, discounted (`environment.discount`); None: nothing of it has paid."""
    status: EpisodeStatus
    """`done`: it ended by itself; `turns`, `tokens`: a limit ended it; `failed`: the environment did."""
    reason: str = ""
    """Why the environment failed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the environment."""
    rewards: tuple[float, ...] = ()
    """What each reply was paid, not discounted; empty if nothing was paid."""


@dataclass(frozen=True)
class Completion(Request):
    """A generated text, with the request that it answers."""

    tokens: Sequence[int]
    """The generated tokens, T of them, the end-of-sequence token included where one was drawn. Of an episode: all after
    the prompt, observations included."""
    logprobs: Sequence[float]
    """Log-probability (nats) of each generated token under the distribution that it was actually drawn from."""
    text: str
    """The generated text; of an episode, its last reply."""
    finish_reason: Literal["stop", "length"]
    policy_step: int
    """The training step whose weights the engine held."""
    opening: str = ""
    """`<think>` where the prompt ends in it, as some chat templates do; otherwise empty."""
    verdict: Verdict | None = None
    """None until graded."""
    episode: Episode | None = None
    """None for a single answer."""

    @property
    def own(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the tokens that the policy has generated, in order."""
        return self.episode.own if self.episode else ((0, len(self.tokens)),)

    @property
    def conversation(self) -> str:
        """The text for a reader: of an episode, all replies and observations with their roles."""
        turns = self.episode.begin + self.episode.transcript if self.episode else ()
        return "\n".join(f"[{role}] {text}" for role, text in turns) or self.text

    @property
    def failed(self) -> bool:
        """True if an environment failed, which is not the policy's fault."""
        return self.episode is not None and self.episode.status == "failed"


@dataclass(frozen=True)
class OwnReward:
    """The reward of a data source that pays numbers; `reward.correct_from` says which of them are right."""

    function: Callable[[Sequence[Completion]], list[float]]
    """A number for each completion, in their order."""
    in_main_thread: bool = False
    """True if it can only be called in the main thread, so that no rollouts can be made ahead."""


@dataclass(frozen=True)
class Group:
    """All completions of one prompt in one step, over every draw, by rollout number."""

    completions: tuple[Completion, ...]
    advantages: tuple[float, ...]
    """One for each completion (`methods.method.credit`)."""

    @property
    def problem(self) -> Problem:
        """The problem that all completions answer."""
        return self.completions[0].problem

    @property
    def is_flat(self) -> bool:
        """True if all advantages are 0, so that the prompt gives the policy loss no gradient."""
        return not any(self.advantages)


@dataclass(frozen=True)
class Row:
    """A sequence of tokens to train on; the loss counts some of its tokens, and the others are their context."""

    index: int
    """Position among all rows of the step, prompt-major."""
    tokens: Sequence[int]
    loss_ranges: tuple[tuple[int, int], ...]
    """Ranges (first, one past the last) of tokens that the loss counts, in order; never the first token, which nothing
    predicts."""

    @property
    def loss_tokens(self) -> int:
        """Number of tokens that the loss counts."""
        return sum(end - first for first, end in self.loss_ranges)


@dataclass(frozen=True)
class CreditedRow(Row):
    """A completion to reinforce: the loss counts what the policy generated; prompt and observations are the context."""

    completion: Completion
    advantage: float = 0.0

    @classmethod
    def of(cls, completion: Completion, index: int, advantage: float = 0.0) -> CreditedRow:
        """The row of a completion."""
        prompt = len(completion.prompt_tokens)
        counted = tuple((prompt + first, prompt + end) for first, end in completion.own)
        tokens = integers(completion.prompt_tokens)
        tokens.extend(completion.tokens)
        return cls(index, tokens, counted, completion, advantage)


@dataclass(frozen=True)
class Batch:
    """Input of one policy update; the trainer obeys these fields and does not know which method made them."""

    parts: Mapping[Draw | None, tuple[CreditedRow, ...]]
    """Rows by the draw at whose weights their gradient is taken; None: the mean weights."""
    normalize: Literal["step", "part"]
    """Divide the summed loss by the token count of the whole update, or of each part (then the parts are averaged)."""
    correction: Correction | None
    """Correction of rows for the policy that wrote them. None: the rollouts were cut by top-p or top-k, so their
    log-probs cannot be compared with the trainer's: no correction, and no ratios in the log."""
    temperature: float
    """Divides the trainer's logits, as it divided the engine's."""
    max_new_tokens: int
    """Most tokens of a completion."""
    seed: int
    """The run's seed. With the training step, it is the address of what the update draws at random."""
    step: int
    cumulative: bool = False
    """Carry each part's gradient over into the next one (only to reproduce the paper's released code)."""
    fitness: Mapping[Draw, float] = field(default_factory=dict)
    """Standardised reward of each draw, from which an evolution strategy makes the update if there are no parts; with
    parts, the update is compared with it. Empty with no parts: there is nothing to learn from."""


@dataclass(frozen=True)
class MicroBatch:
    """R rows one after another, without padding, as a model reads them; the loss counts K of their tokens.

    A row ends before its last counted token, from which nothing is predicted. Example: the prompt (5, 6, 7) with its
    completion (8, 9), then (1,) with (2,): input_ids 5 6 7 8 1, row_lengths (4, 1), loss_positions 2 3 4,
    targets 8 9 2, row_of 0 0 1.
    """

    input_ids: torch.Tensor
    """[T] integers."""
    row_lengths: tuple[int, ...]
    """R lengths, which add up to T."""
    loss_positions: torch.Tensor
    """[K]: where in `input_ids` each counted token is predicted, which is the token before it."""
    targets: torch.Tensor
    """[K]: the counted tokens."""
    row_of: torch.Tensor
    """[K]: the row of each counted token, 0 to R-1, ascending."""
