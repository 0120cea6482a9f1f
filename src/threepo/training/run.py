"""What RLVR and SFT share: a run's parts are built or restored, each step is logged, checkpoints are saved."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from threepo.config import SFTConfig, TrainConfig
from threepo.errors import UserError
from threepo.models.policy import Policy, load_policy
from threepo.posterior.policy_optimizer import PolicyOptimizer
from threepo.progress import polite_stop, progress
from threepo.run_folder import RunFolder, checkpoints, refuse_taken
from threepo.training.checkpoint import TrainState, load_train_state, restore_optimizer, save_checkpoint
from threepo.training.metrics import Metrics
from threepo.training.optimizers import OPTIMIZERS, build_optimizer
from threepo.training.schedule import due, factor
from threepo.training.trackers import TensorBoard

Config = TypeVar("Config", TrainConfig, SFTConfig)


@dataclass
class TrainingRun(Generic[Config]):
    """The parts of a training run; `state` is the only one that changes."""

    config: Config
    folder: RunFolder
    tensorboard: TensorBoard | None
    policy: Policy
    optimizer: PolicyOptimizer
    state: TrainState

    def set_learning_rate(self, step: int, steps: int) -> None:
        """Set the learning rate of training step `step` of `steps`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.optimizer.lr * factor(step, steps, self.config.schedule)

    def save(self) -> None:
        """Save a checkpoint, unless no step is done yet, and delete those that are too old to keep."""
        path = self.folder.checkpoint_path(self.state.step)
        if self.state.step and not path.exists():
            save_checkpoint(path, self.policy, self.optimizer, self.state)
        self.folder.prune_checkpoints(self.config.run.keep_checkpoints)

    @contextmanager
    def ending_steps(self, title: str, steps: int, shown: Mapping[str, str]) -> Iterator[Callable[[Metrics], None]]:
        """Yield a function that ends a training step, given its metrics: it logs them, and saves when that is due.

        It raises `Interrupted`, with a checkpoint saved, if a signal asked the run to stop. `shown` has the metrics on
        the progress bar, by their short names there.
        """
        with polite_stop() as stop, progress(title, steps, self.state.step, self.folder.path) as reporter:

            def end_step(metrics: Metrics) -> None:
                done = self.state.step
                self.folder.log({"step": done - 1, **metrics})
                if self.tensorboard:
                    self.tensorboard.log(done - 1, metrics)
                stopping = stop.signal_number > 0  # once: a signal after this is for the next step, which saves
                if stopping or due(done, self.config.run.checkpoint_every, steps):
                    self.save()
                reporter.update(done, {short: metrics[name] for short, name in shown.items() if name in metrics})
                if stopping:
                    stop.obey(done, steps, self.folder.path)

            yield end_step


def refuse_early(config: TrainConfig | SFTConfig, resumed: RunFolder | None) -> None:
    """Raise `UserError` for what needs no model to be refused, before minutes go into loading one."""
    if not resumed:
        refuse_taken(Path(config.run.folder), config)
    if config.run.tensorboard and not find_spec("tensorboard"):
        raise UserError("run.tensorboard = true: needs the package; pip install 'threepo[tensorboard]'")


def build_or_restore(
    config: TrainConfig | SFTConfig, resumed: RunFolder | None
) -> tuple[Policy, PolicyOptimizer, TrainState]:
    """Policy, optimizer and state as the newest checkpoint of a resumed run has them; new ones if there is none."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    model, settings, seed = config.model, config.optimizer, config.run.seed
    saved = checkpoints(resumed.path) if resumed else []
    if not saved:
        policy = load_policy(model, seed)
        optimizer = build_optimizer(settings, policy.model, seed)
        OPTIMIZERS[settings.kind].begin(settings, optimizer, model)
        return policy, optimizer, TrainState()
    path = saved[-1][1]
    policy = load_policy(replace(model, path=str(path), tokenizer=""), seed)
    optimizer = build_optimizer(settings, policy.model, seed)
    state = load_train_state(path)
    restore_optimizer(path, optimizer, state)
    return policy, optimizer, state


def open_folder(
    config: TrainConfig | SFTConfig, resumed: RunFolder | None, done: int, data: Mapping[str, Any] | None = None
) -> tuple[RunFolder, TensorBoard | None]:
    """The folder to write into from step `done` on. A new one gets `data` as problems.json.

    Rows of a resumed run that are later than its checkpoint are deleted, because they will be made again.
    """
    if resumed:
        resumed.forget_after(done or -1)  # the row of the evaluation before the first step has step -1
    folder = resumed or RunFolder.create(Path(config.run.folder), config, data)
    return folder, TensorBoard(folder.path / "tensorboard", done) if config.run.tensorboard else None
