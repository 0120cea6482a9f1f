"""Warm start by supervised fine-tuning (sft.md): imitate texts, and learn a posterior at the same time.

    threepo sft RECIPE [section.key=value ...]
    threepo sft --resume RUN

The loss is the next-token cross-entropy of the tokens to imitate, a mean over all of them in the optimizer step. With
IVON, one draw of the weights is held across all micro-batches of a step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from threepo.config import DataConfig, SFTConfig
from threepo.data.finite import epoch_batch, warn_of_shared
from threepo.data.source import Demonstration, Demonstrations
from threepo.errors import UserError
from threepo.files import write_json
from threepo.models.packing import flatten
from threepo.models.policy import Policy
from threepo.posterior.ivon import IVON
from threepo.ranks.agreement import row_facts
from threepo.ranks.dealing import deal_bundles
from threepo.ranks.world import ALONE, World
from threepo.run_folder import CONVERSATIONS, RunFolder, read_material, refuse_changed
from threepo.training.checkpoint import TrainState
from threepo.training.conversations import Part, prepare, read_template, refuse_unreadable
from threepo.training.metrics import Clock, Metrics
from threepo.training.run import TrainingRun, build_or_restore, due, open_folder, refuse_early
from threepo.types import Draw, Purpose, Row, integers

SHOWN = {"loss": "sft/loss", "held-out": "sft/eval_loss", "update": "update/rms", "noise": "posterior/sigma_to_rms"}
"""Metrics on the progress bar, by their short names."""


@dataclass(frozen=True)
class Material:
    """The texts that a run imitates, and its number of steps."""

    rows: Callable[[int], Sequence[Row]]
    """The rows of an optimizer step; the same for every resumed run."""
    steps: int
    heldout: Sequence[Row] = ()
    """Rows to measure the loss on; none: it is not measured."""
    eval_every: int = 0
    """Steps between these measurements; 0: only at the end."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Contents of conversations.json; empty for demonstrations."""


@dataclass
class FineTuning(TrainingRun[SFTConfig]):
    """The parts of a fine-tuning run."""

    material: Material

    def evaluate(self) -> None:
        """Measure the loss of held-out conversations if due: every `eval_every` steps and at the end."""
        material = self.material
        if material.heldout and self.state.step:
            self.add_evaluation(material.eval_every, material.steps, "sft/eval_loss", self._heldout_loss)

    @torch.no_grad()
    def _heldout_loss(self) -> Metrics:
        heldout = self.material.heldout
        loss = cross_entropy(self.policy, heldout, self.config.batching.tokens, self.world)
        return {"sft/eval_loss": loss / loss_tokens(heldout)}


def fine_tune(run: FineTuning) -> None:
    """Train from `run.state` to the end; raises `Interrupted`, with a checkpoint saved, if asked to stop."""
    config, steps = run.config, run.material.steps
    with run.ending_steps("warm start", steps, SHOWN) as end_step:
        for step in range(run.state.step, steps):
            clock = Clock()
            run.set_rates(step, steps)
            with run.saved_on_failure(), run.world.together():
                rows = run.material.rows(step)
            draw = Draw(config.run.seed, step, 0, Purpose.FINE_TUNING) if isinstance(run.optimizer, IVON) else None
            tokens = loss_tokens(rows)
            run.check.agree(run.state, partial(row_facts, rows))
            with run.optimizer.at(draw):
                loss = cross_entropy(run.policy, rows, config.batching.tokens, run.world)
            finite = run.optimizer.observe(draw)
            run.optimizer.step(divisor=tokens)
            run.check.note()
            clock.lap("time/step")
            metrics = {"sft/loss": loss / tokens, "sft/tokens": float(tokens)}
            metrics |= run.optimizer_metrics(finite, posterior=due(step + 1, 10, steps))
            run.state = TrainState(step + 1)
            end_step(metrics | clock.times)


