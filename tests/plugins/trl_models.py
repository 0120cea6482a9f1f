"""Trainers of TRL for tests: a tiny policy, a reward, and completions that do not depend on the weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from threepo.config import ModelConfig, TinyConfig
from threepo.methods.method import rollout_draws
from threepo.models.policy import Policy, load_policy
from threepo.plugins.trl import ThreepoTrainer

SHAPE = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, context=64)
WIDE = replace(SHAPE, hidden_size=64)
"""Shape for vLLM on a CPU, which has no heads of width 16."""
VLLM = {"kind": "vllm", "vllm": {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}}
PROMPTS, ROLLOUTS, MICRO_BATCHES = 2, 8, 4
"""A step has two prompts with eight completions each."""
STRAIGHT = {"ess": 1e6, "hess_init": 0.1, "clip_radius": float("inf")}
"""IVON moves along the gradient as it is, so that a difference of it is seen."""
NOISY = STRAIGHT | {"ess": 1e4}
"""So noisy that Seq-MIS masks some rows."""
PLAIN = {
    "per_device_train_batch_size": PROMPTS * ROLLOUTS // MICRO_BATCHES,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "num_generations": ROLLOUTS,
    "max_completion_length": 8,
    "learning_rate": 1.0,
    "max_grad_norm": 0.0,
    "max_steps": 2,
    "seed": 1,
    "lr_scheduler_type": "constant",
    "shuffle_dataset": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "dataloader_pin_memory": False,
    "report_to": "none",
    "disable_tqdm": True,
}


def new_policy() -> Policy:
    """The policy that every trainer starts from."""
    return load_policy(ModelConfig(path="tiny-qwen2", tiny=SHAPE), seed=7)


def reward(completions: list[str], **columns: Any) -> list[float]:
    """About half of all texts are right."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


def make(kind: type[GRPOTrainer], folder: Path, prompts: list[str] | None = None, **settings: Any) -> Any:
    """A trainer of that kind; settings are GRPOConfig's, or arguments of the trainer."""
    ours = ("method", "ivon", "noise", "arms", "engine")
    names = (*ours, "optimizers", "callbacks", "reward_funcs", "tools", "eval_dataset")
    own = {name: settings.pop(name) for name in names if name in settings}
    policy = new_policy()
    data = Dataset.from_dict({"prompt": prompts or [f"Say {i}: " for i in range(8)]})
    arguments = GRPOConfig(str(folder), **{**PLAIN, **settings})
    own = {"reward_funcs": reward, "train_dataset": data, "processing_class": policy.tokenizer, **own}
    return kind(policy.model, args=arguments, **own)


class Told:
    """Completions come from a table, by step and by a row's position among the rows of all ranks."""

    uneven = True

    def _generate_single_turn(self: Any, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        generator = torch.Generator().manual_seed(self.state.global_step)
        told = []
        for _row in range(PROMPTS * ROLLOUTS):
            length = int(torch.randint(2, 9, (1,), generator=generator)) if self.uneven else 6
            told.append(torch.randint(5, 200, (length,), generator=generator).tolist())
        first = self.accelerator.process_index * len(prompt_ids)
        return told[first : first + len(prompt_ids)], None


class ToldThreepo(Told, ThreepoTrainer):
    """Ours."""


class ToldTRL(Told, GRPOTrainer):
    """TRL's."""


class Checked(ThreepoTrainer):
    """Compares an engine's log-probs with this rank's: at every draw of a step, in evaluations at the mean."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.own: dict[bool, list[float]] = {True: [], False: []}
        """Nats, for each draw of a step: the largest difference in a row that it wrote; in training or not."""
        self.others: list[float] = []
        """Nats, for each draw and each row that another draw wrote: the largest difference."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        training = self.model.training
        tokens, told = batch["completion_mask"].bool(), batch["sampling_per_token_logps"]
        draws = rollout_draws(self.method, self.args.seed, self.state.global_step) if training else [None]
        wrote = batch["draw"] if training else torch.zeros(len(tokens), dtype=torch.long)
        for index, draw in enumerate(draws):
            with self.policy_optimizer.at(draw):
                scored = self._score(batch, torch.ones(len(tokens), dtype=torch.bool))
            gaps = ((scored - told).abs() * tokens).amax(dim=1)
            self.own[training].append(float(gaps[wrote == index].max()))
            self.others.extend(gaps[wrote != index].tolist())
        return batch
