"""The examples run as they are, and learn; the step that is written out agrees with the library's."""

import copy
import importlib.util
import json
import random
import re
import shutil
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest
import torch
from examples.deep_sea.deep_sea import DeepSea
from examples.lookup.lookup import PriceList, chat
from examples.lookup.lookup import problem as question

from programs import run_program
from runs import forked
from threepo.config import PPOConfig, SamplingConfig
from threepo.config.method import C3PO
from threepo.methods.method import credit, training_batch
from threepo.models.attention import takes_packed_rows
from threepo.models.logprobs import Scorer, has_linear_head
from threepo.models.policy import Policy
from threepo.run_folder import read_metrics
from threepo.training.update import update_policy
from threepo.types import Completion, Draw, Problem, Verdict

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run_on_two_ranks(program: Path, folder: Path) -> CompletedProcess[str]:
    """The first of two ranks, with the environment that torchrun gives them; the other one has ended well."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}

    def run(rank: str) -> CompletedProcess[str]:
        return run_program(program, folder, RANK=rank, LOCAL_RANK=rank, **address)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, "01")
    assert second.returncode == 0, second.stderr
    return first


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    done = run_on_two_ranks(example, tmp_path) if example.stem == "fsdp2" else run_program(example, tmp_path)
    assert done.returncode == 0, done.stderr
    measured = re.search(r"(loss|reward) before ([\d.]+).*, after ([\d.]+)", done.stdout)
    assert measured, done.stdout
    before, after = float(measured[2]), float(measured[3])
    if measured[1] == "loss":
        assert after < before / 5
    else:
        assert before < 0.15
        assert after > 0.6  # 0.86 or more with each of ten seeds
    assert "False" not in done.stdout
    assert not list(tmp_path.iterdir()), "an example leaves nothing where it is run"


NOTEBOOKS = sorted(EXAMPLES[0].parent.glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    """Its cells run in order, in a separate process; the file keeps none of their output."""
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    program = "\n".join("".join(cell["source"]) for cell in cells)
    done = run_program(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Loading weights" not in done.stderr, "a progress bar that is not ours"
    if notebook.stem == "first_run":
        rewards = [row["reward/mean"] for row in read_metrics(tmp_path / "runs" / "first_run")]
        assert max(rewards[-3:]) > rewards[0]


def test_there_are_examples() -> None:
    assert {notebook.stem for notebook in NOTEBOOKS} == {"analyse", "first_run"}
    assert {example.stem for example in EXAMPLES} == {"fsdp2", "plain_pytorch", "rl_loop", "trainer"}


@pytest.fixture
def rl_loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    specification = importlib.util.spec_from_file_location("rl_loop", EXAMPLES[0].parent / "rl_loop.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "rl_loop", module)  # where dataclasses look their module up
    specification.loader.exec_module(module)
    return module


def test_rl_loop_makes_the_step_that_the_library_makes(rl_loop: ModuleType) -> None:
    """The same rollouts give the same advantages, ratios, masks, gradient, posterior and mean."""
    torch.manual_seed(3)
    theirs = rl_loop.make_model()
    ours = copy.deepcopy(theirs)
    their_optimizer, our_optimizer = rl_loop.make_optimizer(theirs, 5), rl_loop.make_optimizer(ours, 5)
    prompts = ["a", "c", "e"]
    rollouts = rl_loop.collect(theirs, their_optimizer, prompts, step=2)
    texts = rollouts.texts()
    rewards = torch.tensor([rl_loop.reward(prompts[row // 16], text) for row, text in enumerate(texts)]).view(3, 16)
    assert rewards.std(dim=1).gt(0).sum() >= 2, "two prompts have something to teach"
    seen = rl_loop.learn(theirs, their_optimizer, rollouts, rewards, step=2)

    def completion(row: int) -> Completion:
        mask, prompt = rollouts.mask_R_T[row], prompts[row // 16]
        return Completion(
            problem=Problem(id=prompt, prompt=prompt),
            prompt_tokens=tuple(rl_loop.encode(prompt)),
            tokens=tuple(rl_loop.encode(texts[row])),
            logprobs=tuple(rollouts.logprobs_R_T[row, mask].tolist()),
            text=texts[row],
            finish_reason="stop",
            draw=Draw(5, 2, row % 16 // 4),
            rollout=row % 16,
            policy_step=2,
            verdict=Verdict(False, "wrong", None, float(rewards[row // 16, row % 16])),
        )

    completions = [completion(row) for row in range(48)]
    policy = Policy(Scorer(ours.eval(), has_linear_head(ours), takes_packed_rows(ours)), None)
    batch = training_batch(C3PO, SamplingConfig(), credit(C3PO, completions), seed=5, step=2)
    record = update_policy(policy, our_optimizer, batch, PPOConfig())

    advantages = torch.tensor([row.advantage for row in next(iter(batch.parts.values()))])
    torch.testing.assert_close(rl_loop.group_advantages(rewards).flatten(), advantages, rtol=1e-4, atol=1e-5)
    rho = [row.rho for row in record.rows]
    assert (seen["rho min"], seen["rho max"]) == pytest.approx((min(rho), max(rho)), rel=1e-4)
    assert 0 < seen["kept"] == sum(row.kept_tokens > 0 for row in record.rows) / 48 < 1
    for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
        for name in ("momentum", "hessian"):
            expected = our_optimizer.state[q][name]
            scale = float(expected.abs().max())
            torch.testing.assert_close(their_optimizer.state[p][name], expected, rtol=1e-3, atol=1e-5 * scale)
        torch.testing.assert_close(p, q, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["deep_sea", "lookup"])
def test_an_environment_trains_by_its_own_recipes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the steps that their comments name, and as they are, but shorter."""
    monkeypatch.chdir(tmp_path)
    example = shutil.copytree(
        ROOT / "examples" / name, Path("examples", name), ignore=shutil.ignore_patterns("*.jsonl")
    )
    written = run_program(example.resolve() / f"{name}.py", tmp_path)
    assert written.returncode == 0, written.stderr
    shorter = "run.steps=2", "data.prompts_per_step=2"
    for command in (("sft", f"{example}/warm_start.toml", "run.steps=2"), ("train", f"{example}/grpo.toml", *shorter)):
        process = forked(*command, said="said.txt")
        process.join()
        assert process.exitcode == 0, Path("said.txt").read_text()
    (run,) = set(Path("runs").iterdir()) - {Path("runs/warm_start")}
    first, second = read_metrics(run)
    for row in (first, second):
        assert row["episodes/failed_share"] == 0
        assert row["episodes/turns_mean"] >= 1


