"""IVON in the Hugging Face Trainer: `IVONTrainer` is a `transformers.Trainer` that learns a posterior.

    trainer = IVONTrainer(model, TrainingArguments(..., learning_rate=1.0, max_grad_norm=0.0), ivon={"ess": 1e9}, ...)
    trainer.train()

Each optimizer step has one draw: all its micro-batches run forward and backward at the same weights, mean + sigma *
z(draw). Between them the model holds the mean, so evaluations, checkpoints and saved models are of the mean. Every
saved model comes with `posterior.safetensors`, from which draws are made. Under data parallelism every process makes
the same draw without communication, because noise is a function of its address (seed, step, draw, parameter name).
Needs accelerate (`pip install '.[trainer]'` in a clone).
"""

import inspect
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from threepo.config import IVONConfig
from threepo.errors import UserError
from threepo.plugins.trainers import LOGGED, passed_settings_kept
from threepo.posterior.gaussian import Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.metrics import Movement, posterior_metrics
from threepo.run_folder import POSTERIOR_FILE
from threepo.types import Draw


class PushPosterior(TrainerCallback):  # type: ignore[misc]
    """Adds the posterior to the upload of a checkpoint, for which the Trainer copies only the files that it knows."""

    def on_push_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Copy the posterior from the checkpoint to the model's files that are uploaded."""
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}" / POSTERIOR_FILE
        if state.is_world_process_zero and saved.is_file():
            shutil.copyfile(saved, Path(args.output_dir) / POSTERIOR_FILE)


class IVONTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` whose optimizer is `threepo.IVON`.

    Args:
        model: as in Trainer, like all other arguments except `ivon`.
        args: `learning_rate` is IVON's `lr`, which schedulers change; `seed` also seeds the noise. `max_grad_norm` and
            `weight_decay` must be 0; other settings of optimizers are refused.
        ivon: further settings of `threepo.IVON`; clip_radius is the paper's 1e-3 unless set. For parameter groups, pass
            an IVON as `optimizers=(optimizer, None)` instead.

    Next to the loss, the log has `posterior/sigma_to_rms`, `posterior/clipped_share`, `optimizer/skipped_steps`, and
    `update/*`, the movement of the weights since its last line (docs/metrics.md).
    """

    optimizer: Any
    """IVON, wrapped by accelerate once training has begun; None before, unless it was passed."""

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *rest: Any,
        ivon: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._settings = dict(ivon or {})
        self._draw: Draw | None = None
        """The draw of the optimizer step in progress."""
        self._movement: Movement | None = None
        _check_arguments(args or TrainingArguments())  # before Trainer builds anything on them
        super().__init__(model, args, *rest, **settings)
        self._check_optimizer()
        self.add_callback(PushPosterior)

    @property
    def ivon(self) -> IVON:
        """The optimizer, without accelerate's wrapping."""
        return getattr(self.optimizer, "optimizer", self.optimizer)  # type: ignore[no-any-return]

    def create_optimizer(self, model: Any = None) -> Any:
        """IVON over all parameters that are trained."""
        if self.optimizer is None:
            named = (self.model if model is None else model).named_parameters()
            settings = {"seed": self.args.seed, "clip_radius": IVONConfig().clip_radius, **self._settings}
            trained = [(name, p) for name, p in named if p.requires_grad]
            self.optimizer = IVON(trained, lr=self.args.learning_rate, **settings)
            self.optimizer.register_step_pre_hook(self._observe)
        return self.optimizer

    def train(self, *args: Any, **settings: Any) -> Any:
        """Train as Trainer does; `load_best_model_at_end` loads the best checkpoint's posterior with its weights."""
        output = super().train(*args, **settings)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            Posterior.from_pretrained(self.state.best_model_checkpoint).load_into(self.ivon)
            with torch.no_grad():
                for p, state in self.ivon.state.items():
                    if "mean" in state:
                        state["mean"].copy_(p)
        return output

    def _inner_training_loop(self, *args: Any, **settings: Any) -> Any:
        # After an error, Trainer clears the gradients of the interrupted step, so its draw is forgotten too.
        self._draw = self._movement = None
        return super()._inner_training_loop(*args, **settings)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        refuse_weights_only(checkpoint)
        with passed_settings_kept(self.optimizer, self._settings):
            super()._load_optimizer_and_scheduler(checkpoint)

    def training_step(self, *args: Any, **settings: Any) -> torch.Tensor:
        """Forward and backward of a micro-batch at the weights of this optimizer step's draw."""
        if self._draw is None:
            self._draw = self.ivon.next_draw()
        self._movement = self._movement or Movement(self.ivon)
        with self.ivon.perturbed(self._draw):
            return super().training_step(*args, **settings)  # type: ignore[no-any-return]

    def _observe(self, *_: Any) -> None:
        """Observe the draw before a step, once gradients are summed over processes and Trainer has taken their norm."""
        if self._draw is not None:
            self.ivon.observe(self._draw)
            self._draw = None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as Trainer does, with `posterior.safetensors` next to the model once there is an optimizer."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save and self.optimizer is not None:
            Posterior.of(self.ivon).save(Path(output_dir or self.args.output_dir))

    def log(self, logs: dict[str, float], *args: Any, **settings: Any) -> None:
        """Log as Trainer does, with IVON's metrics next to every training loss."""
        if "loss" in logs and self.optimizer is not None:
            metrics = {**self.ivon.step_metrics(), **posterior_metrics(self.ivon)}
            logs = {**logs, **{name: metrics[name] for name in LOGGED}}
            logs |= self._movement.metrics() if self._movement else {}
        super().log(logs, *args, **settings)

    def _check_optimizer(self) -> None:
        known = inspect.signature(IVON).parameters.keys() - {"params", "model", "lr"}
        for name in sorted(self._settings.keys() - known):
            fix = "threepo.IVON has the known ones; the learning rate is TrainingArguments(learning_rate=...)"
            raise UserError(f"IVONTrainer ivon: unknown setting {name!r}; {fix}")
        if self.optimizer is None:
            return
        if not isinstance(self.ivon, IVON) or not all("param_names" in group for group in self.ivon.param_groups):
            fix = "pass one, or leave it out and pass its settings as ivon={}"
            raise UserError(f"IVONTrainer optimizers: is no threepo.IVON of model.named_parameters(); {fix}")
        if self._settings:
            raise UserError("IVONTrainer ivon: has no effect with optimizers=(...); pass the settings to that IVON")
        self.ivon.register_step_pre_hook(self._observe)


def refuse_weights_only(checkpoint: str | None) -> None:
    """Raise `UserError` for a checkpoint without the optimizer, whose posterior the Trainer would begin anew."""
    if checkpoint and not all(any(Path(checkpoint).glob(name)) for name in ("optimizer*", "scheduler.pt")):
        fix = "copy the whole checkpoint, saved without save_only_model, or train with it as the model"
        raise UserError(f"resume_from_checkpoint = {str(checkpoint)!r}: has no state of the optimizer; {fix}")


def check_optimizer_arguments(args: Any, kind: str, starts: tuple[str, ...], also: str = "") -> None:
    """Raise `UserError` for settings of the Trainer's own optimizers, which would be ignored; `also` is accepted."""
    for field in fields(TrainingArguments):
        value = getattr(args, field.name)
        if field.name.startswith(starts) and value not in (field.default, also):
            shown = repr(getattr(value, "value", value))
            raise UserError(f"{type(args).__name__} {field.name} = {shown}: threepo's {kind} ignores it; leave it out")


def _check_arguments(args: TrainingArguments) -> None:
    check_optimizer_arguments(args, "IVON", ("optim", "adam_"))
    reasons = {
        "max_grad_norm": "IVON learns its Hessian from the gradients, so they must not be clipped; set it to 0.0 "
        "(ivon={'clip_radius': ...} limits steps)",
        "weight_decay": "in IVON it is the precision of the prior; leave it at 0, and set ivon={'weight_decay': ...}",
        "fsdp": "IVONTrainer does not shard; use data parallelism, or threepo.IVON with FSDP2 in your own loop",
        "deepspeed": "IVONTrainer does not shard; use data parallelism, or threepo.IVON in your own loop",
    }
    for name, reason in reasons.items():
        if value := getattr(args, name, None):
            raise UserError(f"TrainingArguments {name} = {value!r}: {reason}")
    if args.mixed_precision == "fp16":  # set by the environment, too
        fix = "float16 scales gradients, which IVON would mistake for curvature; set bf16=True, or neither"
        raise UserError(f"TrainingArguments fp16 = True: {fix}")
