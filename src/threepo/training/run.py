"""Parts that runs of RLVR and SFT share: building or restoring a run, and ending a step.

A step ends with a row of the log, and with a checkpoint and an evaluation when they are due.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from threepo.config import TRACKERS, IVONConfig, ScheduleConfig, SFTConfig, TrainConfig
from threepo.errors import ThreepoWarning, UserError
from threepo.models.policy import Policy
from threepo.models.prompts import is_special
from threepo.posterior.gaussian import Posterior
from threepo.posterior.metrics import Movement, posterior_metrics
from threepo.posterior.policy_optimizer import PolicyOptimizer
from threepo.progress import CALLBACK, obey, polite_stop, progress
from threepo.ranks.agreement import StateCheck, agree_on_setup
from threepo.ranks.sharding import load_sharded
from threepo.ranks.world import World
from threepo.run_folder import (
    ADAPTERS,
    FollowedFolder,
    RunFolder,
    last_row,
    newest_checkpoint,
    read_metrics,
    refuse_taken,
)
from threepo.training.checkpoint import Files, TrainState, load_train_state, restore_optimizer, save_checkpoint
from threepo.training.metrics import Clock, Metrics
from threepo.training.optimizers import begin_ivon, build_optimizer
from threepo.training.schedules import ScheduleState, first_state, resumed_state
from threepo.types import THINK_END
from threepo.user_code import find_object, own_names

Follower = Callable[[Mapping[str, Any]], object]
"""Gets each row of metrics.jsonl as it is written; returns True to stop the run, with its state saved."""
Config = TypeVar("Config", TrainConfig, SFTConfig)
LOUD_NOISE = 10.0
"""Sigma relative to the weights' root mean square, above which there is a warning; no task of ours has used over 1."""


def factor(step: int, steps: int, settings: ScheduleConfig) -> float:
    """Multiplier of the learning rate at training step `step` (0-based) of `steps`.

    Linear warm-up to 1 over the first `warmup_share` of the steps, reached at its last step; then constant, or a
    half cosine from 1 down to `floor`, reached at the last step.
    """
    warmup = math.ceil(settings.warmup_share * steps - 1e-9)  # 0.07 * 100 is 7.000000000000001
    if step < warmup:
        return (step + 1) / warmup
    if settings.kind == "constant":
        return 1.0
    share = (step - warmup + 1) / max(steps - warmup, 1)
    return settings.floor + (1 - settings.floor) * 0.5 * (1 + math.cos(math.pi * share))


def due(done: int, every: int, total: int) -> bool:
    """True if work that happens every so many steps (0: only at the end) is due after `done` of `total` steps."""
    return done == total or (every > 0 and done % every == 0)