@pytest.mark.parametrize("version", ["same", "rule", "secret"])
def test_deep_sea_pays_only_for_moves_that_are_all_right(version: str) -> None:
    rng = random.Random(0)
    secret = [rng.choice("LR") for _ in range(8)]

    def play(id: str, wrong: int | None) -> tuple[list[str], float, float]:
        """The moves that were right, what they earned, and the share before the wrong one."""
        game, moves, earned = DeepSea(version), [], []
        sign = game.reset(Problem(id, "8:", columns={"depth": 8}))[-1]
        for number in range(8):
            right = {"same": "R", "rule": "R" if sign == "a" else "L", "secret": secret[number]}[version]
            moves.append(right)
            turn = game.step(right if number != wrong else "LR"[right == "L"])
            sign = turn.observation
            earned.append(turn.reward)
            assert turn.done == (number == 7)
        assert not any(earned[:7])
        return moves, earned[7], turn.metrics["kept"]

    episodes = [play(f"8-{i}", None) for i in range(20)]
    assert all((reward, kept) == (1, 1) for _, reward, kept in episodes)
    assert len({tuple(moves) for moves, _, _ in episodes}) == (1 if version != "rule" else 20)
    assert [play("8-0", wrong)[1:] for wrong in (0, 3, 7)] == [(0, 0), (0, 3 / 8), (0, 7 / 8)]


def test_the_price_list_answers_what_the_problem_says() -> None:
    prompt, prices, answer = question(random.Random(0))
    shop = PriceList()
    shop.reset(Problem("p", prompt, columns={"prices": prices}))
    (tool,) = shop.tools
    assert tool(prompt[-1]) == answer
    asked = [chat(random.Random(seed), share=1.0) for seed in range(20)]
    for _, call, told, said in asked:
        called = json.loads(call["content"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert called["name"] == tool.__name__
        assert told["content"] == said["content"]
    assert len(chat(random.Random(0), share=0.0)) == 2
