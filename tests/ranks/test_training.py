"""Training on ranks: the same run as in one process, its checkpoints, and its ends."""

import json
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import ended, launch, start, working_folder
from safetensors.torch import load_file

from runs import BRITTLE, RLVR, SFT, outcome
from threepo.cli import main
from threepo.config import ModelConfig, TinyConfig
from threepo.models.policy import Policy, load_policy
from threepo.ranks.dealing import deal_bundles
from threepo.ranks.world import ALONE, World
from threepo.run_folder import checkpoints, read_metrics
from threepo.training import scoring, sft, update
from threepo.types import CreditedRow, Draw, Row

PROGRAM = str(Path(__file__).with_name("training_program.py"))
REWARD = """
import os, random, time
def reward(completions, **_):
    return [float(bool(c) and c[0] < 'P') for c in completions]
def by_chance(completions, **_):
    time.sleep(random.lognormvariate(-3.5, 1.5))
    return reward(completions)
def fails_on_one_rank(completions, **_):
    if os.environ.get("RANK") == "1":
        raise ValueError("the verifier is down")
    return reward(completions)
"""
IVON = ("optimizer.lr=1e3", "optimizer.ess=1e6")
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
COMMON = (
    *RLVR,
    "reward.function=first_character:reward",
    "model.tiny.tied=false",
    "schedule.warmup_share=0",
    "batching.tokens=64",  # several micro-batches a rank, and not as many on each
    "run.steps=3",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a reward that a random policy can learn."""
    with working_folder(tmp_path_factory.mktemp("ranks"), REWARD) as path:
        yield path


def commands(under: str) -> list[list[str]]:
    """A run of every method, and a warm start, with an untied head and a tied one."""
    found = [
        ["train", *COMMON, f"method.preset={name}", *settings, f"run.folder={under}/{name}"]
        for name, settings in METHODS.items()
    ]
    return [*found, ["sft", *SFT, "run.steps=3", "batching.tokens=200", f"run.folder={under}/sft"]]


def run_all(folder: Path, ranks: int) -> Path:
    """All of them on ranks."""
    under = folder / f"on-{ranks}"
    (folder / "commands.json").write_text(json.dumps(commands(str(under))))
    launch(PROGRAM, str(folder / "commands.json"), ranks=ranks)
    return under


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


def played(folder: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All runs in one process that adds up as so many ranks do."""
    player, under = Played(ranks), folder / f"played-{ranks}"
    monkeypatch.setattr(update._Update, "backward", lambda this, draw, part: player.backward(this, draw, part))
    monkeypatch.setattr(scoring, "deal_bundles", player.bundles)
    monkeypatch.setattr(sft, "cross_entropy", player.cross_entropy)
    for command in commands(str(under)):
        assert main(command) == 0
    assert player.idle, "no rank ever waits for another: choose other micro-batches"
    for name in METHODS:
        assert all(row["optimizer/grad_norm"] > 0 for row in read_metrics(under / name) if row["step"] >= 0), name
    return under


def assert_same(one: Path, other: Path, tolerance: float) -> None:
    """Completions and everything else agree; weights and posterior, too (tolerance 0: to the bit)."""
    a, b = outcome(one), outcome(other)
    for step in a["completions"]:
        for x, y in zip(a["completions"][step], b["completions"][step], strict=True):
            assert (x["tokens"], x["draw_index"], x["reward"]) == (y["tokens"], y["draw_index"], y["reward"])
    for x, y in zip(a["metrics"], b["metrics"], strict=True):
        assert x.keys() == y.keys()
        for name in x:
            assert x[name] == pytest.approx(y[name], rel=max(tolerance, 1e-6), abs=max(tolerance, 1e-7)), name
    files = [checkpoints(run)[-1][1] for run in (one, other)]
    for file in files[0].glob("*.safetensors"):
        mine, theirs = load_file(file), load_file(files[1] / file.name)
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            if tolerance:
                torch.testing.assert_close(tensor, theirs[name], rtol=tolerance, atol=tolerance)
            else:
                assert torch.equal(tensor, theirs[name]), f"{file.name}: {name}"
    mine, theirs = (json.loads(run["state"]) for run in (a, b))
    # What schedules remember is measured.
    schedules = pytest.approx(theirs["state"].pop("schedules"), rel=tolerance, abs=0)
    assert (mine["state"].pop("schedules"), mine) == (schedules, theirs)


def test_two_ranks_are_one_process_that_plays_both(folder: Path, on_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method and fine-tuning, bitwise: weights, posterior, optimizer, completions."""
    alone = played(folder, 2, monkeypatch)
    for name in (*METHODS, "sft"):
        assert_same(on_two / name, alone / name, tolerance=0)


def test_three_ranks_are_one_process_that_plays_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients summed in the order of ranks; three do not divide four prompts."""
    on_three, alone = run_all(folder, 3), played(folder, 3, monkeypatch)
    for name in (*METHODS, "sft"):
        assert_same(on_three / name, alone / name, tolerance=0)


def test_two_ranks_do_what_one_does(folder: Path, on_two: Path) -> None:
    """The same data, draws and completions; the rest up to rounding."""
    for command in commands(str(folder / "alone")):
        assert main(command) == 0
    for name in (*METHODS, "sft"):
        assert_same(on_two / name, folder / "alone" / name, tolerance=2e-4)


def test_copies_of_the_weights_and_offload_change_nothing(folder: Path) -> None:
    """Two copies, each spread over two ranks; weights that stay in CPU memory; arithmetic in bfloat16."""
    under, more = folder / "copies", ["parallel.replicate=2", "parallel.offload=true"]
    runs = {"c3po": [*commands(str(under))[3], *more], "sft": [*commands(str(under))[-1], *more]}
    half = [*COMMON, "method.preset=c3po", *IVON, "run.steps=1", "model.compute_dtype=bfloat16"]
    runs["half"] = ["train", *half, f"run.folder={under}/half", *more]
    (folder / "copies.json").write_text(json.dumps(list(runs.values())))
    launch(PROGRAM, str(folder / "copies.json"), ranks=4)
    alone = {"c3po": commands(str(folder / "one"))[3], "sft": commands(str(folder / "one"))[-1]}
    alone["half"] = ["train", *half, f"run.folder={folder}/one/half"]
    for name, command in alone.items():
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


def train(ranks: int, *settings: str) -> tuple[int, str]:
    """Exit status and last words of `threepo train` on ranks."""
    return ended(start("-m", "threepo", "train", *settings, ranks=ranks))


@pytest.mark.parametrize("ranks", [2, 1, 3])
def test_a_run_goes_on_with_any_number_of_ranks(ranks: int, folder: Path, on_two: Path) -> None:
    """Bitwise with as many as it began with."""
    parts = folder / f"parts-{ranks}"
    settings = [*COMMON, "method.preset=c3po", *METHODS["c3po"], "run.steps=2", f"run.folder={parts}"]
    (folder / "first.json").write_text(json.dumps([["train", *settings]]))
    launch(PROGRAM, str(folder / "first.json"), ranks=2)
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


def ranks_of(process: Any) -> list[int]:
    """Their process numbers, under a torchrun."""
    return [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def have_ended(processes: list[int]) -> bool:
    """Whether all have; one whose parent does not ask how it ended has. It closes its files a moment before it ends."""
    running = [Path(f"/proc/{process}/stat") for process in processes]
    for _ in range(100):
        with suppress(FileNotFoundError, ProcessLookupError):
            running = [s for s in running if s.exists() and s.read_text().rpartition(")")[2].split()[0] != "Z"]
        if not running:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_all_when_its_time_is_over(rank: int, folder: Path) -> None:
    """Its partner says so within the limit; torchrun then kills it."""
    run = folder / f"stopped-rank-{rank}"
    settings = [*COMMON, "run.steps=100000", "run.checkpoint_every=1", f"run.folder={run}", "parallel.timeout_s=12"]
    process = start("-m", "threepo", "train", *settings, ranks=2)
    while len(read_metrics(run)) < 2 and process.poll() is None:
        time.sleep(0.05)
    children = ranks_of(process)
    os.kill(children[rank], signal.SIGSTOP)
    status, said = ended(process)
    assert status == 1
    assert "another rank has ended, or does not answer within parallel.timeout_s" in said
    assert said.count("Traceback") == 1, "that of torchrun"
    assert checkpoints(run)
    assert have_ended(children)


def test_a_stuck_rank_is_ended_by_its_neighbour(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun alone would wait for it as long as it may take to finish a step and to save."""
    (folder / "stuck.py").write_text(
        "import os, time\ndef reward(completions, **_):\n"
        "    time.sleep(9e3 if os.environ['RANK'] == '1' else 0)\n    return [1.0] * len(completions)\n"
    )
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "800")
    settings = ["reward.function=stuck:reward", "parallel.timeout_s=8", f"run.folder={folder / 'stuck'}"]
    process = start("-m", "threepo", "train", *COMMON, *settings, ranks=2)
    status, said = ended(process, 120)
    assert status == 1, "-1: torchrun still waits"
    assert "does not answer within parallel.timeout_s" in said
    assert "SIGKILL" in said


@pytest.mark.parametrize("where", ["reward", "start", "recipe"])
def test_an_error_ends_all_with_its_message(where: str, folder: Path) -> None:
    """Of a reward on one rank, of a module that one rank cannot import, and of a recipe that none can read."""
    expected = {"reward": "the verifier is down", "start": "not on this node", "recipe": "run.nosuch"}[where]
    (folder / "elsewhere.py").write_text(
        f"import os\nif os.environ.get('RANK') == '1':\n    raise ImportError('{expected}')\n" + REWARD
    )
    function = "elsewhere:reward" if where == "start" else "first_character:fails_on_one_rank"
    failing = [f"reward.function={function}", f"run.folder={folder / where}"]
    status, said = train(2, *COMMON, *failing, *(["run.nosuch=1"] if where == "recipe" else []))
    assert status == 1, "torchrun's own"
    lines = [line for line in said.splitlines() if line.startswith("threepo: ")]
    assert len(lines) == 1, said
    assert expected in lines[0]
    assert not (folder / where).exists(), "nothing was learned, so nothing is left"


def test_an_evaluation_that_failed_on_one_rank_is_made_up_bitwise(folder: Path) -> None:
    """Its reward raises in the middle of the run, and is killed with its rank at the end: all ranks save, then end."""
    (folder / "brittle.py").write_text(BRITTLE)
    settings = [*COMMON, "method.preset=c3po", *IVON, "run.steps=3", "eval.every=2"]
    brittle, parts = "reward.function=brittle:when_evaluated", folder / "evaluated"
    command = [*settings, brittle, f"run.folder={parts}"]
    for fault, evaluations, steps in (("raise", 1, 2), ("kill", 1, 3)):
        (folder / "evaluations-left").write_text(f"{fault} {evaluations}")
        status, said = train(2, *command)
        assert status == 1
        assert ("the verifier is down" if fault == "raise" else "Signal 9 (SIGKILL) received by PID") in said
        assert [row["step"] for row in read_metrics(parts)] == [-1, *range(steps)]
        assert checkpoints(parts)[-1][0] == steps
        command = ["--resume", str(parts)]
    (folder / "evaluations-left").unlink()
    whole = ["train", *settings, f"run.folder={folder / 'evaluated-whole'}"]
    (folder / "made-up.json").write_text(json.dumps([whole, ["train", *command]]))
    launch(PROGRAM, str(folder / "made-up.json"), ranks=2)
    assert outcome(parts) == outcome(folder / "evaluated-whole")


@pytest.mark.parametrize("what", ["pass", "draw"])
def test_an_error_that_a_rank_alone_meets_is_said(what: str, folder: Path) -> None:
    """In the middle of an update, and of the second round of draws, while the others wait in a collective."""
    run = ["train", *COMMON, "method.preset=c3po", "method.draws=4", *IVON, f"run.folder={folder / what}"]
    (folder / "failing.json").write_text(json.dumps([run]))
    status, said = ended(start(PROGRAM, str(folder / "failing.json"), what, ranks=2), 100)
    assert status == 1
    assert "MemoryError: no memory left" in said
    assert "terminate called" not in said, "ranks in different collectives"


def test_an_error_of_one_rank_in_an_evaluation_ends_all_with_a_checkpoint(folder: Path) -> None:
    """One that no user caused: the rank shows where, all agree on it, and the steps before are saved."""
    run = folder / "evaluation"
    (folder / "failing.json").write_text(json.dumps([["train", *COMMON, "eval.every=2", f"run.folder={run}"]]))
    status, said = ended(start(PROGRAM, str(folder / "failing.json"), "evaluation", ranks=2), 100)
    assert status == 1
    lines = [line for line in said.splitlines() if line.startswith("threepo: ")]
    assert lines == ["threepo: rank 1 failed: MemoryError: no memory left"], said
    assert "in failing" in said, "the traceback"
    assert checkpoints(run)[-1][0] == 2


@pytest.mark.parametrize("receiver", ["rank", "torchrun"])
def test_a_signal_stops_all_with_a_checkpoint(receiver: str, folder: Path) -> None:
    run = folder / f"stopped-by-{receiver}"
    settings = [*COMMON, "run.steps=100000", "run.checkpoint_every=0", f"run.folder={run}"]
    process = start("-m", "threepo", "train", *settings, ranks=2)
    while len(read_metrics(run)) < 2 and process.poll() is None:
        time.sleep(0.05)
    children = ranks_of(process)
    os.kill(children[-1] if receiver == "rank" else process.pid, signal.SIGTERM)
    _, said = ended(process)
    assert f"continue with --resume {run}" in said
    assert checkpoints(run)[-1][0] == len(read_metrics(run))
    assert have_ended(children)


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


def test_a_run_survives_kills_at_any_moment(folder: Path) -> None:
    """Of a rank, of the first during a save, of torchrun itself: all end, and the run goes on from what is saved.

    On two ranks as if nothing had happened; on one and three up to rounding.
    """
    run = folder / "killed"
    settings = [
        *COMMON,
        "method.preset=c3po",
        *IVON,
        "run.checkpoint_every=1",
        "run.keep_checkpoints=0",
        "overlap.lag=1",
    ]
    command, wait = ["train", *settings, "run.steps=100000", f"run.folder={run}"], random.Random(0)
    for victim in ("torchrun", "save", "last", "first", "torchrun"):
        done = len(read_metrics(run))
        process = start("-m", "threepo", *command, ranks=2)
        while len(read_metrics(run)) < done + 2 and process.poll() is None:
            time.sleep(0.01)
        children = ranks_of(process)
        time.sleep(wait.uniform(0, 0.3))
        while victim == "save" and process.poll() is None and not list((run / "checkpoints").glob(".step-*/*")):
            pass
        os.kill({"torchrun": process.pid, "last": children[-1]}.get(victim, children[0]), signal.SIGKILL)
        status, said = ended(process)
        assert status == (-signal.SIGKILL if victim == "torchrun" else 1)
        if victim != "torchrun":
            # torchrun may end the other ranks before they have said that one is lost.
            assert "Signal 9 (SIGKILL) received by PID" in said
            assert said.count("Traceback") == 1, "that of torchrun"
        assert have_ended(children)
        assert len(read_metrics(run)) > done, victim
        command = ["train", "--resume", str(run)]
    steps = checkpoints(run)[-1][0] + 2
    for ranks in (1, 3):
        shutil.copytree(run, folder / f"killed-{ranks}")
    resumed = {ranks: ["train", "--resume", str(folder / f"killed-{ranks}"), f"run.steps={steps}"] for ranks in (1, 3)}
    whole = ["train", *settings, f"run.steps={steps}", f"run.folder={folder / 'never-killed'}"]
    (folder / "two.json").write_text(json.dumps([["train", "--resume", str(run), f"run.steps={steps}"], whole]))
    (folder / "three.json").write_text(json.dumps([resumed[3]]))
    launch(PROGRAM, str(folder / "two.json"), ranks=2)
    launch(PROGRAM, str(folder / "three.json"), ranks=3)
    assert main(resumed[1]) == 0
    assert_same(run, folder / "never-killed", tolerance=0)
    for ranks in (1, 3):
        assert_same(folder / f"killed-{ranks}", run, tolerance=2e-4)
