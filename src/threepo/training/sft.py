"""Warm start by supervised fine-tuning (sft.md): imitate texts, and learn a posterior while at it.

    threepo sft RECIPE [section.key=value ...]
    threepo sft --resume RUN

The loss is the next-token cross-entropy of the tokens to imitate, a mean over all of them in the optimizer step. With
IVON, one draw of the weights is held across all micro-batches of a step.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from threepo.config import DataConfig, SFTConfig
from threepo.data.demonstrations import Demonstration, Demonstrations
from threepo.data.finite import warn_of_shared
from threepo.errors import UserError
from threepo.files import read_json, write_text
from threepo.interrupt import polite_stop
from threepo.models.policy import Policy
from threepo.posterior.ivon import IVON
from threepo.posterior.policy_optimizer import PolicyOptimizer
from threepo.posterior.statistics import posterior_metrics
from threepo.progress import progress
from threepo.run_folder import CONVERSATIONS, RunFolder, refuse_in_use, refuse_taken
from threepo.training.batching import flatten, pack
from threepo.training.build import build_or_restore
from threepo.training.checkpoint import TrainState, checkpoint
from threepo.training.clock import Clock, due
from threepo.training.conversations import ConversationBatches, Part, prepare, read_template, refuse_unreadable
from threepo.training.schedule import factor
from threepo.types import Draw, SupervisedRow

SFT_DRAW = 1 << 21
"""Index of the draws of a warm start, so that reinforcement learning under the same seed meets other noise."""


class RowSource(Protocol):
    """What to imitate, by optimizer step."""

    def rows(self, step: int) -> Sequence[SupervisedRow]:
        """The rows of step `step`; the same for every resumed run."""


@dataclass(frozen=True)
class EncodedDemonstrations:
    """Demonstrations as rows."""

    policy: Policy
    demonstrations: Demonstrations

    def rows(self, step: int) -> list[SupervisedRow]:
        """The demonstrations of one optimizer step."""
        return encode(self.policy, self.demonstrations.batch(step))


@dataclass(frozen=True)
class Material:
    """What a run imitates, and for how long."""

    source: RowSource
    steps: int
    heldout: Sequence[SupervisedRow] = ()
    """To measure the loss on; none: it is not measured."""
    eval_every: int = 0
    """Steps between those measurements; 0: only at the end."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """What the run folder keeps of the conversations, if that is what they are."""


@dataclass
class FineTuning:
    """The parts of a fine-tuning run; `state` is the only one that changes."""

    config: SFTConfig
    folder: RunFolder
    policy: Policy
    optimizer: PolicyOptimizer
    material: Material
    state: TrainState = field(default_factory=TrainState)


def fine_tune(run: FineTuning) -> None:
    """Train from `run.state` to the end; raises `Interrupted`, with a checkpoint saved, if asked to stop."""
    config, steps = run.config, run.material.steps
    with polite_stop() as stop, progress("warm start", steps, run.state.step, run.folder.path) as reporter:
        for step in range(run.state.step, steps):
            clock = Clock()
            for group in run.optimizer.param_groups:
                group["lr"] = config.optimizer.lr * factor(step, steps, config.schedule)
            rows = run.material.source.rows(step)
            draw = Draw(config.run.seed, step, SFT_DRAW) if isinstance(run.optimizer, IVON) else None
            tokens = loss_tokens(rows)
            with run.optimizer.at(draw):
                loss = cross_entropy(run.policy, rows, config.batching.tokens)
            run.optimizer.observe(draw)
            run.optimizer.step(divisor=tokens)
            clock.lap("time/step")
            run.state = TrainState(step + 1, run.optimizer.param_groups[0].get("step", 0), run.optimizer.skipped_steps)
            metrics = {"sft/loss": loss / tokens, "sft/tokens": float(tokens), **run.optimizer.step_metrics()}
            metrics["optimizer/lr"] = run.optimizer.param_groups[0]["lr"]
            if isinstance(run.optimizer, IVON) and due(step + 1, 10, steps):
                metrics |= posterior_metrics(run.optimizer)
            if run.material.heldout and due(step + 1, run.material.eval_every, steps):
                heldout = run.material.heldout
                with torch.no_grad():
                    loss = cross_entropy(run.policy, heldout, config.batching.tokens)
                metrics["sft/eval_loss"] = loss / loss_tokens(heldout)
                clock.lap("time/eval")
            run.folder.log({"step": step, **metrics, **clock.times})
            stopping = stop.signal_number > 0  # once: a signal after this is for the next step, which saves
            if stopping or due(step + 1, config.run.checkpoint_every, steps):
                checkpoint(run.folder, run.policy, run.optimizer, run.state, config.run.keep_checkpoints)
            reporter.update(step + 1, {"loss": metrics["sft/loss"]})
            if stopping:
                stop.obey(step + 1, steps, run.folder.path)


def encode(policy: Policy, demonstrations: Sequence[Demonstration]) -> list[SupervisedRow]:
    """Demonstrations as rows: prompt tokens, then completion tokens with the end-of-sequence token."""
    rows = []
    for index, shown in enumerate(demonstrations):
        tokens = policy.tokenizer(shown.completion, add_special_tokens=False)["input_ids"]
        tokens = (*tokens, policy.tokenizer.eos_token_id)
        policy.check_vocabulary(shown.problem.label, tokens)
        prompt = policy.encode_prompt(shown.problem, DataConfig(train="demonstrations"), len(tokens))
        rows.append(SupervisedRow(prompt + tokens, ((len(prompt), len(prompt) + len(tokens)),), index))
    return rows


def cross_entropy(policy: Policy, rows: Sequence[SupervisedRow], token_budget: int) -> float:
    """Cross-entropy in nats, summed over the counted tokens; accumulates its gradient where gradients are enabled."""
    total = 0.0
    for bundle in pack(rows, token_budget, policy.device, padding=not policy.packed_rows):
        logprobs, _ = policy.logprobs(flatten(bundle, policy.device))
        loss = -logprobs.sum()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def loss_tokens(rows: Sequence[SupervisedRow]) -> int:
    """How many tokens the loss of these rows counts."""
    return sum(end - first for row in rows for first, end in row.loss_ranges)


def assemble(config: SFTConfig, folder: RunFolder | None = None) -> FineTuning:
    """A new run in a folder of its own; or that in `folder`, as its newest checkpoint left it."""
    if not folder:
        refuse_in_use(Path(config.run.folder))
        refuse_taken(Path(config.run.folder), config)  # before minutes go into loading a model
        if config.conversations:
            refuse_unreadable(config.conversations)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    demonstrations = Demonstrations(config.demonstrations) if config.demonstrations else None
    policy, optimizer, state = build_or_restore(
        config.model, config.optimizer, config.run.seed, folder.path if folder else None
    )
    if config.conversations and config.conversations.chat_template and not state.step:  # a checkpoint brings its own
        policy.tokenizer.chat_template = read_template(config.conversations.chat_template)
    if demonstrations:
        material = _demonstrations(config, demonstrations, policy)
    else:
        material = _conversations(config, policy, folder)
    material.source.rows(state.step)  # refuse what cannot be encoded now, not in the loop
    if folder:
        folder.forget_after(state.step)
    else:
        folder = RunFolder.create(Path(config.run.folder), config)
    if material.record:
        write_text(folder.path / CONVERSATIONS, json.dumps(material.record, indent=2) + "\n")
    return FineTuning(config, folder, policy, optimizer, material, state)


def _demonstrations(config: SFTConfig, demonstrations: Demonstrations, policy: Policy) -> Material:
    if policy.tokenizer.eos_token_id is None:
        raise UserError(f"model.path = {config.model.path!r}: its tokenizer has no end-of-sequence token to teach")
    return Material(EncodedDemonstrations(policy, demonstrations), config.run.steps)


def _conversations(config: SFTConfig, policy: Policy, resumed: RunFolder | None) -> Material:
    """The conversations of a recipe; a resumed run goes on with those it began with, or not at all."""
    settings = config.conversations
    assert settings is not None, "a recipe has demonstrations or conversations"
    known = resumed.path / CONVERSATIONS if resumed else None
    before = read_json(known) if known and known.is_file() else {}
    parts: tuple[Part, ...] = ("source", "eval") if settings.eval else ("source",)
    prepared = {part: prepare(policy, settings, part, before.get(part)) for part in parts}
    if "eval" in prepared:
        warn_of_shared("conversations.eval", *(prepared[part].digests for part in parts))
    batches = ConversationBatches(prepared["source"], settings.batch_size, settings.seed)
    return Material(
        batches,
        config.run.steps or settings.epochs * batches.steps_per_epoch,
        prepared["eval"].batch(range(len(prepared["eval"].kept))) if "eval" in prepared else (),
        settings.eval_every,
        {part: one.record for part, one in prepared.items()},
    )
