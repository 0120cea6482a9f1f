"""Training on ranks: the same run as in one process, its checkpoints, and its ends."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from rank_runs import COMMON, IVON, assert_same

from runs import SFT, outcome
from threepo.cli import main
from threepo.config import ModelConfig, TinyConfig
from threepo.models.policy import Policy, load_policy
from threepo.ranks.dealing import deal_bundles
from threepo.ranks.world import ALONE, World
from threepo.run_folder import checkpoints, read_metrics
from threepo.training import scoring, sft, update
from threepo.types import CreditedRow, Draw, Row
from training.test_episode_runs import talkative_model

PROGRAM = str(Path(__file__).with_name("training_program.py"))
FIXED = ("optimizer.lr=1e-2", "optimizer.max_grad_norm=0", "noise.unit=rms", "noise.size=0.3")
METHODS = {
    # Without clipping: the norm that it divides by is a sum over shards, whose rounding depends on their number.
    "grpo": ("optimizer.lr=1e-2", "objective.mini_batches=2", "optimizer.max_grad_norm=0"),
    "b3po": IVON,
    "m3po": (*IVON, "model.gradient_checkpointing=true", "noise.rank=2"),
    "c3po": (*IVON, "objective.reference_kl=0.1"),
    "c3po_replay": (
        *(*IVON, "method.rollouts_per_prompt=4", "sampling.dynamic_rounds=3"),
        *("overlap.lag=2", "method.correction.kind=seq_mis"),
    ),
    "psn": FIXED,
    "auto": ("optimizer.lr=1e-2", "optimizer.max_grad_norm=0", "method.draws=4", "arms.mean_share=0.3"),
    "c3po_auto": (*IVON, "method.draws=4", "arms.mean_share=0.3"),
    "es": ("optimizer.lr=1e-2", "noise.size=0.05", "method.draws=8", "noise.rank=1"),
    "kl_cov": (
        *("optimizer.lr=1e-2", "optimizer.max_grad_norm=0", "objective.mini_batches=2"),
        *("objective.kl_cov_share=0.2", "objective.entropy_mask_share=0.5"),
        *("objective.reference_kl=0.1", "objective.reference_reset_every=2"),
    ),
}


EPISODES = (
    *(setting for setting in COMMON if not setting.startswith("model.")),
    *("reward.function=environment", "environment.factory=worlds:Echo"),
)
PLAYED = ("c3po_replay", "es")
"""Methods that also play episodes."""
RUNS = (*METHODS, *(f"{name}_episodes" for name in PLAYED), "sft")
ON_THREE = ("grpo", "c3po", "c3po_replay_episodes", "es", "sft")
"""Runs on three ranks: what those do with rows and gradients is the same for every method."""


def commands(under: Path) -> dict[str, list[str]]:
    """A run of every method, some with episodes, and a warm start, with an untied head and a tied one."""
    runs = {name: ["train", *COMMON, f"method.preset={name}", *more] for name, more in METHODS.items()}
    for name in PLAYED:
        own = [f"method.preset={name}", *METHODS[name], f"model.path={under.parent / 'talkative'}"]
        runs[f"{name}_episodes"] = ["train", *EPISODES, *own]
    runs["sft"] = ["sft", *SFT, "run.steps=3", "batching.tokens=200"]
    return {name: [*command, f"run.folder={under / name}"] for name, command in runs.items()}


def run_all(folder: Path, ranks: int, names: Sequence[str] = RUNS) -> Path:
    """All of them on ranks."""
    under = folder / f"on-{ranks}"
    (folder / "commands.json").write_text(json.dumps([commands(under)[name] for name in names]))
    launch(PROGRAM, str(folder / "commands.json"), ranks=ranks)
    return under


@pytest.fixture(scope="module", autouse=True)
def _talkative(folder: Path) -> None:
    talkative_model(folder / "talkative")


@pytest.fixture(scope="module")
def on_two(folder: Path) -> Path:
    return run_all(folder, 2)


class Played:
    """One process that adds up as ranks do: over micro-batches, sums over ranks, of which each adds up its own."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.idle = False
        """Whether a rank had fewer micro-batches than another."""

    def played(
        self, policy: Policy, rows: Sequence[Any], budget: int, compute: Callable[[list[Any]], Sequence[float]]
    ) -> list[float]:
        """Sums of what `compute` returns for each micro-batch; its gradients are added to those that there are."""
        parameters = list(policy.model.parameters())
        total = [p.grad for p in parameters]
        hands = self.hands(policy, rows, budget)
        by_rank: list[list[Sequence[float]]] = [[] for _ in hands]
        for turn in range(max(map(len, hands))):
            here: list[torch.Tensor | None] = [None] * len(parameters)
            for hand, found in zip(hands, by_rank, strict=True):
                for p in parameters:
                    p.grad = None
                if turn < len(hand):
                    found.append(compute(hand[turn]))
                    here = add(here, [p.grad for p in parameters])
                else:
                    self.idle = True
            total = add(total, here)
        for p, grad in zip(parameters, total, strict=True):
            p.grad = grad
        sums = [[sum(column) for column in zip(*found, strict=True)] for found in by_rank if found]
        return [math.fsum(column) for column in zip(*sums, strict=True)] or [0.0, 0.0]

    def backward(self, this: Any, draw: Draw | None, part: Sequence[CreditedRow]) -> tuple[float, float]:
        """`_Update.backward`, played."""

        def compute(bundle: list[Any]) -> Sequence[float]:
            return REAL["backward"](this, draw, bundle)  # type: ignore[no-any-return]

        sums = [self.played(this.policy, rows, this.token_budget, compute) for rows, _ in this.split(draw, part)]
        loss, count = (math.fsum(column) for column in zip(*sums, strict=True))
        return loss, count

    def bundles(self, rows: Sequence[Any], token_budget: int, policy: Policy, world: World) -> list[list[Any]]:
        """The micro-batches of all ranks, for `score_rows`: other ones round differently."""
        return list(chain(*self.hands(policy, rows, token_budget)))

    def cross_entropy(self, policy: Policy, rows: Sequence[Row], token_budget: int, world: World = ALONE) -> float:
        """`sft.cross_entropy`, played."""
        compute = REAL["cross_entropy"]
        return self.played(policy, rows, token_budget, lambda bundle: [compute(policy, bundle, token_budget, world)])[0]

    def hands(self, policy: Policy, rows: Sequence[Any], budget: int) -> list[list[list[Any]]]:
        """The micro-batches of each rank."""
        dealt = (deal_bundles(rows, budget, policy, World(rank, self.ranks)) for rank in range(self.ranks))
        return [[bundle for bundle in bundles if bundle] for bundles in dealt]


