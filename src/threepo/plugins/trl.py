"""GRPO, B3PO, M3PO, C3PO and C3PO-replay inside TRL 1.16: `ThreepoTrainer` is a `trl.GRPOTrainer` (docs/trl.md).

    trainer = ThreepoTrainer(model, reward_funcs, GRPOConfig(..., learning_rate=1.0, max_grad_norm=0.0),
                             method=threepo.C3PO, ivon={"ess": 1e9}, train_dataset=..., processing_class=...)

TRL generates, grades, normalises and logs. What differs is the weights: the rows of a group are divided among the draws
of the step, and the gradient is taken at the draws that the method names. In between the model holds the mean, so
evaluations and checkpoints are of the mean. Draws are addressed by (seed, step, index), so all processes make the same
ones. With `engine={"kind": "vllm"}` an engine of threepo's generates instead, with the weights of all draws at once.
"""

import inspect
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trl import GRPOConfig, GRPOTrainer

from threepo.config import IVONConfig, Method, ModelConfig
from threepo.config.arms import ARM_SHARE, MEAN
from threepo.errors import UserError
from threepo.methods.arms import Bandit, Outcome, arm_name
from threepo.methods.method import gradient_draws, rollout_draws
from threepo.models.logprobs import Scorer
from threepo.models.policy import Policy, without_weights
from threepo.plugins.trainers import (
    LOGGED,
    check_release,
    load_tally,
    passed_settings_kept,
    refuse_other_noise,
    save_noise,
    save_tally,
)
from threepo.plugins.transformers import PushPosterior, refuse_weights_only
from threepo.plugins.trl_batches import Batch, Counts, correct_advantages, split_by_draw
from threepo.plugins.trl_settings import BY_ROWS, BY_TOKENS, check_made, read_settings, split_by_decay
from threepo.posterior.gaussian import Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.metrics import Movement, posterior_metrics
from threepo.ranks.dealing import build_shared_engine, refuse_engine
from threepo.ranks.world import ALONE, World
from threepo.rollout.engines import RolloutEngine
from threepo.training.optimizers import begin_ivon, build_optimizer
from threepo.types import Draw, Problem, Request


