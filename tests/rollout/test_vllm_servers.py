"""vLLM servers on inference nodes, run for real: two of vLLM's own HTTP servers on this machine.

make test-vllm
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from socket import socket
from typing import Any

import pyarrow.parquet
import pytest
import torch

import threepo
from programs import Leader
from ranks.launch import launch_anew
from rollout.asked import differences, requests_for
from rollout.test_vllm import gone, tiny
from runs import VLLM
from threepo import api
from threepo.cli import main
from threepo.config import DataConfig, EnvironmentConfig, LoRAConfig, ModelConfig, SamplingConfig
from threepo.config.engine import VLLMConfig, VLLMEngineConfig
from threepo.errors import ThreepoWarning, UserError
from threepo.models.policy import Policy, load_policy
from threepo.posterior.draw_file import file_contents
from threepo.posterior.gaussian import Posterior
from threepo.posterior.ivon import IVON
from threepo.ranks import pushed_files, vllm_servers
from threepo.ranks.vllm_servers import VLLMServers
from threepo.ranks.world import ALONE
from threepo.rollout.engines import Talk
from threepo.rollout.environments import Environments
from threepo.rollout.episodes import EpisodeEngine
from threepo.rollout.inference_server import InferenceServer
from threepo.rollout.weight_check import Logprobs, expected_logprobs
from threepo.run_folder import checkpoints, read_metrics
from threepo.types import Arm, Completion, Draw, Request

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` installs it"
)

SAMPLING = SamplingConfig(max_new_tokens=24)
DRAWS = [Draw(0, 0, 0), Draw(0, 0, 1), Draw(0, 0, 2, arm=Arm("attention", 2.0))]
OPTIONS = {
    "--load-format": "dummy",
    "--weight-transfer-config": '{"backend": "threepo"}',
    "--logprobs-mode": "processed_logprobs",
    "--hf-overrides": '{"tie_word_embeddings": false}',
    "--skip-tokenizer-init": None,
    "--enable-scale-out": None,
    "--dtype": "float32",
    "--max-num-seqs": "64",
}
"""Options of the documented command."""
PATIENCE = 240.0
"""Seconds until servers must have started."""


@dataclass
class Started:
    """A server's process, which leads a group of its own."""

    url: str
    process: Leader
    log: Path

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def answers(self, path: str) -> bool:
        try:
            return bool(urllib.request.urlopen(self.url + path, timeout=5).status == 200)
        except OSError:
            return False


@contextmanager
def started(model: Path, log: Path, *more: str, **options: str) -> Iterator[Started]:
    """A server for the model in this folder, which is killed in the end; an empty option is left out."""
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = OPTIONS | {"--model": str(model), "--host": "127.0.0.1", "--port": str(port), "--enforce-eager": None}
    given |= {"--kv-cache-memory-bytes": str(1 << 27)} | options
    words = [word for option, value in given.items() if value != "" for word in (option, value) if word is not None]
    words += more
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # as on a GPU: one worker is no process of its own
    program = f"""
import runpy, sys

sys.argv[1:] = {words}
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""
    log.touch()
    process = Leader(program, os.environ | environment, str(log))
    server = Started(f"http://127.0.0.1:{port}", process, log)
    try:
        yield server
    finally:
        with suppress(ProcessLookupError):  # a test has killed it
            server.signal(signal.SIGKILL)
        process.wait()
        assert gone(-process.pid), "a process of the server lives on"


def wait_for(condition: Callable[[], bool], *servers: Started) -> None:
    """Wait until something holds; an AssertionError after `PATIENCE` seconds, or when a server has ended."""
    limit = time.monotonic() + PATIENCE
    while not condition():
        for server in servers:
            assert server.process.poll() is None, server.log.read_text()[-3000:]
        assert time.monotonic() < limit
        time.sleep(0.2)


@pytest.fixture(scope="module")
def policy() -> Policy:
    """A Qwen2 with a tied head."""
    return tiny("tiny-qwen2", tied=True)


@pytest.fixture(scope="module")
def servers(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Started]]:
    """Two of them; they take about as long to start as one."""
    folder = tmp_path_factory.mktemp("servers")
    policy.model.config.save_pretrained(folder / "model")
    with started(folder / "model", folder / "0.log") as one, started(folder / "model", folder / "1.log") as other:
        wait_for(lambda: one.answers("/health") and other.answers("/health"), one, other)
        yield [one, other]


def engine_for(
    policy: Policy, servers: list[Started], folder: Path, dtype: Any = "float32", **settings: int
) -> VLLMServers:
    urls = tuple(server.url for server in servers)
    own = VLLMConfig(servers=urls, weights_folder=str(folder), timeout_s=60.0, **settings)
    return VLLMServers(policy, VLLMEngineConfig(dtype=dtype, vllm=own), ALONE)


def test_a_tensor_that_the_first_push_lacks_is_found_out(
    policy: Policy, servers: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first test of this file, since it needs servers that hold nothing yet.

    vLLM itself only warns. The norm is about as vLLM made it up: without ruined weights the weight check would agree.
    """
    name = "model.norm.weight"
    assert name in policy.model.state_dict()

    def without_one(*arguments: Any) -> Any:
        tensors, metadata = file_contents(*arguments)
        names = {parameter: called for parameter, called in json.loads(metadata["names"]).items() if parameter != name}
        return tensors, metadata | {"names": json.dumps(names)}

    monkeypatch.setattr(vllm_servers, "file_contents", without_one)
    optimizer = IVON(policy.model.named_parameters(), ess=1e5)
    with closing(engine_for(policy, servers, tmp_path)) as engine:
        with pytest.raises(UserError, match=r"1 tensors are not the trainer's own of the mean: model\.norm\.weight"):
            engine.load(optimizer, [None], 0)
        # Where the trainer's own sums lack it, too, the weights that were ruined before the first push tell.
        monkeypatch.setattr(vllm_servers, "source_sums", lambda *_: {})
        words = r"with the weights of the mean at step 0 on http\S+ that it was given: .* off by nan on average"
        with pytest.raises(UserError, match=words):
            engine.load(optimizer, [None], 0)