def add(some: Sequence[torch.Tensor | None], more: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Sums of gradients, of which any may be missing."""
    return [b if a is None else a if b is None else a + b for a, b in zip(some, more, strict=True)]


REAL: dict[str, Any] = {
    "backward": update._Update.backward,
    "cross_entropy": sft.cross_entropy,
}


def played(folder: Path, ranks: int, monkeypatch: pytest.MonkeyPatch, names: Sequence[str] = RUNS) -> Path:
    """All runs in one process that adds up as so many ranks do."""
    player, under = Played(ranks), folder / f"played-{ranks}"
    monkeypatch.setattr(update._Update, "backward", lambda this, draw, part: player.backward(this, draw, part))
    monkeypatch.setattr(scoring, "deal_bundles", player.bundles)
    monkeypatch.setattr(sft, "cross_entropy", player.cross_entropy)
    for name in names:
        assert main(commands(under)[name]) == 0
    assert player.idle, "no rank ever waits for another: choose other micro-batches"
    for name in names[:-1]:
        assert all(row["optimizer/grad_norm"] > 0 for row in read_metrics(under / name) if row["step"] >= 0), name
    return under


def test_ranks_can_meet_again_and_again(tmp_path: Path) -> None:
    """As in a script that trains, trains on and evaluates."""
    program = tmp_path / "meetings.py"
    program.write_text(
        "import os\n"
        "from threepo.ranks.launch import join_world\n"
        "for meeting in range(12):\n"
        "    with join_world(20.0) as world:\n"
        "        assert world.gather(meeting * world.size) == [2 * meeting] * 2\n"
        "os._exit(0)\n"
    )
    launch(str(program), ranks=2, timeout=60)


def test_two_ranks_are_one_process_that_plays_both(folder: Path, on_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method, episodes and fine-tuning, bitwise: weights, posterior, optimizer, completions."""
    alone = played(folder, 2, monkeypatch)
    for name in RUNS:
        assert_same(on_two / name, alone / name, tolerance=0)


def test_three_ranks_are_one_process_that_plays_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients summed in the order of ranks; three do not divide four prompts."""
    on_three, alone = run_all(folder, 3, ON_THREE), played(folder, 3, monkeypatch, ON_THREE)
    for name in ON_THREE:
        assert_same(on_three / name, alone / name, tolerance=0)


def test_two_ranks_do_what_one_does(folder: Path, on_two: Path) -> None:
    """The same data, draws and completions; the rest up to rounding."""
    for command in commands(folder / "alone").values():
        assert main(command) == 0
    for name in RUNS:
        assert_same(on_two / name, folder / "alone" / name, tolerance=2e-4)


def test_copies_of_the_weights_and_offload_change_nothing(folder: Path) -> None:
    """Two copies, each spread over two ranks; weights that stay in CPU memory; arithmetic in bfloat16; compiled."""
    under, more = folder / "copies", ["parallel.replicate=2", "parallel.offload=true"]
    step = ["train", *COMMON, "method.preset=c3po", *IVON, "run.steps=1"]

    def runs(under: Path) -> dict[str, list[str]]:
        found = {name: commands(under)[name] for name in ("c3po", "sft")}
        found["half"] = [*step, "model.compute_dtype=bfloat16", f"run.folder={under}/half"]
        return found | {"compiled": [*step, f"run.folder={under}/compiled"]}

    on_ranks = {name: [*command, *more] for name, command in runs(under).items()}
    on_ranks["compiled"] += ["model.compile=true", "parallel.offload=false"]
    (folder / "copies.json").write_text(json.dumps(list(on_ranks.values())))
    launch(PROGRAM, str(folder / "copies.json"), ranks=4)
    for name, command in runs(folder / "one").items():
        assert main(command) == 0
        if name != "half":
            assert_same(under / name, folder / "one" / name, tolerance=2e-4)
    a, b = (outcome(run / "half") for run in (under, folder / "one"))
    assert a["metrics"][-1]["reward/mean"] == b["metrics"][-1]["reward/mean"]
    assert a["metrics"][-1]["optimizer/grad_norm"] == pytest.approx(b["metrics"][-1]["optimizer/grad_norm"], rel=0.05)


def test_an_evaluation_on_two_ranks_is_that_of_one(folder: Path, on_two: Path) -> None:
    """Also with a choice of draws, and one that was begun on two and is finished on one."""
    settings = ["eval.problems=12", "eval.samples=4", "eval.part_size=8", "eval.max_new_tokens=6"]
    all_draws, best_draws = ["eval.draws=2"], ["eval.draws=3", "eval.best_draws=2", "eval.selection_problems=5"]
    commands = {
        name: ["eval", str(on_two / "c3po"), *settings, *draws, "--output"]
        for name, draws in (("all", all_draws), ("best", best_draws))
    }
    on_ranks = [[*command, str(folder / f"eval-{name}-two")] for name, command in commands.items()]
    (folder / "eval.json").write_text(json.dumps(on_ranks))
    launch(PROGRAM, str(folder / "eval.json"), ranks=2)
    for name, command in commands.items():
        assert main([*command, str(folder / f"eval-{name}-one")]) == 0
        one, two = (json.loads((folder / f"eval-{name}-{n}" / "summary.json").read_text()) for n in ("one", "two"))
        assert one == two
        assert main([*command, str(folder / f"eval-{name}-two")]) == 0, "it is the same evaluation"


def test_a_run_goes_on_with_any_number_of_ranks(folder: Path, on_two: Path) -> None:
    """Bitwise with as many as it began with."""
    begun = folder / "begun"
    settings = [*COMMON, "method.preset=c3po", *METHODS["c3po"], "run.steps=2", f"run.folder={begun}"]
    (folder / "first.json").write_text(json.dumps([["train", *settings]]))
    launch(PROGRAM, str(folder / "first.json"), ranks=2)
    for ranks in (2, 1, 3):
        parts = folder / f"parts-{ranks}"
        shutil.copytree(begun, parts)
        (folder / "rest.json").write_text(json.dumps([["train", "--resume", str(parts), "run.steps=3"]]))
        launch(PROGRAM, str(folder / "rest.json"), ranks=ranks)
        assert_same(parts, on_two / "c3po", tolerance=0 if ranks == 2 else 2e-4)


@pytest.mark.parametrize("init", ["unit", "usual"])
def test_adapters_on_ranks_are_those_of_one_process(init: str, folder: Path) -> None:
    """Stopped and resumed with another number of ranks; the files are those of peft, as one process writes them."""
    pytest.importorskip("peft")
    shape = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1)
    load_policy(ModelConfig(path="tiny-qwen2", tiny=shape)).save(folder / "base")
    own = [setting for setting in COMMON if not setting.startswith("model.")]
    own += ["model.path=base", "model.lora.rank=4", "model.lora.alpha=8", f"model.lora.init={init}", *METHODS["c3po"]]
    own += ["method.preset=c3po", "optimizer.hess_init=1e-2"]
    one, two = folder / f"{init}-one", folder / f"{init}-two"
    assert main(["train", *own, f"run.folder={one}"]) == 0
    (folder / "first.json").write_text(json.dumps([["train", *own, "run.steps=2", f"run.folder={two}"]]))
    launch(PROGRAM, str(folder / "first.json"), ranks=2)
    rest = ["train", "--resume", str(two), "run.steps=3"]
    if init == "unit":
        (folder / "rest.json").write_text(json.dumps([rest]))
        launch(PROGRAM, str(folder / "rest.json"), ranks=3)
    else:
        assert main(rest) == 0
    assert_same(two, one, tolerance=2e-4)
    names, theirs = ({file.name for file in checkpoints(run)[-1][1].iterdir()} for run in (one, two))
    assert names == theirs
    start = load_policy(ModelConfig(path=str(checkpoints(two)[-1][1])))
    moved = [float(p.detach().abs().max()) for name, p in start.model.named_parameters() if "lora_B" in name]
    assert min(moved) > 0, "B has begun at 0"


def test_a_stream_on_two_ranks_is_repeated_by_its_journal(folder: Path) -> None:
    """From its beginning, and from a checkpoint when it was killed later."""
    stream = ["overlap.stream=true", "overlap.lag=2", "reward.function=first_character:by_chance", "run.steps=8"]
    settings = ["train", *COMMON, "method.preset=c3po", *IVON, *stream, "run.checkpoint_every=3", "eval.every=4"]
    settings += ["run.keep_checkpoints=0"]
    first, second, resumed = (folder / f"stream-{name}" for name in ("first", "second", "resumed"))
    again = [*settings, f"run.folder={second}", f"overlap.journal={first / 'journal.jsonl'}"]
    (folder / "stream.json").write_text(json.dumps([[*settings, f"run.folder={first}"], again]))
    launch(PROGRAM, str(folder / "stream.json"), ranks=2)
    shutil.copytree(first, resumed)
    for step, path in checkpoints(resumed):
        if step > 3:
            shutil.rmtree(path)
    (folder / "stream.json").write_text(json.dumps([["train", "--resume", str(resumed)]]))
    launch(PROGRAM, str(folder / "stream.json"), ranks=2)
    assert_same(second, first, tolerance=0)
    assert_same(resumed, first, tolerance=0)
    assert len({(run / "journal.jsonl").read_text() for run in (first, second, resumed)}) == 1
