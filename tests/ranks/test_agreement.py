"""Ranks that disagree end within a step, with one line that says what differs and on which rank."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from launch import launch, working_folder

from runs import RLVR
from threepo import IVON
from threepo.ranks.agreement import state_sums
from threepo.run_folder import checkpoints, read_metrics
from threepo.types import Draw

PROGRAM = str(Path(__file__).with_name("agreement_program.py"))
REWARD = "def reward(completions, **_):\n    return [float(bool(c) and c[0] < 'P') for c in completions]\n"
REWARD += "def rule(rewards, _):\n    return rewards - rewards.mean(dim=-1, keepdim=True)\n"
RUN = (
    *RLVR,
    *("method.preset=c3po", "optimizer.lr=1e3", "optimizer.ess=1e6", "schedule.warmup_share=0"),
    *("reward.function=first_character:reward", "run.steps=3", "run.checkpoint_every=1"),
)
EXPECTED = {
    "lr": ("optimizer.lr: 1000.0 on rank 0; 2000.0 on rank 1", 0),
    "seed": ("run.seed: 0 on rank 0; 5 on rank 1", 0),
    "temperature": ("sampling.temperature: 1.0 on rank 0; 0.5 on rank 1", 0),
    "pattern": ("noise.where.all: 1.0 on rank 0; nothing on rank 1; they also disagree about noise.where.norm", 0),
    "data": ("the problems of data.train: {", 0),
    "reward": ("the code of first_character:reward: ", 0),
    "credit rule": ("the code of first_character:rule: ", 0),
    "code": ("the code of threepo", 0),
    "version": ("the version of numpy: ", 0),
    "weights of a shard": (
        "what has changed since the last update: 'nothing' on rank 0; 'weights in shard 1' on rank 1",
        1,
    ),
    "reference of a replica": ("the sum of the bits of the reference in shard 0: ", 1),
    "rate": ("the optimizer's lr: 1000.0 on rank 0; 1000.0000000010001 on rank 1", 1),
    "advantage": ("advantages: ", 0),
    "token": ("the tokens of rows: ", 0),
    "log-prob": ("the log-probs of rollouts: ", 0),
    "draw": ("the draws of gradients: [Draw(", 0),
    "weights of a replica": ("the sum of the bits of weights in shard 0: ", 1),
    "Hessian of a replica": ("the sum of the bits of hessian in shard 0: ", 1),
    "the last update": ("the sum of the bits of hessian in shard 0: ", 1),
    "another run": ("the checkpoint to resume: ", 0),
}
"""The message for each fault, and the number of steps saved before it."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[dict[str, dict[str, str]]]]]:
    """Both ranks' messages about each run."""
    with working_folder(tmp_path_factory.mktemp("agreement"), REWARD) as folder:
        rows = [{"prompt": f"say {i}: ", "answer": str(i)} for i in range(8)]
        (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "settings.json").write_text(json.dumps(RUN))
        launch(PROGRAM, str(folder), str(folder / "settings.json"), ranks=2)
        yield folder, [json.loads((folder / f"ended-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("fault", EXPECTED)
def test_a_difference_ends_all_ranks(fault: str, ended: tuple[Path, list[dict[str, dict[str, str]]]]) -> None:
    folder, (first, second) = ended
    words, steps = EXPECTED[fault]
    assert f"the ranks disagree about {words}" in str(first[fault]["error"])
    assert second[fault] == first[fault], "both say the same"
    run = folder / fault.replace(" ", "-")
    assert [row["step"] for row in read_metrics(run)][steps:] in ([], [steps]), "within a step"
    assert [step for step, _ in checkpoints(run)][-1:] == [steps] * (steps > 0), "no checkpoint of what is wrong"


def test_ranks_that_agree_train_on(ended: tuple[Path, list[dict[str, dict[str, str]]]]) -> None:
    folder, outcomes = ended
    assert [outcome["nothing"] for outcome in outcomes] == [{"error": None}] * 2
    assert len(read_metrics(folder / "nothing")) == 3


def test_a_log_that_the_first_rank_cannot_write_ends_all(ended: tuple[Path, list[dict[str, dict[str, str]]]]) -> None:
    folder, outcomes = ended
    assert [outcome["log"] for outcome in outcomes] == [
        {"error": "rank 0 failed: OSError: No space left on device"}
    ] * 2
    assert not checkpoints(folder / "log")


def test_bit_sums_notice_one_bit_two_numbers_and_two_tensors() -> None:
    """A flipped last bit, and two tensors that are swapped, give other sums; and so does each kind of state."""
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 7) + i) for i in range(2)]
    optimizer = IVON(parameters)
    draw = Draw(0, 0, 0)
    with optimizer.perturbed(draw):
        sum(p.square().sum() for p in parameters).backward()  # type: ignore[union-attr]
    optimizer.observe(draw)
    optimizer.step()
    before = state_sums(optimizer)
    assert state_sums(optimizer) == before
    weights = parameters[0].data
    weights.view(torch.int32)[3] ^= 1
    assert state_sums(optimizer)["weights"] != before["weights"]
    weights.view(torch.int32)[3] ^= 1
    assert state_sums(optimizer) == before
    for kind, tensors in {
        "weights": [p.data for p in parameters],
        "hessian": [optimizer.state[p]["hessian"] for p in parameters],
    }.items():
        a, b = tensors[0].clone(), tensors[1].clone()
        tensors[0].copy_(b)
        tensors[1].copy_(a)
        changed = {name for name, value in state_sums(optimizer).items() if value != before[name]}
        assert changed == {kind}
        tensors[0].copy_(a)
        tensors[1].copy_(b)