@dataclass
class TrainingRun(Generic[Config]):
    """The parts of a training run."""

    config: Config
    folder: RunFolder
    policy: Policy
    optimizer: PolicyOptimizer
    state: TrainState
    world: World
    followers: Sequence[Follower] = field(default=(), kw_only=True)
    """Functions called on the first rank with every row of metrics.jsonl."""
    has_callbacks: bool = field(default=False, kw_only=True)
    """True on the first rank if functions of the user are among the followers."""
    asked_to_stop: bool = field(default=False, kw_only=True)
    """True if a follower has asked to stop."""
    warned: bool = field(default=False, kw_only=True)
    """True if a gradient that was not finite has been warned of."""
    latest: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """The last known value of every metric, for the progress bar."""

    def __post_init__(self) -> None:
        self.check = StateCheck(self.world, self.optimizer)
        self.check.note()
        self.movement = Movement(self.optimizer)

    def set_rates(self, step: int, steps: int) -> None:
        """Set the learning rate of training step `step` of `steps`, and the effective sample size, if there is one."""
        settings: Any = self.config.optimizer
        for group in self.optimizer.param_groups:
            group["lr"] = settings.rate * factor(step, steps, self.config.schedule)
            group["ess"] = getattr(settings, "ess", 1.0) * self.state.schedules.ess_factor

    def optimizer_metrics(self, finite: bool, posterior: bool = True) -> Metrics:
        """Metrics of the optimizer and, if `posterior`, of its posterior, if it has one.

        `finite`: whether all gradients of the step were finite; the first step of a run where one was not warns.
        """
        metrics = self.optimizer.step_metrics() | {"optimizer/lr": self.optimizer.param_groups[0]["lr"]}
        metrics |= self.movement.metrics()
        if not finite and not self.warned:
            self.warned = True
            warnings.warn(
                f"a gradient of step {self.state.step} was not finite, so its update was skipped; later ones are only "
                f"counted, in optimizer/skipped_steps",
                ThreepoWarning,
                stacklevel=2,
            )
        if posterior and not Posterior.of(self.optimizer, gather=False).is_point:
            metrics |= posterior_metrics(self.optimizer)
        return metrics

    def more_tensors(self) -> Files:
        """Tensors that a checkpoint has to hold besides the policy and its optimizer."""
        return {}

    def more_files(self) -> Callable[[Path], None] | None:
        """Return a function that writes other files of a checkpoint into its folder, or None."""
        return None

    def evaluate(self) -> None:
        """Call `add_evaluation` with what this kind of run measures, if anything."""

    def add_evaluation(self, every: int, steps: int, name: str, measure: Callable[[], Metrics]) -> None:
        """Add the metrics of `measure`, one of them `name`, to the row of the last step, if due and not there yet.

        Before the first step they make a row of their own, -1.
        """
        done = self.state.step
        if not due(done, every, steps):
            return

        def is_done() -> bool:
            last = last_row(self.folder.path)
            # A step whose row is lost gets no row with its evaluation alone.
            return name in last if last.get("step") == done - 1 else done > 0

        if self.world.on_first(is_done):
            return
        clock = Clock()
        metrics = measure()
        clock.lap("time/eval")
        row = {"step": done - 1, **metrics, **clock.times}
        self.world.on_first(lambda: self.folder.add_to_row(row))
        self.tell(row)

    def tell(self, row: Mapping[str, Any]) -> None:
        """Pass a row of metrics.jsonl on to the followers."""
        self.latest |= row

        def any_stops() -> bool:
            answers = [follow(row) for follow in self.followers]
            return any(isinstance(answer, bool | np.bool_) and answer for answer in answers)

        with self.saved_on_failure():
            self.asked_to_stop |= self.world.on_first(any_stops)

    def save(self, prune: bool = True) -> None:
        """Save a checkpoint, unless no step is done yet, and with `prune` delete those that are too old to keep."""
        path = self.world.on_first(lambda: self.folder.checkpoint_path(self.state.step))
        if self.state.step and not self.world.on_first(path.exists):
            self.check.agree(self.state)
            tensors, write_more = self.more_tensors(), self.more_files()
            save_checkpoint(path, self.policy, self.optimizer, self.state, self.world, tensors, write_more)
        if prune:
            self.world.on_first(lambda: self.folder.prune_checkpoints(self.config.run.keep_checkpoints))

    @contextmanager
    def saved_on_failure(self) -> Iterator[None]:
        """Save a checkpoint if an error ends the body; on several ranks, only if all know of it, to save together.

        Older checkpoints stay: the policy of the new one may have diverged, which is an error of the next rollouts.
        """
        try:
            yield
        except Exception as error:
            if self.world.all_know(error):
                self.save(prune=False)
            raise

    @contextmanager
    def ending_steps(self, title: str, steps: int, shown: Mapping[str, str]) -> Iterator[Callable[..., None]]:
        """Yield a function that ends a training step, given its metrics: it logs them, saves and evaluates when due.

        It raises `Interrupted`, with a checkpoint saved, if a signal asked the run to stop. A second argument is a text
        to print. `shown` has the metrics on the progress bar, by their short names. A run that ends before or during an
        evaluation leaves a row without it; a resumed run makes up for it before its first step.
        """
        console = self.world.console()
        say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        for row in read_metrics(self.folder.path):
            self.latest |= {name: value for name, value in row.items() if value is not None}
        if self.state.step >= steps:
            more = f"; --resume {self.folder.path} run.steps=N extends it" if self.config.run.steps else ""
            say(f"this run has done all its {steps} steps{more}")
        with polite_stop() as stop, progress(title, steps, self.state.step, self.folder.path, console) as reporter:

            def stop_if_asked() -> None:
                asked = CALLBACK if self.asked_to_stop else 0
                if stopping := max(self.world.gather(stop.signal_number or asked)):  # a later signal: the next time
                    self.save()
                obey(stopping, self.state.step, steps, self.folder.path)

            def end_step(metrics: Metrics, text: str = "") -> None:
                done = self.state.step
                if text:
                    say(text)
                row = {"step": done - 1, **metrics}
                self.world.on_first(lambda: self.folder.log(row))
                self.tell(row)
                if due(done, self.config.run.checkpoint_every, steps):
                    self.save()
                stop_if_asked()
                with self.saved_on_failure():
                    self.evaluate()
                known = {short: self.latest[name] for short, name in shown.items() if name in self.latest}
                reporter.update(done, known)
                stop_if_asked()

            self.evaluate()
            stop_if_asked()
            yield end_step