@pytest.mark.parametrize("draws", [[*DRAWS, None], DRAWS[:2], [None]], ids=len)
def test_servers_and_trainer_agree_for_every_draw(
    draws: list[Draw | None], policy: Policy, servers: list[Started], tmp_path: Path
) -> None:
    """Four draws in turn, a draw for each server, and a draw that two servers share; told by address alone."""
    optimizer = IVON(policy.model.named_parameters(), ess=1e5)
    requests = requests_for(policy, draws, rollouts=24 // len(draws))
    (tmp_path / "mine.safetensors").touch()
    with closing(engine_for(policy, servers, tmp_path)) as engine:
        engine.prepare(len(draws), 300)
        for step in (0, 1):
            engine.load(optimizer, draws, step)
            assert len(list(tmp_path.glob("*.safetensors"))) == 2
            completions = engine.generate(requests, SAMPLING, seed=1)
            assert [(c.problem, c.draw, c.rollout) for c in completions] == [
                (r.problem, r.draw, r.rollout) for r in requests
            ]
            assert {c.policy_step for c in completions} == {step}
            assert {c.finish_reason for c in completions} == {"stop", "length"}
            for (draw, other), difference in differences(policy, optimizer, completions).items():
                if draw == other:
                    assert difference < 1e-5
                else:
                    assert difference > 1e-2, "a server took one draw for another"
    assert list(tmp_path.glob("*.safetensors")) == [tmp_path / "mine.safetensors"]
    with closing(engine_for(policy, servers[:1], tmp_path)) as alone:
        alone.load(optimizer, draws, 1)
        again = alone.generate(requests, SAMPLING, seed=1)
    assert [c.tokens for c in again] == [c.tokens for c in completions], "depends on the number of servers"


def test_a_conversation_goes_on_while_another_waits_for_its_environment(
    policy: Policy, servers: list[Started], tmp_path: Path
) -> None:
    optimizer = IVON(policy.model.named_parameters(), ess=1e5)
    requests = requests_for(policy, DRAWS[:1], rollouts=1)
    assert len(requests) > 1
    others = threading.Semaphore(0)
    heard: dict[int, list[Completion]] = {row: [] for row in range(len(requests))}

    def follow(replies: Sequence[tuple[int, Completion]]) -> dict[int, Request]:
        ((row, reply),) = replies
        heard[row].append(reply)
        turn = len(heard[row])
        if row == 0 and turn == 1:
            assert all(others.acquire(timeout=60) for _ in requests[1:]), "the others did not end before its answer"
        if turn == 3:
            others.release()
            return {}
        return {row: replace(requests[row], prompt_tokens=(*reply.prompt_tokens, *reply.tokens), turn=turn)}

    with closing(engine_for(policy, servers, tmp_path)) as engine:
        engine.load(optimizer, DRAWS[:1], 0)
        engine.converse(requests, SAMPLING, 1, Talk(follow, 300, answer_steps=0))
    assert [len(replies) for replies in heard.values()] == [3] * len(requests)
    said = [reply for replies in heard.values() for reply in replies]
    assert {reply.turn for reply in said} == {0, 1, 2}
    assert max(differences(policy, optimizer, said).values()) < 1e-5


def test_one_draw_writes_all_replies_of_an_episode(
    policy: Policy, servers: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probs of each reply are those of the trainer at its draw, and of no other."""
    monkeypatch.setattr(policy.model.generation_config, "eos_token_id", [*range(0, 250, 4), *policy.stop_tokens])
    optimizer = IVON(policy.model.named_parameters(), ess=1e5)
    echo = EnvironmentConfig(factory="worlds:Echo")
    draws = [*DRAWS, None]
    inner = engine_for(policy, servers, tmp_path)
    with closing(EpisodeEngine(inner, policy, echo, DataConfig(train="x"), Environments(echo))) as engine:
        engine.load(optimizer, draws, 0)
        completions = engine.generate(requests_for(policy, draws), SAMPLING, seed=1)
    assert sum(len(c.own) for c in completions) > 1.5 * len(completions)
    for (draw, other), difference in differences(policy, optimizer, completions).items():
        assert difference < 1e-5 if draw == other else difference > 1e-2


def test_a_server_in_bfloat16(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean, and what an arm leaves alone, come from the file in float32. Two workers add up their sums.

    Then all is rounded, and only changes are pushed in between; a wrong one is found.
    """
    policy.model.config.save_pretrained(tmp_path / "model")
    optimizer = IVON(policy.model.named_parameters(), ess=1e5)
    with started(
        tmp_path / "model", tmp_path / "log", **{"--dtype": "bfloat16", "--tensor-parallel-size": "2"}
    ) as server:
        wait_for(lambda: server.answers("/health"), server)
        with closing(engine_for(policy, [server], tmp_path / "weights", "bfloat16")) as engine:
            for step, draw in enumerate([DRAWS[0], None, DRAWS[2], None]):
                engine.load(optimizer, [draw], step)
        with closing(engine_for(policy, [server], tmp_path / "weights", "bfloat16", full_push_every=4)) as engine:
            quiet = IVON(policy.model.named_parameters(), ess=1e14)
            with pytest.warns(ThreepoWarning, match=r"a draw differs from the mean in \d\.\d% of the weights"):
                engine.load(quiet, DRAWS[:1], 0)
        with closing(engine_for(policy, [server], tmp_path / "weights", "bfloat16", full_push_every=4)) as engine:
            pushed = []
            for step, draw in enumerate([DRAWS[0], None, DRAWS[2], DRAWS[1], DRAWS[1]]):
                pushed.append(engine.load(optimizer, [draw], step))
                move_a_little(policy)
            assert pushed[0] == pushed[4] > 4 * max(pushed[1:4])
            assert min(pushed) > 0
            of_each = requests_for(policy, [DRAWS[1]], rollouts=4)
            assert {c.policy_step for c in engine.generate(of_each, SAMPLING, seed=1)} == {4}
            changes = pushed_files._changes
            monkeypatch.setattr(pushed_files, "_changes", lambda *found: one_wrong(*changes(*found)))
            with pytest.raises(UserError, match="tensors are not the trainer's own of Draw"):
                engine.load(optimizer, DRAWS[:1], 5)
        assert "compared to the bit" not in server.log.read_text()


def move_a_little(policy: Policy) -> None:
    """Move every weight by less than bfloat16 resolves of most."""
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(1e-6)


def one_wrong(places: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values[:1] += 0.1
    return places, values


def test_another_draw_than_told_fails_the_weight_check(
    policy: Policy, servers: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = InferenceServer.tell

    async def swapped(self: InferenceServer, pushed: Any, draw: Draw, sums: Any, *arguments: Any) -> Logprobs:
        return await tell(self, pushed, replace(draw, index=1 - draw.index), {}, *arguments)

    monkeypatch.setattr(InferenceServer, "tell", swapped)
    optimizer = IVON(policy.model.named_parameters(), ess=1e5)
    words = rf"with the weights of Draw\(seed=0, step=0, index=1, .*\) at step 7 on {servers[1].url} that"
    with closing(engine_for(policy, servers[1:], tmp_path)) as engine, pytest.raises(UserError, match=words):
        engine.load(optimizer, DRAWS[1:2], 7)


def test_a_number_that_the_file_has_wrong_is_found_for_the_draw_whose_turn_it_is(
    policy: Policy, servers: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs agree, and the server has what it made. The first of two draws has its turn first."""
    name, loads = "model.layers.0.mlp.down_proj.weight", []

    def one_wrong(*arguments: Any) -> Any:
        tensors, metadata = file_contents(*arguments)
        loads.append(1)
        if len(loads) > 2:
            tensors[f"mean {name}"] = tensors[f"mean {name}"].clone()
            tensors[f"mean {name}"][3, 5] *= 1.01
        return tensors, metadata

    monkeypatch.setattr(vllm_servers, "file_contents", one_wrong)
    optimizer = IVON(policy.model.named_parameters(), ess=1e5)
    with closing(engine_for(policy, servers, tmp_path)) as engine:
        for step in range(2):
            engine.load(optimizer, DRAWS[:2], step)
        words = rf"{servers[0].url} failed to /update_weights: .*1 tensors are not the trainer's own of Draw.*: {name}"
        with pytest.raises(UserError, match=words):
            engine.load(optimizer, DRAWS[:2], 2)


def test_what_cannot_work_is_said_in_a_line(policy: Policy, servers: list[Started], tmp_path: Path) -> None:
    optimizer = IVON(policy.model.named_parameters(), ess=1e5)
    with pytest.raises(UserError, match=r"http\S+ was started with --dtype float32; start it with bfloat16"):
        engine_for(policy, servers, tmp_path, "bfloat16")
    with pytest.raises(UserError, match=r"http://127.0.0.1:9 is not there .*; start it"):
        engine_for(policy, [*servers, replace(servers[0], url="http://127.0.0.1:9")], tmp_path)
    with closing(engine_for(policy, servers, tmp_path)) as engine:
        with pytest.raises(UserError, match=r"the longest prompt and its completion take 513 tokens, .* takes 512"):
            engine.prepare(1, 513)
        with pytest.raises(UserError, match="is in use by another process"):
            engine_for(policy, servers, tmp_path)
        engine.load(optimizer, DRAWS[:2], 0)
        post(servers[0], "/start_weight_update")  # as a run that was killed may leave it
        engine.load(optimizer, DRAWS[:2], 1)
        post(servers[1], "/update_weight_version", new_version="default")  # as after a restart
        with pytest.raises(UserError, match=rf"{servers[1].url} answered with the weights 'default' and not with '"):
            engine.generate(requests_for(policy, list(DRAWS[:2])), SAMPLING, 0)
        engine._files._folder = tmp_path / "gone"
        with pytest.raises(UserError, match=r"cannot write .*gone"):
            engine.load(optimizer, DRAWS[:2], 2)


def test_the_documented_command_has_these_options() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    assert all(option in page for option in OPTIONS)
    assert all(value in page for value in OPTIONS.values() if value and "{" in value)


def post(server: Started, path: str, **body: str) -> None:
    content = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), content)
    urllib.request.urlopen(request, timeout=30).close()


def run_of(folder: Path, servers: list[Started], draws: int, steps: int) -> list[str]:
    """The command for C3PO on the model of `tiny`."""
    urls = json.dumps([server.url for server in servers])
    where = (f"engine.vllm.servers={urls}", f"engine.vllm.weights_folder={folder}/weights", "engine.vllm.timeout_s=5")
    own = (f"method.draws={draws}", f"run.steps={steps}", "run.checkpoint_every=0", "model.tiny.layers=2")
    return ["train", *VLLM, *where, *own]


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(run / "completions" / f"step-{step:06d}.parquet").to_pylist()


@pytest.mark.parametrize("draws", [2, 4])
def test_train_and_evaluate_with_servers(draws: int, servers: list[Started], tmp_path: Path) -> None:
    """The run starts from the command line, then with four draws on three ranks, two of which drive a server."""
    command, run = run_of(tmp_path, servers, draws, steps=2), tmp_path / "run"
    assert main([*command, f"run.folder={run}"]) == 0
    steps = [row for row in read_metrics(run) if row["step"] >= 0]
    assert [row["step"] for row in steps] == [0, 1]
    assert steps[0]["compute/pushed_bytes"] == steps[1]["compute/pushed_bytes"] > 0
    rows = rows_of(run, 1)
    assert len(rows) == 32
    assert len({row["draw_index"] for row in rows}) == draws
    # The gradient's draw is another one than the rollout's, close to it at this ess.
    apart = [abs(row["behaviour_logprob_sum"] - row["gradient_logprob_sum"]) for row in rows]
    assert 1e-4 < max(apart) < 0.3
    if draws == 2:
        settings = ["eval.problems=4", "eval.samples=2", "eval.draws=2", "--output", str(tmp_path / "eval")]
        assert main(["eval", str(run), *settings]) == 0
        return
    launch_anew("-m", "threepo", *command, f"run.folder={tmp_path}/ranked", ranks=3)
    for one, other in zip(rows_of(run, 0), rows_of(tmp_path / "ranked", 0), strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["behaviour_logprob_sum"] == pytest.approx(other["behaviour_logprob_sum"], abs=1e-4)
    assert len(rows_of(tmp_path / "ranked", 1)) == 32


def test_episodes_on_servers_are_dealt_to_ranks(
    servers: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has some of the environments; alone or on two ranks, the episodes are the same."""
    tests = str(Path(__file__).parents[1])  # where the environment is
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))
    policy = tiny("tiny-qwen2", tied=True)
    policy.model.generation_config.eos_token_id = [policy.tokenizer.eos_token_id, *range(0, 250, 8)]
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    settings = [setting for setting in VLLM if not setting.startswith("model.")]
    settings += [f"model.path={tmp_path / 'model'}", "method.draws=4", "run.steps=2", "method.preset=m3po"]
    settings += [
        f'engine.vllm.servers=["{servers[0].url}", "{servers[1].url}"]',
        "optimizer.lr=10",
        "optimizer.ess=1e8",
    ]
    settings += ["reward.function=environment", "environment.factory=worlds:Ends", "sampling.max_new_tokens=12"]
    written = []
    for ranks in (0, 2):
        folder = tmp_path / f"on-{ranks}"
        own = [f"run.folder={folder}", f"engine.vllm.weights_folder={tmp_path / 'weights'}"]
        launch_anew("-m", "threepo", "train", *settings, *own, ranks=ranks)
        rows = [
            row
            for file in sorted((folder / "completions").glob("*.parquet"))
            for row in pyarrow.parquet.read_table(file).to_pylist()
        ]
        for row in rows:
            assert row["gradient_logprob_sum"] == pytest.approx(row["behaviour_logprob_sum"], abs=1e-3)
        assert sum(len(json.loads(row["episode"])["own"]) for row in rows) > 1.2 * len(rows)
        written.append([(row["tokens"], row["episode"]) for row in rows])
    assert written[0] == written[1]


def test_servers_write_for_trls_trainer(
    servers: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each serves two draws, told by address alone."""
    pytest.importorskip("trl")
    from plugins import trl_models

    monkeypatch.setattr(trl_models, "new_policy", lambda: tiny("tiny-qwen2", tied=True))
    own = {"servers": tuple(server.url for server in servers), "weights_folder": str(tmp_path / "weights")}
    engine = {"kind": "vllm", "vllm": own}
    settings = {"method": threepo.C3PO, "ivon": trl_models.NOISY, "max_steps": 2}
    trainer = trl_models.make(trl_models.Checked, tmp_path, engine=engine, **settings)
    trainer.train()
    assert len(trainer.own[True]) == 2 * 4
    assert max(trainer.own[True]) < 1e-4
    assert min(trainer.others) > 1e-2


def test_a_run_with_a_lag_is_the_same_whatever_its_servers_and_it_meet(
    servers: list[Started], tmp_path: Path, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """A server falls behind, the trainer is killed between a push and the checkpoint after it, a server hangs."""
    settings = "overlap.lag=1", "run.checkpoint_every=1", "engine.vllm.timeout_s=12"
    command = *run_of(tmp_path, servers, draws=2, steps=18), *settings
    quiet, run, server = tmp_path / "quiet", tmp_path / "run", servers[1]
    request.addfinalizer(lambda: server.signal(signal.SIGCONT))  # for the tests after it, if it fails
    assert main([*command, f"run.folder={quiet}"]) == 0

    def steps_done() -> int:
        return len(read_metrics(run)) if run.is_dir() else 0

    def stop_server_in(more: int) -> None:
        """Stop it when the run is so many steps further."""
        enough = steps_done() + more
        wait_for(lambda: steps_done() >= enough)
        server.signal(signal.SIGSTOP)

    with subprocess.Popen([sys.executable, "-m", "threepo", *command, f"run.folder={run}"]) as trainer:
        stop_server_in(4)
        time.sleep(2.0)  # of the 12 that it may take
        server.signal(signal.SIGCONT)
        stop_server_in(4)
        time.sleep(2.0)  # rollouts have been asked for, and the checkpoint waits for them
        trainer.kill()
    server.signal(signal.SIGCONT)
    assert 8 <= steps_done() < 14
    pushed = max(file.stat().st_mtime for file in (tmp_path / "weights").iterdir())
    assert pushed > checkpoints(run)[-1][1].stat().st_mtime, "it was killed after the checkpoint"

    watch = threading.Thread(target=stop_server_in, args=(4,))
    watch.start()
    assert main(["train", "--resume", str(run)]) == 2
    watch.join()
    assert f"{server.url} did not answer /" in capfd.readouterr().err.strip().splitlines()[-1]
    assert 12 <= steps_done() < 18
    server.signal(signal.SIGCONT)
    wait_for(lambda: server.answers("/health"))
    assert main(["train", "--resume", str(run)]) == 0
    for step in range(18):
        assert rows_of(run, step) == rows_of(quiet, step)


def test_a_server_that_is_stopped_or_killed_ends_the_run_with_a_checkpoint(
    servers: list[Started], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last test of this file: the server is not started again."""
    run, last = tmp_path / "run", servers[1]

    def steps_done() -> int:
        return len(read_metrics(run)) if run.is_dir() else 0

    def train_until(number: signal.Signals, *arguments: str) -> str:
        """The run's message after the server got a signal in the middle of it."""
        enough = steps_done() + 3
        watch = threading.Thread(target=lambda: (wait_for(lambda: steps_done() >= enough), last.signal(number)))
        watch.start()
        status = main(["train", *arguments])
        watch.join()
        said = capfd.readouterr().err.strip().splitlines()[-1]
        assert status == 2, said
        checkpoint = max((run / "checkpoints").iterdir())
        assert int(checkpoint.name.removeprefix("step-")) == max(row["step"] for row in read_metrics(run)) + 1
        return said

    begin = *run_of(tmp_path, servers, draws=2, steps=100_000)[1:], f"run.folder={run}"
    assert f"{last.url} did not answer /" in train_until(signal.SIGSTOP, *begin)
    last.signal(signal.SIGCONT)
    wait_for(lambda: last.answers("/health"))
    said = train_until(signal.SIGKILL, "--resume", str(run))
    assert f"engine.vllm.servers: {last.url} " in said
    assert "broke off during" in said or "is not there" in said


def test_any_vllm_server_loads_draws_that_were_written_as_adapters(tmp_path: Path) -> None:
    """`threepo sample` writes them; one server has them under separate names, with the trainer's log-probs."""
    pytest.importorskip("peft")
    tiny("tiny-qwen2", tied=True).save(tmp_path / "base")
    policy = load_policy(ModelConfig(path=str(tmp_path / "base"), lora=LoRAConfig(rank=8, alpha=12)))
    optimizer = IVON(policy.model.named_parameters(), ess=1e4, hess_init=1e-2)
    policy.save(tmp_path / "mean")
    Posterior.of(optimizer).save(tmp_path / "mean")
    draws = api.sample(tmp_path / "mean", tmp_path / "drawn", range(2))
    modules = ["--enable-lora", "--lora-modules", *(f"{path.name}={path}" for path in draws)]
    options = {"--load-format": "auto"} | dict.fromkeys(
        ("--skip-tokenizer-init", "--weight-transfer-config", "--hf-overrides"), ""
    )
    prompt = list(range(5, 40))
    with started(tmp_path / "base", tmp_path / "log", *modules, **options) as server:
        wait_for(lambda: server.answers("/health"), server)
        for path in draws:
            question = {"model": path.name, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0}
            data, kind = json.dumps(question).encode(), {"Content-Type": "application/json"}
            asked = urllib.request.Request(server.url + "/v1/completions", data, kind)
            answer = json.load(urllib.request.urlopen(asked, timeout=60))
            found = torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(prompt)])
            own = load_policy(ModelConfig(path=str(path))).model
            expected, _ = expected_logprobs(own, {}, prompt, policy.device)
            assert float((found - expected).abs().max()) < 1e-4
            mean, _ = expected_logprobs(policy.model, {}, prompt, policy.device)
            assert float((expected - mean).abs().max()) > 1e-2
