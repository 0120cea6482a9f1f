"""What the commands do, as functions: each takes a checked configuration and leaves a finished folder."""

import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers.utils import logging

from threepo.analysis.report import read_run
from threepo.config import ModelConfig, SFTConfig, TrainConfig
from threepo.data.finite import FiniteProblems
from threepo.errors import UserError
from threepo.evaluation.run import evaluate
from threepo.files import atomic_folder, read_json, write_json
from threepo.models.policy import load_policy
from threepo.posterior.gaussian import FILE_NAME, Posterior
from threepo.run_folder import SUMMARY, RunFolder, model_folder, read_metrics
from threepo.training import rlvr, sft

__all__ = ["closing_words", "evaluate", "fine_tune", "sample", "train"]

logging.disable_progress_bar()  # one bar is enough, and it is ours


def train(config: TrainConfig, resumed: RunFolder | None = None) -> Path:
    """Train with reinforcement learning to the end, and write the run's summary. Returns the run folder."""
    began = time.monotonic()
    run = rlvr.assemble(config, resumed)
    with run.folder as folder, contextlib.closing(run.engine):
        began -= _seconds_before(folder.path, run.state.step)
        rlvr.train(run)
        counts = {"data": run.source.counts()} if isinstance(run.source, FiniteProblems) else {}
        return _finish(folder, began, counts)


def fine_tune(config: SFTConfig, resumed: RunFolder | None = None) -> Path:
    """Fine-tune to the end, and write the run's summary. Returns the run folder."""
    began = time.monotonic()
    run = sft.assemble(config, resumed)
    with run.folder as folder:
        began -= _seconds_before(folder.path, run.state.step)
        sft.fine_tune(run)
        return _finish(folder, began, {})


def _finish(folder: RunFolder, began: float, counts: dict[str, Any]) -> Path:
    summary = read_run(folder.path).summary()
    write_json(folder.path / SUMMARY, {"seconds": time.monotonic() - began, **summary, **counts})
    return folder.path


def _seconds_before(run: Path, step: int) -> float:
    """Seconds that earlier processes spent on the steps before `step`."""
    parts = ("time/step", "time/eval", "time/log")
    return sum(row.get(part) or 0.0 for row in read_metrics(run) if row["step"] < step for part in parts)


def closing_words(run: Path) -> str:
    """The last lines of a finished run: its result, its folder, and the command that comes next."""
    summary, what, command = read_json(run / SUMMARY), "reward", f"threepo report {run}"
    if "loss_first" in summary:
        prior = f" optimizer.load_hessian={run}" if (model_folder(run) / FILE_NAME).is_file() else ""
        what, command = "loss", f"threepo train RECIPE model.path={run}{prior}"
    values = (summary[f"{what}_{at}"] for at in ("first", "last"))
    change = " -> ".join("-" if value is None else f"{value:.3g}" for value in values)
    return f"finished: {run}: {summary['steps']} steps in {summary['seconds']:.0f} s, {what} {change}\nnext: {command}"


def sample(checkpoint: Path, output: Path, draws: range) -> list[Path]:
    """Write models drawn from a checkpoint's posterior, a Hugging Face directory each. Returns their folders."""
    source = model_folder(checkpoint)
    posterior = Posterior.from_pretrained(source)
    paths = []
    for index in draws:
        path = output / f"draw-{index}"
        if path.exists():
            raise UserError(f"{path}: exists already; choose another --output or --first")
        policy = load_policy(ModelConfig(path=str(source), device="cpu"))
        draw = posterior.address(index)
        posterior.perturb_(policy.model.named_parameters(), draw)
        with atomic_folder(path) as folder:
            policy.save(folder)
            write_json(folder / "draw.json", asdict(draw) | {"checkpoint": str(source)})
        paths.append(path)
    return paths