def refuse_early(config: Config, resumed: RunFolder | None, world: World) -> None:
    """Raise `UserError` for mistakes that show without a model, before minutes go into loading one."""
    agree_on_setup(config, world)
    if not resumed:
        world.on_first(lambda: refuse_taken(Path(config.run.folder), config))
    with world.together():
        for name, setting in own_names(config):
            find_object(name, setting)
        for name in (name for name in config.run.trackers if name in TRACKERS):
            needs = TRACKERS[name].needs
            if needs and not find_spec(needs):
                raise UserError(f"run.trackers: {name!r} needs the package; in a clone, pip install '.[{name}]'")


def build_or_restore(
    config: Config, resumed: RunFolder | None, world: World
) -> tuple[Policy, PolicyOptimizer, TrainState]:
    """Policy, optimizer and state, restored from the newest checkpoint of a resumed run, or new if there is none."""
    model, settings, seed = config.model, config.optimizer, config.run.seed
    path = newest_checkpoint(resumed.path) if resumed else None
    world.agree({"the checkpoint to resume": path}, "resume one run on all ranks, on a disk that they share")
    state = load_train_state(path) if path else TrainState()
    adapters = path if path and (path / ADAPTERS).is_file() else None
    if path:  # its own tokenizer, and all weights or adapters alone
        model = replace(model, tokenizer="", path=model.path if adapters else str(path))
    policy = load_sharded(model, config.parallel, world, seed, adapters)
    if policy.has_adapters and not model.lora.rank:
        raise UserError(f"model.path = {model.path!r}: holds adapters; set model.lora.rank to theirs, or merge them")
    optimizer = build_optimizer(settings, config.noise, policy.model, seed, path)
    if path:
        restore_optimizer(path, optimizer)
        if isinstance(config, TrainConfig):
            state = replace(state, schedules=resumed_state(config, state.schedules, state.step))
        return policy, optimizer, state
    if isinstance(settings, IVONConfig):
        begin_ivon(settings, optimizer, model)
    schedules = first_state(config) if isinstance(config, TrainConfig) else ScheduleState()
    _warn_at_the_start(config, policy, optimizer)
    return policy, optimizer, replace(state, schedules=schedules)


def _warn_at_the_start(config: Config, policy: Policy, optimizer: PolicyOptimizer) -> None:
    """Warn of a policy that cannot end a text, and of noise that leaves nothing of the weights."""
    if isinstance(config, TrainConfig) and not policy.stop_tokens:
        warnings.warn(
            f"model.path = {config.model.path!r}: has no end token, so every completion will be cut at "
            f"sampling.max_new_tokens = {config.sampling.max_new_tokens}: set eos_token_id in its "
            f"generation_config.json, or model.tokenizer to a tokenizer that has an eos_token",
            ThreepoWarning,
            stacklevel=3,
        )
    lost = [mark for mark in ("<think>", THINK_END) if is_special(mark, policy.tokenizer)]
    if isinstance(config, TrainConfig) and lost:
        warnings.warn(
            f"model.path = {config.model.path!r}: {' and '.join(lost)} are special tokens of the tokenizer, which are "
            f"not part of a completion's text, so no reward sees where a thought ends: add them with special=False",
            ThreepoWarning,
            stacklevel=3,
        )
    if Posterior.of(optimizer, gather=False).is_point:
        return
    ratio = posterior_metrics(optimizer)["posterior/sigma_to_rms"]
    if ratio > LOUD_NOISE:
        name, value, usual = "noise.size", config.noise.size, config.noise.size * 0.05 / ratio
        if config.noise.unit == "posterior":
            name, value = "optimizer.ess", optimizer.param_groups[0]["ess"]
            usual = value * (ratio / 0.05) ** 2
        warnings.warn(
            f"{name} = {value:g}: sigma is {ratio:.3g} times the root mean square of the weights, so draws keep "
            f"nothing of the model; 0.05 times, about as in the paper, is {name} = {usual:.2g} here",
            ThreepoWarning,
            stacklevel=3,
        )


def open_folder(
    config: TrainConfig | SFTConfig,
    resumed: RunFolder | None,
    done: int,
    world: World,
    data: Mapping[str, Any] | None = None,
) -> RunFolder:
    """The folder that a run writes into from step `done` on; a new one gets `data` as problems.json.

    Rows of a resumed run that are later than its checkpoint are deleted, because they will be made again.
    """
    if resumed:
        world.on_first(lambda: resumed.forget_after(done))
        return resumed
    path = Path(config.run.folder)
    return world.only_first(lambda: RunFolder.create(path, config, data), others=FollowedFolder(path))
