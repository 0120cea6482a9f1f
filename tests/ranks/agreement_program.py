"""The program of test_agreement.py, run on each rank: runs in which rank 1 differs from rank 0.

agreement_program.py FOLDER SETTINGS.json: writes FOLDER/ended-RANK.json, what each run ended with, by its fault.
"""

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from threepo import api
from threepo.config import TrainConfig
from threepo.config.recipes import load
from threepo.errors import UserError
from threepo.posterior.shards import local
from threepo.ranks import agreement
from threepo.ranks.launch import join_world
from threepo.ranks.world import World
from threepo.training import completion_log, rlvr
from threepo.training.run import TrainingRun
from threepo.types import integers, numbers

STEP = 1
"""The step in which a fault happens."""
SETTINGS = {
    "lr": "optimizer.lr=2e3",
    "seed": "run.seed=5",
    "temperature": "sampling.temperature=0.5",
    "pattern": "noise.where.norm=2.0",
}
"""Settings that rank 1 has of its own."""


def after(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """A patch: what `change` makes of the result and the arguments of a function."""
    real = getattr(owner, name)

    def changed(*arguments: Any, **more: Any) -> Any:
        result = real(*arguments, **more)
        found = change(result, *arguments)
        return result if found is None else found

    return patch.object(owner, name, changed)


@torch.no_grad()
def move(tensor: torch.Tensor) -> None:
    """Change the first number that this rank holds."""
    local(tensor).view(-1)[:1].add_(0.05)


def rollouts_move_weights(_: Any, run: Any, step: int, *__: Any) -> None:
    if step == STEP:
        move(next(iter(run.policy.model.parameters())))


def rollouts_move_reference(_: Any, run: Any, step: int, *__: Any) -> None:
    if step == STEP:
        move(next(iter(run.reference.weights.values())))


def update_moves(kind: str) -> Callable[..., None]:
    """The state as a faulty kernel would leave it."""

    def change(_: Any, __: Any, optimizer: Any, batch: Any, *___: Any) -> None:
        p = optimizer.param_groups[0]["params"][0]
        if batch.step == STEP:
            move(p if kind == "weights" else optimizer.state[p][kind])

    return change


def other_rate(_: Any, run: Any, step: int, *__: Any) -> None:
    if step == STEP:
        run.optimizer.param_groups[0]["lr"] *= 1 + 1e-12


def other_row(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A batch whose first row is another one."""

    def changed(batch: Any, *_: Any) -> Any:
        draw, (row, *rows) = next(iter(batch.parts.items()))
        return replace(batch, parts={**batch.parts, draw: (change(row), *rows)})

    return changed


def other_logprob(row: Any) -> Any:
    first, *others = row.completion.logprobs
    return replace(row, completion=replace(row.completion, logprobs=numbers([first - 1e-9, *others])))


def no_space(*_: Any) -> None:
    raise OSError("No space left on device")


def other_draw(draws: Any, *_: Any) -> Any:
    return [replace(draw, seed=draw.seed + 1) for draw in draws]


def other_problems(source: Any, *_: Any) -> Any:
    problem, *rest = source.problems.problems
    return replace(source, problems=replace(source.problems, problems=(replace(problem, answer="x"), *rest)))


FAULTS: dict[str, Callable[[], Any]] = {
    "data": lambda: after(rlvr, "open_training", other_problems),
    "reward": lambda: patch("first_character.__file__", __file__),
    "credit rule": lambda: patch("first_character.__file__", __file__),
    "code": lambda: patch("threepo.ranks.agreement.code_digest", lambda: "other"),
    "version": lambda: after(agreement, "version", lambda found, name: "0.1" if name == "numpy" else found),
    "weights of a shard": lambda: after(rlvr, "begin_rollouts", rollouts_move_weights),
    "reference of a replica": lambda: after(rlvr, "begin_rollouts", rollouts_move_reference),
    "rate": lambda: after(TrainingRun, "set_rates", other_rate),
    "advantage": lambda: after(
        rlvr.lattice, "training_batch", other_row(lambda row: replace(row, advantage=row.advantage + 1e-9))
    ),
    "token": lambda: after(
        rlvr.lattice, "training_batch", other_row(lambda row: replace(row, tokens=integers([*row.tokens[:-1], 7])))
    ),
    "log-prob": lambda: after(rlvr.lattice, "training_batch", other_row(other_logprob)),
    "draw": lambda: after(rlvr.lattice, "gradient_draws", other_draw),
    "weights of a replica": lambda: after(rlvr, "update_policy", update_moves("weights")),
    "Hessian of a replica": lambda: after(rlvr, "update_policy", update_moves("hessian")),
    "the last update": lambda: after(rlvr, "update_policy", update_moves("hessian")),
}
ON_BOTH = {
    "reference of a replica": ["objective.reference_kl=0.1", "objective.reference_reset_every=2"],
    "data": ["data.train=problems.jsonl", "data.levels=[]"],
    "the last update": [f"run.steps={STEP + 1}"],
    "credit rule": ["reward.function=task", "method.advantage.rule=first_character:rule"],
}
"""Settings of both ranks for a fault; with the word replica, each has a whole copy."""


def outcome(fault: str, folder: Path, common: list[str], world: World) -> dict[str, Any]:
    """The end of a run with this fault on rank 1."""
    settings = [*common, f"run.folder={folder / fault.replace(' ', '-')}", *ON_BOTH.get(fault, [])]
    if fault in SETTINGS and world.rank == 1:
        settings.append(SETTINGS[fault])
    if "replica" in fault or "last" in fault:
        settings.append("parallel.replicate=2")
    config, resumed = load(TrainConfig, "", settings), None
    if fault == "another run":
        name = ("nothing", "the-last-update")[world.rank]
        resumed = folder / name
    with ExitStack() as opened:
        if fault in FAULTS and world.rank == 1:
            opened.enter_context(FAULTS[fault]())
        if fault == "log" and world.rank == 0:
            opened.enter_context(patch.object(completion_log, "write_completions", no_space))
        try:
            api.train(config, resumed, world)
        except UserError as error:
            return {"error": str(error)}
    return {"error": None}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(150, exit=True)
    under, shared = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    with join_world(100.0) as here:
        ended = {
            fault: outcome(fault, under, shared, here)
            for fault in ("nothing", "log", *SETTINGS, *FAULTS, "another run")
        }
        (under / f"ended-{here.rank}.json").write_text(json.dumps(ended))
    sys.stderr.flush()
    os._exit(0)
