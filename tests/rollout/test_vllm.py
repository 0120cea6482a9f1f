"""The vLLM engine, run for real: contract 4, decoding, several replicas, and that a wrong engine is found out.

    make test-vllm

Models are as small as the CPU build takes them (attention heads of 32).
"""

import importlib.util
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from rollout.asked import differences, requests_for, trainer_logprobs
from runs import VLLM, train_config
from threepo import api
from threepo.cli import main
from threepo.config import LoRAConfig, ModelConfig, SamplingConfig, TinyConfig
from threepo.config.engine import VLLMConfig, VLLMEngineConfig
from threepo.errors import UserError
from threepo.models.policy import Policy, load_policy
from threepo.posterior.ivon import IVON
from threepo.rollout import payloads
from threepo.rollout import vllm as module
from threepo.rollout.replicas import TICK_SECONDS, Replica
from threepo.rollout.sampling import processed_logprobs
from threepo.rollout.vllm import VLLMEngine
from threepo.rollout.weight_check import WeightCheck
from threepo.run_folder import model_folder, read_metrics
from threepo.types import Arm, Draw, Problem, Request

NO_VLLM = importlib.util.find_spec("vllm") is None
pytestmark = [
    pytest.mark.skipif(NO_VLLM, reason="vLLM is not installed; `make test-vllm` installs it"),
    pytest.mark.usefixtures("forked_replicas"),
]

SAMPLING = SamplingConfig(max_new_tokens=24)
DRAWS = [Draw(0, 0, 0), Draw(0, 0, 1), Draw(0, 0, 2, arm=Arm("attention", 2.0))]
CACHE = 1 << 28
EXACT = 1e-4 if torch.cuda.is_available() else 1e-5
"""Differences of log-probs (nats) in float32. On a GPU, kernels differ by more, and with the rows of a batch."""


def tiny(kind: str, tied: bool) -> Policy:
    """A model that prefers some tokens to others, and stops now and then."""
    shape = TinyConfig(hidden_size=64, intermediate_size=96, layers=2, heads=2, kv_heads=1, tied=tied)
    policy = load_policy(ModelConfig(path=kind, tiny=shape), seed=2)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight *= 6
    return policy


def engine_for(policy: Policy, dtype: str = "float32", **settings: object) -> VLLMEngine:
    needed = int(settings.get("replicas", 1)) * int(settings.get("tensor_parallel", 1))  # type: ignore[call-overload]
    if 0 < torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs")
    own = VLLMConfig(**{"kv_cache_memory_bytes": CACHE, "enforce_eager": True, **settings})  # type: ignore[arg-type]
    return VLLMEngine(policy, VLLMEngineConfig(dtype=dtype, vllm=own))  # type: ignore[arg-type]


def free_on_gpu() -> int:
    """Bytes of its memory that no process has, 0 without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def gone(pid: int) -> bool:
    """True if a process has ended within five seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


Setup = tuple[Policy, IVON, VLLMEngine]


@pytest.fixture(scope="module")
def tied() -> Iterator[Setup]:
    """A Qwen2 with a tied head, and one replica."""
    policy = tiny("tiny-qwen2", tied=True)
    engine = engine_for(policy)
    yield policy, IVON(policy.model.named_parameters(), ess=1e5), engine
    engine.close()


@pytest.fixture(scope="module")
def untied() -> Iterator[Setup]:
    """A Llama with a head of its own, and two replicas, where there is a GPU for each."""
    policy = tiny("tiny-llama", tied=False)
    engine = engine_for(policy, replicas=1 if torch.cuda.device_count() == 1 else 2)
    yield policy, IVON(policy.model.named_parameters(), ess=1e5), engine
    engine.close()