def encode(policy: Policy, demonstrations: Sequence[Demonstration]) -> list[Row]:
    """Turn demonstrations into rows: prompt tokens, then completion tokens with the end-of-sequence token."""
    rows = []
    for index, (problem, completion) in enumerate(demonstrations):
        tokens = (*policy.tokenizer(completion, add_special_tokens=False)["input_ids"], policy.tokenizer.eos_token_id)
        policy.check_vocabulary(problem.label, tokens)
        (prompt,) = policy.prompt_tokens([problem], DataConfig(train="demonstrations"))
        if (length := len(prompt) + len(tokens)) > policy.context:
            fix = "leave its level out of demonstrations.levels, or its task out of demonstrations.tasks, in a new run"
            raise UserError(f"{problem.label}: {length} tokens, and the model's context has {policy.context}; {fix}")
        rows.append(Row(index, integers(prompt + tokens), ((len(prompt), len(prompt) + len(tokens)),)))
    return rows


def cross_entropy(policy: Policy, rows: Sequence[Row], token_budget: int, world: World = ALONE) -> float:
    """Cross-entropy in nats, summed over the counted tokens; accumulates its gradient where gradients are enabled."""
    total = 0.0
    for bundle in deal_bundles(rows, token_budget, policy, world):
        if not bundle:
            policy.idle()
            continue
        loss = -policy.logprobs(flatten(bundle, policy.device)).logprobs.sum()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return math.fsum(world.gather(total))


def loss_tokens(rows: Sequence[Row]) -> int:
    """Number of tokens that the loss of these rows counts."""
    return sum(row.loss_tokens for row in rows)


def assemble(config: SFTConfig, folder: RunFolder | None = None, world: World = ALONE) -> FineTuning:
    """A new run in a new folder, or the run in `folder` as its newest checkpoint left it."""
    refuse_early(config, folder, world)
    if config.conversations and not folder:
        refuse_unreadable(config.conversations)
    demonstrations = Demonstrations(config.demonstrations) if config.demonstrations else None
    policy, optimizer, state = build_or_restore(config, folder, world)
    if config.conversations and config.conversations.chat_template and not state.step:  # a checkpoint has its own
        policy.tokenizer.chat_template = read_template(config.conversations.chat_template)
    if demonstrations:
        if policy.tokenizer.eos_token_id is None:
            raise UserError(f"model.path = {config.model.path!r}: its tokenizer has no end-of-sequence token to learn")
        material = Material(lambda step: encode(policy, demonstrations.batch(step)), config.run.steps)
    else:
        material = _conversations(config, policy, folder)
    material.rows(state.step)  # refuse what cannot be encoded now, not in the loop
    folder = open_folder(config, folder, state.step, world)
    if material.record:
        world.on_first(lambda: write_json(folder.path / CONVERSATIONS, material.record))
    return FineTuning(config, folder, policy, optimizer, state, world, material)


def _conversations(config: SFTConfig, policy: Policy, resumed: RunFolder | None) -> Material:
    """The conversations of a recipe; a resumed run must use the ones that it began with."""
    settings = config.conversations
    assert settings is not None, "a recipe has demonstrations or conversations"
    saved = read_material(resumed.path, CONVERSATIONS) if resumed else {}
    files = {part: record.file for part, record in saved.items()}
    parts: tuple[Part, ...] = ("source", "eval") if settings.eval else ("source",)
    prepared = {part: prepare(policy, settings, part, files.get(part, "")) for part in parts}
    record: dict[str, Any] = {part: conversations.record for part, conversations in prepared.items()}
    if resumed:
        refuse_changed(resumed.path, CONVERSATIONS, record)
    if "eval" in prepared:
        warn_of_shared("conversations.eval", *(prepared[part].digests for part in parts))
    training, heldout, size = prepared["source"], prepared.get("eval"), settings.batch_size
    count = len(training.kept)
    if count < size:
        few = f"{count} rows are left, fewer than conversations.batch_size = {size}; lower it"
        raise UserError(f"conversations {settings.source}: {few}")
    return Material(
        rows=lambda step: training.batch(epoch_batch(count, size, settings.seed, step)),
        steps=config.run.steps or settings.epochs * (count // size),  # the rest of an epoch is left out
        heldout=heldout.batch(range(len(heldout.kept))) if heldout else (),
        eval_every=settings.eval_every,
        record=record,
    )
