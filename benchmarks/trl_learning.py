"""The demonstration inside TRL: methods from one warm start, by act (docs/trl.md).

    threepo sft demo/warm_start run.folder=runs/demo/warm_start
    python benchmarks/trl_learning.py --seeds 0 1 2 --methods grpo c3po c3po_replay
    threepo sft demo/choices/warm_start run.folder=runs/demo/choices/warm_start
    python benchmarks/trl_learning.py --act 2 --methods grpo auto

Prints pass@1 before and after on 256 held-out problems, 4 completions each. Needs `pip install '.[trl]'` in a clone.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from datasets import Dataset
from trl import GRPOConfig

import threepo
from threepo.config import DataConfig, Method, ModelConfig
from threepo.data.source import ProblemSet, open_heldout, open_training
from threepo.models.policy import load_policy
from threepo.plugins.trl import ThreepoTrainer
from threepo.run_folder import model_folder

PROMPTS = ROLLOUTS = 16
IVON: dict[str, Any] = {"learning_rate": 60.0, "max_grad_norm": 0.0}
METHODS: dict[str, tuple[Method | str, dict[str, Any]]] = {
    "grpo": (threepo.GRPO, {"max_grad_norm": 1.0}),
    "auto": ("auto", {"max_grad_norm": 1.0}),
    "c3po": (threepo.C3PO, IVON),
    "c3po_replay": (threepo.C3PO_REPLAY, IVON),
}


class Act(NamedTuple):
    """A task of the demonstration, with the settings of its recipes."""

    warm_start: str
    data: DataConfig
    new_tokens: int
    steps: int
    rate: float
    """AdamW's learning rate."""


ACTS = {
    1: Act("runs/demo/warm_start", DataConfig(train="sorting", levels=(4, 5, 6, 7, 8), seed=1), 64, 60, 1e-4),
    2: Act("runs/demo/choices/warm_start", DataConfig(train="choices", levels=(10,), seed=1), 14, 40, 3e-4),
}


def rows(source: ProblemSet, count: int) -> Dataset:
    """Problems of threepo as a data set of TRL."""
    assert not isinstance(source.verifier, str)
    problems = source.problems.first(count)
    return Dataset.from_list([{"prompt": str(problem.prompt), "answer": problem.answer} for problem in problems])


def run(act: Act, name: str, seed: int, model: Path, folder: str, engine: str | None) -> tuple[float, float, float]:
    """pass@1 before and after, and seconds of training."""
    method, settings = METHODS[name]
    policy = load_policy(ModelConfig(path=str(model)))
    data = replace(act.data, seed=act.data.seed + seed)
    training, heldout = open_training(data), open_heldout(data)

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        problems = (threepo.Problem(prompt, prompt, right) for prompt, right in zip(prompts, answer, strict=True))
        verdicts = [training.verifier(*pair) for pair in zip(problems, completions, strict=True)]  # type: ignore[operator, misc]
        return [float(verdict.correct) for verdict in verdicts]

    arguments = GRPOConfig(
        folder,
        per_device_train_batch_size=PROMPTS * ROLLOUTS // 8,
        gradient_accumulation_steps=8,  # auto has eight draws, and a micro-batch one
        per_device_eval_batch_size=256,
        num_generations=ROLLOUTS,
        num_generations_eval=4,
        max_completion_length=act.new_tokens,
        max_steps=act.steps,
        seed=seed,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **{"learning_rate": act.rate} | settings,
    )
    more: dict[str, Any] = {"ivon": {"ess": 1e9}} if "learning_rate" in settings else {}
    if engine and name != "grpo":
        more["engine"] = {"kind": engine}
    trainer = ThreepoTrainer(
        policy.model,
        reward,
        arguments,
        train_dataset=rows(training, act.steps * PROMPTS),
        eval_dataset=rows(heldout, 256),
        processing_class=policy.tokenizer,
        method=method,
        **more,
    )
    before = trainer.evaluate()["eval_reward"]
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    return before, trainer.evaluate()["eval_reward"], seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--act", type=int, default=1, choices=ACTS)
    parser.add_argument("--model", type=Path, help="the warm start, if it is not the one that the demonstration makes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--engine", choices=("local", "vllm"), help="what generates; left out: TRL's generate")
    options = parser.parse_args()
    act = ACTS[options.act]
    start = model_folder(options.model or Path(act.warm_start))
    for name in options.methods:
        with tempfile.TemporaryDirectory() as folder:
            found = [run(act, name, seed, start, folder, options.engine) for seed in options.seeds]
        before, after, seconds = (fmean(column) for column in zip(*found, strict=True))
        each = ", ".join(f"{100 * row[1]:.1f}" for row in found)
        print(f"{name}: pass@1 {100 * before:.1f} % -> {100 * after:.1f} % ({each}), {seconds:.0f} s", flush=True)