@pytest.mark.parametrize(("slots", "base_dtype"), [(8, "float32"), (2, "nf4"), (0, "float32")])
def test_engine_and_trainer_agree_for_every_draw_of_adapters(tmp_path: Path, slots: int, base_dtype: str) -> None:
    """With a slot for each draw, in turn through two, and multiplied out; the trainer's side is transformers with peft.

    Slots are filled twice with other draws, so an adapter that vLLM kept, or keys and values of the first ones for the
    long prompts, would show. alpha / rank is not 1, so B multiplied in place, in memory that is read again, would too.
    """
    if slots and torch.cuda.is_available():
        pytest.skip("vLLM has no adapters in float32 on a GPU")
    tiny("tiny-qwen2", tied=True).save(tmp_path / "base")
    lora = LoRAConfig(rank=4, alpha=12, base_dtype=base_dtype)
    policy = load_policy(ModelConfig(path=str(tmp_path / "base"), lora=lora))
    optimizer = IVON(policy.model.named_parameters(), ess=1e4, hess_init=1e-2)  # sigma 0.1
    engine = engine_for(policy, adapters=slots, sleep=slots == 2)
    try:
        for step in (0, 1):
            draws = [None, *(Draw(0, step, i) for i in range(4))]
            engine.load(optimizer, draws, step)
            engine.generate(requests_for(policy, draws), SAMPLING, seed=2)
            completions = engine.generate(requests_for(policy, draws), SAMPLING, seed=1)
            found = differences(policy, optimizer, completions)
            assert max(gap for (draw, other), gap in found.items() if draw == other) < EXACT
            assert min(gap for (draw, other), gap in found.items() if draw != other) > 1e-2
    finally:
        engine.close()


