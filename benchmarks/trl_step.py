"""TRL's part of `step.py`: a GRPOTrainer on the same model, prompts and reward. Needs trl and datasets.

Settings for a fair comparison:

- float32 weights, with bf16 autocast for `--dtype bfloat16` (threepo has float32 masters too);
- no KL term and no reference model (TRL's default);
- one iteration, so that old log-probs come from the forward pass of the loss, as in threepo;
- all completions of the step generated in one batch with transformers' key-value cache;
- `--trl-accumulation` micro-batches per optimizer step, by default the fastest of 2, 8 and 32 (other caches and
  continuous batching were not tried);
- no gradient checkpointing (TRL's default is on), dropout, evaluation, saving or reports.

The time of a step is from its first micro-batch to the optimizer's step, without logging.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from step import CLOCKS, Timing


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Times the trainer's steps, and runs the steps of the other contenders in between."""

    def __init__(self, now: Callable[[], float], others: Callable[[], None]) -> None:
        self.now = now
        self.timings: list[Timing] = []
        self.rollout = 0.0
        self.tokens = 0
        self._others = others

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Called before the first micro-batch is prepared and its completions are generated."""
        self.rollout = 0.0
        self._begin = self.now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called after the optimizer's step."""
        total = self.now() - self._begin
        self.timings.append(Timing(total, self.rollout, total - self.rollout, self.tokens))
        self._others()


def train(
    folder: Path,
    reward: Callable[..., list[float]],
    options: argparse.Namespace,
    steps: int,
    others: Callable[[], None],
) -> list[Timing]:
    """Train for `steps` steps, and call `others` after each."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    prompts = Dataset.from_json(str(folder / "prompts.jsonl"))
    rows = options.prompts * options.rollouts
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        per_device_train_batch_size=rows // options.trl_accumulation,
        gradient_accumulation_steps=options.trl_accumulation,
        num_generations=options.rollouts,
        max_completion_length=options.new_tokens,
        learning_rate=1e-30,
        beta=0.0,
        num_iterations=1,
        temperature=1.0,
        bf16=options.dtype == "bfloat16",
        gradient_checkpointing=False,
        disable_dropout=True,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    watch = Stopwatch(CLOCKS[options.clock], others)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[watch],
    )
    generate = trainer._generate_and_score_completions

    def timed(inputs: Any) -> Any:
        begin = watch.now()
        made = generate(inputs)
        watch.rollout += watch.now() - begin
        watch.tokens = int(made["completion_mask"].sum())
        return made

    trainer._generate_and_score_completions = timed
    trainer.train()
    return watch.timings