class ThreepoTrainer(GRPOTrainer):  # type: ignore[misc]
    """A `trl.GRPOTrainer` that explores in weight space.

    Args:
        model: as in GRPOTrainer, like all arguments that are not named here.
        args: `num_generations` counts the completions of a prompt over all draws; `learning_rate` is IVON's,
            which schedulers change; `seed` also seeds the draws.
        method: a row of the lattice, or the name of a preset, which sets `noise` and `arms` too: "auto". A method that
            learns a posterior takes `ivon`; one with draws around AdamW takes `noise`. `threepo.GRPO` with neither is
            TRL's own trainer.
        ivon: settings of IVON, as in [optimizer] of a recipe.
        noise: [noise] of a recipe, such as {"unit": "rms", "size": 0.05}.
        arms: [arms] of a recipe, such as {"choice": "thompson"}: the run chooses place and size of each draw's noise.
        engine: [engine] of a recipe, such as {"kind": "vllm"}; it generates in training and, once training has begun,
            in evaluations. None: TRL's `generate`, one draw after another.

    The log has threepo's main metrics (docs/metrics.md), of which `update/*` is the movement of the weights since its
    last line; completions have the columns `draw_index` and, with arms, `draw_arm`.
    """

    optimizer: Any
    """The optimizer, wrapped by accelerate once training has begun; None before."""
    _buffered_inputs: Any
    """GRPOTrainer's micro-batches of a step."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *rest: Any,
        method: Method | str,
        ivon: Mapping[str, Any] | None = None,
        noise: Mapping[str, Any] | None = None,
        arms: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        check_release("trl", "1.16")
        args = args or GRPOConfig("trainer_output")
        others = inspect.signature(GRPOTrainer).bind_partial(model, reward_funcs, args, *rest, **settings).arguments
        self._own = read_settings(args, method, ivon or {}, noise or {}, arms or {}, engine, others)
        self.method = self._own.method
        self._kept = list(ivon or ["max_grad_norm"])  # settings that a checkpoint's do not replace
        self._checkpoint: Path | None = None  # from which training is resumed
        self._holds_mean = False  # whether the engine has the weights that are being evaluated
        self._movement: Movement | None = None  # since the last line of the log
        self._bandit = Bandit(
            self._own.arms, self.method, lambda: Posterior.of(self.policy_optimizer, gather=False).noisy_names
        )
        self._draws: list[Draw | None] = []  # those that have written the rows of this step
        self._draw_tokens: list[int] = []  # what each has written of what the loss counts, where arms are chosen
        if len(gradient_draws(self.method, 0, 0)) > 1:  # gradients are taken out at the end of each draw
            passed = args.accelerator_config.gradient_accumulation_kwargs or {}
            args.accelerator_config.gradient_accumulation_kwargs = {**passed, "sync_each_batch": True}
        super().__init__(model, reward_funcs, args, *rest, **settings)
        if self._own.optimizer:
            check_made(self, self._own)
            self.add_callback(PushPosterior)
        if self._own.engine:
            self._architecture = without_weights(self.model).eval()  # before accelerate shards the weights

    @property
    def policy_optimizer(self) -> Any:
        """The optimizer, without accelerate's wrapping: an IVON, or an AdamW of threepo's with noise around it."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer of the method, over all parameters that are trained."""
        if self._own.optimizer is None or self.optimizer is not None:
            return super().create_optimizer(model)
        model = self.model if model is None else model
        # accelerate shards the parameters and exchanges them in an optimizer that it expects to have no state.
        to_shard = [p for p in model.parameters() if p.requires_grad and self.is_fsdp_enabled]
        for p in to_shard:
            p.requires_grad_(False)
        self.optimizer = build_optimizer(self._own.optimizer, self._own.noise, model, self.args.seed, self._checkpoint)
        for p in to_shard:
            p.requires_grad_(True)
        if not isinstance(self._own.optimizer, IVONConfig):
            split_by_decay(self.optimizer, self.get_decay_parameter_names(model))
        elif self._own.optimizer.load_hessian:
            begin_ivon(self._own.optimizer, self.optimizer, ModelConfig(path=model.name_or_path or "model"))
        return self.optimizer

    def _inner_training_loop(self, *args: Any, **settings: Any) -> Any:
        # An error may have cut a step short: neither its micro-batches nor its gradients belong to the next one.
        self._step, self._buffered_inputs = 0, None
        if self._own.optimizer and self.optimizer is not None and self.policy_optimizer.gradients():
            self.policy_optimizer.discard()
        return super()._inner_training_loop(*args, **settings)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._checkpoint = Path(resume_from_checkpoint)
        if self._own.optimizer:
            refuse_weights_only(resume_from_checkpoint)
            refuse_other_noise(self._checkpoint, self._own.noise, self._own.arms)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint and isinstance(self.policy_optimizer, IVON):
            self.policy_optimizer.trainable()  # makes the state, where a sharded one is loaded into it
        self._movement = None  # also when a trainer trains again
        with passed_settings_kept(self.optimizer, self._kept):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint and self._own.arms.active:
            self._bandit.begin(load_tally(Path(checkpoint)))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._own.optimizer and self.args.should_save:
            save_noise(Path(output_dir), self._own.noise, self._own.arms)
        if self._own.arms.active and self.args.should_save:
            save_tally(self._bandit.tally, Path(output_dir))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of a micro-batch at its gradient's draw, which is observed after its last one."""
        if self._own.optimizer is None:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        model.train()
        self._movement = self._movement or Movement(self.policy_optimizer)
        began = time.perf_counter()
        inputs = self._prepare_inputs(inputs)  # generates, so before the draw of the gradient is in the model
        self._current_train_step_time += time.perf_counter() - began  # TRL counts generation as part of a step
        draws = self._gradient_draws()
        share = self.args.gradient_accumulation_steps // len(draws)
        index = self._step % self.args.gradient_accumulation_steps // share
        draw = draws[index]
        with self.policy_optimizer.at(draw):
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self._step % share == 0:
            # TRL has divided by the count of all draws' rows, and the optimizer is about to average over draws.
            settings = {"divisor": 1 / len(draws)} if len(draws) > 1 else {}
            if self._draw_tokens:
                settings["weight"] = self._draw_tokens[index]
            self.policy_optimizer.observe(draw, **settings)
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if "advantages" in generation_batch:  # `training_step` has prepared it
            return generation_batch
        new = self.model.training and self._step % self.args.steps_per_generation == 0
        ready = super()._prepare_inputs(generation_batch)
        if new and len(gradient_draws(self.method, 0, 0)) > 1:
            self._buffered_inputs = self._by_draw(self._buffered_inputs)
            ready = self._buffered_inputs[0]
        return ready

    def _by_draw(self, batches: list[Batch]) -> list[Batch]:
        """The rows of all micro-batches, in as many micro-batches of one draw each."""
        by_draw = split_by_draw(batches)
        if self._own.arms.active or self.method.normalize == "part":
            written = [torch.bincount(b["draw"], b["completion_mask"].sum(dim=1), self.method.draws) for b in by_draw]
            tokens = self.accelerator.reduce(torch.stack(written).sum(dim=0).long(), reduction="sum")
            if self.method.normalize == "part":
                for batch in by_draw:
                    batch["num_items_in_batch"] = tokens[batch["draw"][0]] * self.method.draws
            elif self.args.loss_type in BY_TOKENS:
                self._draw_tokens = tokens.tolist()
        return by_draw

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if self._own.optimizer is None or not self.model.training:
            return super()._generate_and_score_completions(inputs)
        step, seed = self.state.global_step, self.args.seed
        if not step:  # also when a trainer trains again from the start
            self._bandit.begin()
        self._draws = rollout_draws(self.method, seed, step, self._bandit.choose(seed, step))
        self.num_generations = self.method.group_size  # TRL compares the rewards of this many consecutive rows
        try:
            batch: Batch = super()._generate_and_score_completions(inputs)
        finally:
            self.num_generations = self.method.rollouts_per_prompt
        batch["draw"] = self._draw_of_rows(len(inputs)).to(batch["prompt_ids"].device)
        taken = self._gradient_draws()
        if self.method.correction.kind != "none" and taken != self._draws:
            self._correct(batch, taken[0])
        return batch

    def _gradient_draws(self) -> list[Draw | None]:
        """The draws at which the gradients of this step are taken."""
        if self.method.gradient_at == "generator":
            return self._draws
        return gradient_draws(self.method, self.args.seed, self.state.global_step)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        """Rewards [rows of all processes, functions], from which the arms' tally is kept, alike on every process."""
        rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._own.arms.active and self.model.training:
            totals = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
            judged = (totals.isfinite() & ~rewards.isnan().all(dim=1)).tolist()
            names = [arm_name(self._draws[index]) for index in self._draw_of_rows(len(totals)).tolist()]
            rows, group = list(map(Outcome, names, totals.tolist(), judged)), self.method.rollouts_per_prompt
            groups = [rows[first : first + group] for first in range(0, len(rows), group)]
            none = {f"{ARM_SHARE}{arm}": 0.0 for arm in (MEAN, *self._bandit.arms)}  # TRL averages what was appended
            for name, value in (none | self._bandit.count(groups)).items():
                self._metrics["train"][name].append(value)
        return rewards

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int, **more: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        training = self.model.training
        draws: list[Draw | None] = self._draws if training else [None]
        draw_of = self._draw_of_rows(len(prompt_ids)).tolist() if training else [0] * len(prompt_ids)
        if self.method.draws:  # in evaluations too: TRL's log would repeat the draws of the training rows before
            self._log_completion_extra("draw_index", draw_of if training else [None] * len(prompt_ids))
        if self._own.arms.active and self._draws:  # from the first rollouts on
            names = [arm_name(draws[index]) if training else None for index in draw_of]
            self._log_completion_extra("draw_arm", names)
        if self._own.optimizer is None or not (training or (self._own.engine and self.optimizer)):
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, **more)  # type: ignore[no-any-return]
        if images:
            raise UserError("train_dataset: has images, which draws do not read here; leave them out")
        if self._own.engine:
            return self._generate_by_engine(prompt_ids, draws, draw_of)
        completions: list[list[int]] = [[]] * len(prompt_ids)
        for index, draw in enumerate(draws):
            rows = [row for row, of_row in enumerate(draw_of) if of_row == index]
            # Without images these have a value for each token of a prompt.
            fields = {name: [values[i] for i in rows] for name, values in multimodal_fields.items()}
            with self.policy_optimizer.at(draw), self._evaluation_mode():
                ids, _ = super()._generate_single_turn([prompt_ids[i] for i in rows], None, fields, num_generations)
            for row, completion in zip(rows, ids, strict=True):
                completions[row] = completion
        return completions, None

    def _generate_by_engine(
        self, prompt_ids: list[list[int]], draws: list[Draw | None], draw_of: list[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Completions of this process's rows, and each token's log-prob under its draw; all draws at once."""
        # The engines of all ranks share the rows.
        asked, own = self._world.concatenate(list(zip(prompt_ids, draw_of, strict=True)))
        requests = [
            Request(Problem(str(ids), "", location="a prompt"), tuple(ids), draws[draw], row)
            for row, (ids, draw) in enumerate(asked)
        ]
        try:
            if self.model.training or not self._holds_mean:
                self._engine.load(self.policy_optimizer, draws, self.state.global_step)
                self._holds_mean = not self.model.training
            mine = self._engine.generate(requests, self._own.sampling, self.args.seed)[own]
        except BaseException:  # one of vLLM has closed itself; a notebook that trains on needs another
            self.__dict__.pop("_engine", None)
            raise
        return [list(made.tokens) for made in mine], [list(made.logprobs) for made in mine]

    @cached_property
    def _engine(self) -> RolloutEngine:
        """The engine, made for the first rollouts."""
        assert self._own.engine
        for buffer in self._architecture.buffers():
            buffer.data = buffer.to(self.args.device)
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        policy = Policy(Scorer(self.model, linear_head=False), tokenizer, without_weights=self._architecture)
        refuse_engine(self._own.engine, self._world)
        return build_shared_engine(self._own.engine, policy, self._world)

    @cached_property
    def _world(self) -> World:
        """The processes that accelerate has started, with a group of their own for objects."""
        state = self.accelerator
        if state.num_processes == 1:
            return ALONE
        patience = timedelta(seconds=self.args.ddp_timeout)
        return World(state.process_index, state.num_processes, dist.new_group(backend="gloo", timeout=patience))

    def evaluation_loop(self, *args: Any, **settings: Any) -> Any:
        """Evaluate as GRPOTrainer does; an engine gets the mean once for all batches."""
        self._holds_mean = False
        return super().evaluation_loop(*args, **settings)

    def _draw_of_rows(self, rows: int) -> torch.Tensor:
        """The index of the draw that writes each row, [rows]; the rows of a prompt are consecutive, draw by draw."""
        share = self.method.rollouts_per_prompt // max(self.method.draws, 1)
        return torch.arange(rows) % self.method.rollouts_per_prompt // share

    def _correct(self, batch: Batch, taken: Draw | None) -> None:
        """Multiply advantages by the correction's weights [rows, tokens], and log how much the correction keeps.

        `taken` is the draw at which the gradient will be taken.
        """
        tokens = batch["completion_mask"].bool()
        behaviour, at_gradient = (torch.zeros(tokens.shape, device=tokens.device) for _ in range(2))
        parts = [(draw, batch["draw"] == index) for index, draw in enumerate(self._draws)]
        if self._own.engine:
            behaviour = batch["sampling_per_token_logps"]  # from the engine, whose precision may differ
        else:
            for draw, rows in parts:
                with self.policy_optimizer.at(draw):
                    behaviour[rows] = self._score(batch, rows)
        with self.policy_optimizer.at(taken):
            for _, rows in parts:  # in the same batches, so that equal weights give equal numbers
                at_gradient[rows] = self._score(batch, rows)
        local = correct_advantages(batch, behaviour, at_gradient, self.method.correction)
        counts = Counts(*self.accelerator.reduce(local, reduction="sum").tolist())
        if self.method.correction.normalizer == "kept":
            batch["num_items_in_batch"] = torch.tensor(int(counts.kept_tokens), device=tokens.device)
            if not counts.kept_tokens:  # a gradient of NaN makes the optimizer skip the step, and count it
                batch["advantages"] *= math.nan
            elif self.args.loss_type in BY_ROWS:  # TRL divides by all of them
                kept = counts.kept_rows if self.args.loss_type == "luspo" else counts.kept_shares
                batch["advantages"] *= counts.rows / kept
        if counts.rows:  # mask_truncated_completions may leave none
            self._metrics["train"]["correction/kept_share"].append(counts.kept_rows / counts.rows)
            self._metrics["train"]["correction/kl"].append(counts.kl / counts.tokens)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Turn off dropout and NEFTune in the body: their noise would enter rollouts and ratios."""
        training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(training)

    @torch.no_grad()
    def _score(self, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
        """Log-probs [chosen rows, tokens] of completions at the weights that the model holds now."""
        ids = torch.cat([batch["prompt_ids"][rows], batch["completion_ids"][rows]], dim=1)
        mask = torch.cat([batch["prompt_mask"][rows], batch["completion_mask"][rows]], dim=1)
        read = (ids, mask, batch["completion_ids"].size(1), self.args.per_device_train_batch_size)
        with self._evaluation_mode():
            return self._get_per_token_logps_and_entropies(self.model, *read)[0].float()  # type: ignore[no-any-return]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as GRPOTrainer does, with `posterior.safetensors` next to the model once there is an optimizer."""
        super().save_model(output_dir, _internal_call)
        if self._own.optimizer and self.optimizer is not None:
            posterior = Posterior.of(self.policy_optimizer)  # gathers shards, so on every rank
            posterior = replace(posterior, has_arms=self._own.arms.active and not posterior.hessian)
            if self.args.should_save:
                posterior.save(Path(output_dir or self.args.output_dir))

    def log(self, logs: dict[str, float], *args: Any, **settings: Any) -> None:
        """Log as GRPOTrainer does, with the optimizer's metrics next to every training loss."""
        if "loss" in logs and self._own.optimizer is not None:
            metrics = self.policy_optimizer.step_metrics() | posterior_metrics(self.policy_optimizer)
            own = {name: metrics[name] for name in LOGGED if name in metrics}
            # The Trainer may have clipped the gradient before the optimizer, or seen none, where it was taken out.
            logs = logs | own | {"grad_norm": max(metrics["optimizer/grad_norm"], logs.get("grad_norm", 0.0))}
            logs |= self._movement.metrics() if self._movement else {}
        super().log(logs, *args, **settings)