@pytest.mark.parametrize("setup", ["tied", "untied"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_trainer_agree_for_every_draw(
    setup: str, temperature: float, request: pytest.FixtureRequest
) -> None:
    """Prompts longer than a block of the prefix cache are among them: one not flushed would show here."""
    policy, optimizer, engine = request.getfixturevalue(setup)
    draws = [*DRAWS, None]
    requests = requests_for(policy, draws)
    sampling = replace(SAMPLING, temperature=temperature)
    for step in (0, 1):  # the second time, all weights have been there before
        engine.load(optimizer, draws, step)
        completions = engine.generate(requests, sampling, seed=1)
        assert [(c.problem, c.draw, c.rollout) for c in completions] == [
            (r.problem, r.draw, r.rollout) for r in requests
        ]
        assert {c.policy_step for c in completions} == {step}
        assert all((c.opening == "<think>") == ("<think>" in c.problem.id) for c in completions)
        for (draw, other), difference in differences(policy, optimizer, completions, temperature).items():
            if draw == other:
                assert difference < 1e-4
            else:
                assert difference > 1e-2, "the engine served one draw's rows with another's weights"


def test_an_engine_in_bfloat16_stays_close_to_the_trainer_also_after_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's memory is there for others while it sleeps, and is filled by a push; a CPU's worker keeps its own."""
    asked: list[str] = []
    call = Replica.call
    monkeypatch.setattr(Replica, "call", lambda this, what, *more: asked.append(what) or call(this, what, *more))
    policy = tiny("tiny-qwen2", tied=True)
    optimizer = IVON(policy.model.named_parameters(), ess=1e5)
    engine = engine_for(policy, "bfloat16", sleep=True)
    engine.load(optimizer, DRAWS, 0)
    awake, requests = free_on_gpu(), requests_for(policy, list(DRAWS))
    completions = engine.generate(requests, SAMPLING, seed=1)
    assert not torch.cuda.is_available() or free_on_gpu() - awake > 0.9 * CACHE
    assert [c.tokens for c in engine.generate(requests, SAMPLING, seed=1)] == [c.tokens for c in completions]
    engine.close()
    after = [later for now, later in pairwise(what for what in asked if what != "share") if now == "sleep"]
    assert after == ["push", "push"]
    assert asked[-1] == "sleep"
    for (draw, other), difference in differences(policy, optimizer, completions).items():
        assert (difference < 0.15) == (draw == other), difference


def test_a_replica_of_two_workers_is_one_engine() -> None:
    """Tensor parallelism: each worker loads its part of every weight, and a worker that dies is an error."""
    policy = tiny("tiny-qwen2", tied=True)
    optimizer = IVON(policy.model.named_parameters(), ess=1e5)
    engine = engine_for(policy, tensor_parallel=2)
    replica = engine._replicas[0].pid
    children = map(int, Path(f"/proc/{replica}/task/{replica}/children").read_text().split())
    workers = [pid for pid in children if "VLLM::Worker" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    for step in (0, 1):
        engine.load(optimizer, DRAWS[:2], step)
        completions = engine.generate(requests_for(policy, DRAWS[:2]), SAMPLING, seed=1)
        for (draw, other), difference in differences(policy, optimizer, completions).items():
            assert (difference < 1e-4) == (draw == other), difference
    os.kill(workers[1], signal.SIGKILL)
    with pytest.raises(UserError, match=r"^engine.vllm: replica 0 failed to push: RuntimeError: .*; more is in .*log$"):
        engine.load(optimizer, DRAWS[:2], 2)
    assert all(map(gone, [replica, *workers]))


def test_any_number_of_draws_gives_the_same_completions(untied: Setup) -> None:
    """A draw's completions do not depend on its replica, other rows or other draws."""
    policy, optimizer, engine = untied
    requests = requests_for(policy, list(DRAWS))
    engine.load(optimizer, DRAWS, 3)  # draws 0 and 2 in turn in one replica, draw 1 in the other
    expected = {(c.problem.id, c.rollout): c for c in engine.generate(requests, SAMPLING, seed=1)}
    assert {c.finish_reason for c in expected.values()} == {"stop", "length"}
    engine.load(optimizer, [DRAWS[1]], 3)  # now draw 1 in the first
    alone = [request for request in requests if request.draw == DRAWS[1]][::-1][::3]
    for completion in engine.generate(alone, SAMPLING, seed=1):
        other = expected[completion.problem.id, completion.rollout]
        assert completion.tokens == other.tokens
        assert completion.logprobs == pytest.approx(other.logprobs, abs=EXACT)


def test_seed_step_problem_and_rollout_are_the_random_address(tied: Setup) -> None:
    policy, optimizer, engine = tied
    request = requests_for(policy, [None])[0]

    def tokens(request: Request, seed: int, step: int) -> tuple[int, ...]:
        engine.load(optimizer, [None], step)
        return engine.generate([request], SAMPLING, seed)[0].tokens

    same = tokens(request, 1, 0)
    assert tokens(request, 1, 0) == same
    assert tokens(request, 2, 0) != same
    assert tokens(request, 1, 1) != same
    assert tokens(replace(request, rollout=1), 1, 0) != same
    assert tokens(replace(request, problem=Problem(id="other", prompt="a")), 1, 0) != same


def chi_squared_p(counts: Counter[int], logprobs: torch.Tensor) -> float:
    """p-value of observed tokens [V] under a distribution; rare tokens are counted together."""
    total = counts.total()
    expected = logprobs.double().exp() * total
    common = expected >= 5
    observed = torch.tensor([counts[i] for i in range(len(expected))], dtype=torch.float64)
    if (observed[expected == 0] > 0).any():
        return 0.0
    o = torch.cat([observed[common], observed[~common].sum()[None]])
    e = torch.cat([expected[common], expected[~common].sum()[None]])
    statistic = ((o - e).square() / e.clamp(min=1e-9))[e > 0].sum()
    freedom = torch.tensor(int((e > 0).sum()) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(max_new_tokens=1),
        SamplingConfig(max_new_tokens=1, temperature=0.7),
        SamplingConfig(max_new_tokens=1, temperature=1.3, top_k=20),
        SamplingConfig(max_new_tokens=1, temperature=0.7, top_p=0.6),
        SamplingConfig(max_new_tokens=1, temperature=0.8, top_p=0.7, top_k=30),
    ],
    ids=str,
)
def test_tokens_and_logprobs_are_of_the_distribution_asked_for(tied: Setup, sampling: SamplingConfig) -> None:
    policy, optimizer, engine = tied
    request = requests_for(policy, [DRAWS[0]])[2]
    engine.load(optimizer, DRAWS[:1], 0)
    completions = engine.generate([replace(request, rollout=i) for i in range(8000)], sampling, seed=5)
    with optimizer.at(DRAWS[0]), torch.no_grad():
        logits = policy.model(torch.tensor([request.prompt_tokens], device=policy.device)).logits[0, -1:].cpu()
    right = processed_logprobs(logits, sampling.temperature, sampling.top_p, sampling.top_k)[0]
    for c in completions:
        assert c.logprobs[0] == pytest.approx(float(right[c.tokens[0]]), abs=1e-4)
    counts = Counter(c.tokens[0] for c in completions)
    assert chi_squared_p(counts, right) > 1e-3
    wrong = processed_logprobs(logits, 1.25 * sampling.temperature, sampling.top_p, sampling.top_k)[0]
    assert chi_squared_p(counts, wrong) < 1e-3, "this test could not tell one temperature from another"


@pytest.mark.parametrize("setup", ["tied", "untied"])
def test_greedy_decoding_equals_transformers(setup: str, request: pytest.FixtureRequest) -> None:
    policy, optimizer, engine = request.getfixturevalue(setup)
    engine.load(optimizer, [None], 0)
    for c in engine.generate(requests_for(policy, [None], 1), replace(SAMPLING, temperature=0.0), 0):
        generated = policy.model.generate(
            torch.tensor([c.prompt_tokens], device=policy.device),
            attention_mask=torch.ones(1, len(c.prompt_tokens), dtype=torch.int64, device=policy.device),
            do_sample=False,
            max_new_tokens=24,
        )
        assert generated[0, len(c.prompt_tokens) :].tolist() == list(c.tokens)
        assert (trainer_logprobs(policy, c, 1.0) - torch.tensor(c.logprobs)).abs().max() < 1e-4


def test_stopping_and_cutting(untied: Setup) -> None:
    policy, optimizer, engine = untied
    engine.load(optimizer, DRAWS, 0)
    stop = policy.stop_tokens[0]
    completions = engine.generate(requests_for(policy, list(DRAWS), 8), SAMPLING, 0)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        assert len(completion.logprobs) == len(completion.tokens)
        assert stop not in completion.tokens[:-1]
        if completion.finish_reason == "stop":
            assert completion.tokens[-1] == stop
        else:
            assert len(completion.tokens) == 24
            assert completion.tokens[-1] != stop
        assert "<|endoftext|>" not in completion.text


def test_what_cannot_be_decoded_is_refused_and_the_engine_goes_on(tied: Setup) -> None:
    policy, optimizer, engine = tied
    engine.load(optimizer, DRAWS[:1], 0)
    with pytest.raises(RuntimeError, match="is not loaded"):
        engine.generate(requests_for(policy, DRAWS[:2]), SAMPLING, 0)
    request = requests_for(policy, DRAWS[:1])[0]
    with pytest.raises(UserError, match=r"max_model_len = 512: problem a and its completion take 513"):
        engine.generate([request], replace(SAMPLING, max_new_tokens=512), 0)
    assert len(engine.generate([request], replace(SAMPLING, max_new_tokens=511), 0)) == 1


def test_the_weight_check_sees_every_tensor(tied: Setup) -> None:
    """One tensor at a time is pushed as NaN, which is what a first reload that misses it comes to."""
    _, optimizer, engine = tied
    engine.load(optimizer, DRAWS[:1], 0)
    expected, shared, replica = engine._weight_check._expected[0], engine._shared[0].tensors, engine._replicas[0]
    assert "lm_head.weight" in shared

    def check(name: str, tolerance: float) -> None:
        [evidence] = replica.call("push", [0], 0)
        found = WeightCheck(tolerance)
        found.expect(DRAWS[:1], 0, [expected])
        found.check(0, evidence.logprobs, name)

    for name, right in {name: tensor.clone() for name, tensor in shared.items()}.items():
        shared[name].fill_(math.nan)
        with pytest.raises(
            UserError, match=rf"does not compute with the weights of .* on {name} .* off by nan on average"
        ):
            check(name, 0.1)
        shared[name].copy_(right)
    check("all", 1e-5)


def test_decoding_is_reported_step_by_step(tied: Setup) -> None:
    """Reports tell long work from silence; here the first report is due at the first step."""
    policy, optimizer, engine = tied
    engine.load(optimizer, DRAWS[:1], 0)
    time.sleep(TICK_SECONDS)
    connection = engine._replicas[0].connection
    connection.send(("decode", ({0: (0, (1, 2, 3), 0)}, SAMPLING, policy.stop_tokens, math.inf, 1)))
    assert not connection.recv(), "no report"
    while not (answer := connection.recv()):
        pass
    (finished, _steps), _failure = answer
    assert len(finished) == 1


def test_rows_that_end_do_not_interrupt_the_others(tied: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica answers once for all rows of a draw, since no reply follows on one that has ended."""
    policy, optimizer, engine = tied
    engine.load(optimizer, DRAWS[:2], 0)
    call, calls = Replica.call, list[str]()

    def counted(replica: Replica, request: str, *arguments: Any) -> Any:
        calls.append(request)
        return call(replica, request, *arguments)

    monkeypatch.setattr(Replica, "call", counted)
    completions = engine.generate(requests_for(policy, DRAWS[:2], 20), SAMPLING, 0)
    assert calls == ["decode", "push", "decode"]
    assert len({len(completion.tokens) for completion in completions}) > 2


def test_a_tied_weight_may_go_by_the_name_of_the_head(tied: Setup) -> None:
    policy, _, engine = tied
    named = dict(policy.model.named_parameters())
    named["lm_head.weight"] = named.pop("model.embed_tokens.weight")
    optimizer = IVON(named.items(), ess=1e5)
    engine.load(optimizer, DRAWS[:1], 0)
    found = differences(policy, optimizer, engine.generate(requests_for(policy, DRAWS[:1]), SAMPLING, 0))
    assert found[DRAWS[0], DRAWS[0]] < 1e-3


@pytest.mark.skipif("torch.cuda.is_available()", reason="a bug of vLLM's build for CPUs")
def test_a_head_that_keeps_its_old_weights_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own bug, on the CPU: with tied weights in its configuration it does not repack the head."""
    policy = tiny("tiny-qwen2", tied=True)
    policy.model.config.architectures = ["Qwen2ForCausalLM"]
    monkeypatch.setattr(module, "_write_config", lambda model, folder: model.config.save_pretrained(folder))
    monkeypatch.setattr(payloads, "parameter_names", lambda model: {name: name for name, _ in model.named_parameters()})
    engine = engine_for(policy)
    pid = engine._replicas[0].pid
    optimizer = IVON(policy.model.named_parameters())
    with pytest.raises(UserError, match=r"does not compute with the weights of the mean at step 4"):
        engine.load(optimizer, [None], 4)
    assert gone(pid)
    with pytest.raises(RuntimeError, match="the vLLM engine is closed"):
        engine.load(optimizer, [None], 4)


def test_a_tensor_that_no_push_reaches_is_found_out_at_the_first_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself only warns. The bias is zero, and so is about what vLLM makes up for it."""
    name = "model.layers.1.self_attn.k_proj.bias"
    program = f"""
from threepo.rollout import replicas, vllm_replica

reload = vllm_replica.reload

def forgetful(worker, index):
    forgotten = vllm_replica._mapped[index].pop({name!r})
    reload(worker, index)
    vllm_replica._mapped[index][{name!r}] = forgotten

vllm_replica.reload = forgetful
replicas.serve_requests(vllm_replica.Server)
"""
    monkeypatch.setattr(module, "_PROGRAM", program)
    policy = tiny("tiny-qwen2", tied=True)
    assert name in policy.model.state_dict()
    engine = engine_for(policy)
    with pytest.raises(UserError, match=r"does not compute with the weights of the mean at step 0 .* off by nan"):
        engine.load(IVON(policy.model.named_parameters()), [None], 0)


def test_a_replica_that_is_stuck_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Already at its start. test_replicas.py tests that a slow replica is not taken for a stuck one."""
    pids = []

    def stopped(*arguments: Any) -> Replica:
        replica = Replica(*arguments)
        os.kill(replica.pid, signal.SIGSTOP)
        pids.append(replica.pid)
        return replica

    monkeypatch.setattr(module, "Replica", stopped)
    with pytest.raises(UserError, match=r"replica [01] \(process \d+\) sent nothing for 5 seconds during 'start'"):
        engine_for(tiny("tiny-llama", tied=False), replicas=2, timeout_s=5.0)
    assert len(pids) == 2
    assert all(map(gone, pids))


def test_a_replica_that_dies_is_an_error_at_once() -> None:
    policy = tiny("tiny-llama", tied=False)
    optimizer = IVON(policy.model.named_parameters())
    engine = engine_for(policy, replicas=2)
    pids = [replica.pid for replica in engine._replicas]
    engine.load(optimizer, DRAWS[:2], 0)
    threading.Timer(1.0, os.kill, (pids[1], signal.SIGKILL)).start()
    many = [replace(request, rollout=i) for i in range(2000) for request in requests_for(policy, DRAWS[:2], 1)]
    began = time.monotonic()
    with pytest.raises(UserError, match=r"replica 1 ended during 'decode' \(killed by SIGKILL\)"):
        engine.generate(many, replace(SAMPLING, max_new_tokens=300), 0)
    assert time.monotonic() - began < 10
    assert all(map(gone, pids)), "the other replica lives on"


def test_vllm_that_does_not_start_is_an_error() -> None:
    with pytest.raises(
        UserError, match=r"vLLM does not start: .*No available memory for the cache blocks.*; its log is in "
    ):
        engine_for(tiny("tiny-llama", tied=False), kv_cache_memory_bytes=1)


def test_vllm_reads_no_posterior_as_weights(tmp_path: Path) -> None:
    """A checkpoint has tensors of the same names in several files."""
    weight_utils = pytest.importorskip("vllm.model_executor.model_loader.weight_utils")
    run = api.train(train_config(tmp_path / "run", "method.preset=c3po", "run.steps=1"))
    folder = model_folder(run)
    files = sorted(map(str, folder.glob("*.safetensors")))
    assert len(files) == 3
    index = "model.safetensors.index.json"
    found = weight_utils.filter_duplicate_safetensors_files(files, str(folder), index)
    assert found == [str(folder / "model.safetensors")]


@pytest.mark.skipif("torch.cuda.device_count() == 1", reason="needs two GPUs")
def test_train_and_evaluate_with_vllm(tmp_path: Path) -> None:
    """C3PO from the command line: the correction compares the engine's log-probs with the trainer's."""
    run = tmp_path / "run"
    engine = ("engine.vllm.replicas=2", "engine.vllm.enforce_eager=true", f"engine.vllm.kv_cache_memory_bytes={CACHE}")
    command = ["train", *VLLM, *engine, "method.draws=4", "run.steps=2", f"run.folder={run}"]
    assert main(command) == 0
    rows = [row for row in read_metrics(run) if row["step"] >= 0]
    assert len(rows) == 2
    table = pyarrow.parquet.read_table(run / "completions" / "step-000001.parquet").to_pylist()
    assert len(table) == 32
    assert len({row["draw_index"] for row in table}) == 4
    # The gradient's draw is another one than the rollout's, close to it at this ess: seen were 0.001 to 0.07.
    apart = [abs(row["behaviour_logprob_sum"] - row["gradient_logprob_sum"]) for row in table]
    assert 1e-4 < max(apart) < 0.3
    settings = ["engine.vllm.replicas=1", "eval.problems=4", "eval.samples=2", "eval.draws=2"]
    assert main(["eval", str(run), *settings, "--output", str(tmp_path / "eval")]) == 0


def test_a_stream_goes_on_after_a_replica_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts are made while the policy is updated. The resumed run repeats its journal, with the same completions."""
    run, pids = tmp_path / "run", list[int]()

    class Noted(Replica):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pids.append(self.pid)

    def kill_later() -> None:
        while not run.is_dir() or len(read_metrics(run)) < 4:
            time.sleep(0.05)
        os.kill(pids[0], signal.SIGKILL)

    monkeypatch.setattr(module, "Replica", Noted)
    command = ["train", *VLLM, "engine.vllm.enforce_eager=true", f"engine.vllm.kv_cache_memory_bytes={CACHE}"]
    command += ["overlap.stream=true", "overlap.lag=2", "run.steps=100000", "run.checkpoint_every=2"]
    threading.Thread(target=kill_later, daemon=True).start()
    assert main([*command, f"run.folder={run}"]) == 2
    journal = (run / "journal.jsonl").read_text()
    done = len(journal.splitlines())
    before = [tokens(run, step) for step in range(done - 1)]
    assert main(["train", "--resume", str(run), f"run.steps={done + 3}"]) == 0
    assert (run / "journal.jsonl").read_text().startswith(journal)
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(done + 3))
    assert all(map(math.isfinite, (value for row in rows for value in row.values())))
    if not torch.cuda.is_available():  # where sums are added up in any order, and a token may come out otherwise
        assert [tokens(run, step) for step in range(done - 1)] == before


def tokens(run: Path, step: int) -> list[list[int]]:
    table = pyarrow.parquet.read_table(run / "completions" / f"step-{step:06d}.parquet")
    return table.column("tokens").to_pylist()  # type: ignore[no-any-return]
