"""The commands as functions: each takes a checked configuration and leaves a finished folder."""

import contextlib
import shlex
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from transformers.utils import logging

from threepo.config import LoRAConfig, ModelConfig, SFTConfig, TrainConfig
from threepo.config.records import shown, to_dict
from threepo.data.finite import FiniteProblems
from threepo.errors import ThreepoWarning, UserError
from threepo.evaluation.run import evaluate
from threepo.evaluation.tables import number
from threepo.files import atomic_folder, read_json, write_json
from threepo.inputs import SavedInputs
from threepo.lab.report import read_run, shown_score
from threepo.models.adapters import merge_
from threepo.models.policy import load_policy
from threepo.plugins.trackers import Trackers
from threepo.posterior.gaussian import Posterior
from threepo.ranks.world import ALONE, World, with_threads
from threepo.run_folder import (
    ADAPTERS,
    CONFIG,
    POSTERIOR_FILE,
    SUMMARY,
    FollowedFolder,
    RunFolder,
    model_folder,
    read_metrics,
    refuse_taken,
)
from threepo.training import rlvr, sft
from threepo.training.run import Follower
from threepo.types import Arm

Config = TypeVar("Config", TrainConfig, SFTConfig)

__all__ = ["closing_words", "evaluate", "merge", "sample", "train"]

logging.disable_progress_bar()  # one bar is enough, and it is ours


def train(
    config: Config,
    resumed: Path | None = None,
    world: World = ALONE,
    callbacks: Sequence[Follower] = (),
    inputs: SavedInputs | None = None,
) -> Path:
    """Train to the end, in RLVR or fine-tuning as `config` is, and write the summary. Returns the run folder.

    `resumed`: the folder of the run to continue; `config` is then what `load_resumed` has read from it. `inputs`:
    objects to write into a new folder first, from which the run reads them. All ranks of `world` must call this and
    `evaluate` together.
    """
    began = time.monotonic()
    warnings.filterwarnings("default", category=ThreepoWarning, append=True)  # Python forgets what it has shown
    if inputs and not resumed:  # says how the run that is there differs
        world.on_first(lambda: refuse_taken(Path(config.run.folder), config))
    with contextlib.ExitStack() as opened:  # an error's traceback would keep open what is not closed
        opened.enter_context(with_threads(config.run.threads))
        folder = None
        if resumed:
            folder = world.only_first(lambda: RunFolder(resumed), others=FollowedFolder(resumed))
            opened.callback(folder.close)
            world.on_first(lambda: folder.refuse_fewer(config.run.steps))
        if inputs:
            opened.enter_context(inputs.written(world))
        if isinstance(config, SFTConfig):
            fine_tuning = sft.assemble(config, folder, world)
            with fine_tuning.folder:
                return _finish(fine_tuning, sft.fine_tune, began, resumed is not None, callbacks)
        run = rlvr.assemble(config, folder, world)
        with run.folder, contextlib.closing(run.engine):  # who waits for the folder finds the engine's devices free
            return _finish(run, rlvr.train, began, resumed is not None, callbacks)


def _finish(run: Any, loop: Callable[[Any], None], began: float, resumed: bool, callbacks: Sequence[Follower]) -> Path:
    path = Path(run.folder.path)
    if resumed:  # nothing changes before all that can be refused has been
        run.world.on_first(lambda: run.folder.extend(run.config.run.steps, run.state.step))
    for row in read_metrics(path):
        if row["step"] < run.state.step:  # made by earlier processes
            began -= sum(row.get(part) or 0.0 for part in ("time/step", "time/eval", "time/log"))
    trackers = run.world.only_first(
        lambda: Trackers(run.config.run.trackers, path, to_dict(run.config), run.state.step, resumed), others=None
    )
    if trackers is None:
        loop(run)
        return path
    run.followers, run.has_callbacks = (trackers.log, *callbacks), bool(callbacks)
    summary = None
    try:
        loop(run)
        source = getattr(run, "source", None)
        counts = {"data": source.counts()} if isinstance(source, FiniteProblems) else {}
        summary = {"seconds": time.monotonic() - began, **read_run(path).summary(), **counts}
        write_json(run.folder.file(SUMMARY), summary)
    finally:
        trackers.finish(summary)
    return path


def closing_words(run: Path) -> str:
    """The last lines of a finished run: its result, its folder, and the command that comes next."""
    summary, what, command = read_json(run / SUMMARY), "reward", f"threepo report {run}"
    if "loss_first" in summary:
        prior = f" optimizer.load_hessian={run}" if (model_folder(run) / POSTERIOR_FILE).is_file() else ""
        adapters = model_folder(run) / ADAPTERS
        trained, usual = read_json(run / CONFIG)["model"]["lora"], to_dict(LoRAConfig())
        own = [f"model.lora.{key}={shown(value)}" for key, value in trained.items() if value != usual[key]]
        lora = "".join(f" {shlex.quote(setting)}" for setting in own if adapters.is_file())
        what, command = "loss", f"threepo train RECIPE model.path={run}{lora}{prior}"
    change = " -> ".join(number(summary[f"{what}_{at}"]) for at in ("first", "last"))
    report = read_run(run)
    scores = [shown_score(score) for score in report.ends if score]
    seconds = f"{summary['seconds']:.0f} s"
    lines = [f"finished: {run}: {summary['steps']} steps in {seconds}, {what} {change} (first and last step)"]
    if scores:
        heat = report.config["eval"]["temperature"]
        lines.append(f"held-out pass@1: {' -> '.join(scores)} (standard errors over problems; temperature {heat:g})")
    return "\n".join([*lines, f"next: {command}"])


def sample(checkpoint: Path, output: Path, draws: range, arm: Arm | None = None) -> list[Path]:
    """Write models drawn from a checkpoint's posterior, or with an arm's noise, a Hugging Face directory each.

    Returns their folders.
    """
    source = model_folder(checkpoint)
    posterior = Posterior.from_pretrained(source)
    paths = []
    for index in draws:
        path = output / f"draw-{index}"
        if path.exists():
            raise UserError(f"{path}: exists already; choose another --output or --first")
        policy = load_policy(ModelConfig(path=str(source), device="cpu"))
        draw = posterior.address(index, arm)
        posterior.perturb_(policy.model.named_parameters(), draw)
        with atomic_folder(path) as folder:
            policy.save(folder)
            write_json(folder / "draw.json", asdict(draw) | {"checkpoint": str(source)})
        paths.append(path)
    return paths


def merge(model: Path, output: Path) -> None:
    """Write a model with adapters as an ordinary one, a Hugging Face directory, for tools that know none."""
    policy = load_policy(ModelConfig(path=str(model), device="cpu"))
    if not policy.has_adapters:
        raise UserError(f"{model}: has no adapters, so there is nothing to merge")
    if output.exists():
        raise UserError(f"--output {output}: exists already; choose another one")
    merge_(policy.model)
    with atomic_folder(output) as folder:
        policy.save(folder)
