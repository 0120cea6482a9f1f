"""The vLLM engine: continuous batching in separate processes, with weights pushed into them.

The trainer writes the weights of every draw into shared memory. A replica (rollout.vllm_server) loads them from there
with vLLM's reload_weights, and flushes its prefix cache. With one replica the draws of a step are decoded in turn, with
a replica per draw at the same time.

What is written for a draw is rollout.contents' concern; that vLLM computes with it is shown by a probe (rollout.probe).

vLLM is given a model whose output head is not tied to its embedding, and the head's weights by name. If its
configuration ties them, the CPU build of vLLM 0.32 keeps using the packed copy of the head that it made at its start: a
reload repacks only layers that weights are loaded for, and none are loaded for a tied head.

Neither file has run on a GPU yet.
"""

import copy
import importlib.util
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from threepo.config import SamplingConfig, VLLMConfig, VLLMEngineConfig
from threepo.errors import UserError
from threepo.models.policy import Policy
from threepo.posterior.policy_optimizer import WeightSource
from threepo.rollout.contents import Weights, contents_of, rounded
from threepo.rollout.engines import completed, row_key, rows_by_draw
from threepo.rollout.memory import SharedTensors
from threepo.rollout.probe import TOLERANCE, check_probe, probe_tokens
from threepo.rollout.replicas import Replica, ReplicaError, call_all
from threepo.rollout.vllm_server import Decoded, Held
from threepo.types import Completion, Draw, Request

_TORCHRUN = re.compile("(|LOCAL_|GROUP_|ROLE_)(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
"""Variables by which torchrun tells a rank who it is; vLLM would take itself for that rank."""
_WHOLE = -1
"""The index of the shared memory with what draws are beside."""
_PROGRAM = "from threepo.rollout import replicas, vllm_server; replicas.serve_requests(vllm_server.Server)"


class VLLMEngine:
    """A `RolloutEngine` in `settings.vllm.replicas` processes; they end with `close`, with this object, or with Python.

    After an error of a replica or of a push the engine is closed. `UserError` if vLLM is missing or does not start.
    Draw number i of a load is in shared memory i, which replica i % replicas reads. A replica has one slot, or one for
    each of engine.vllm.adapters.
    """

    def __init__(self, policy: Policy, settings: VLLMEngineConfig) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UserError("engine.kind = 'vllm': vLLM is not installed; in a clone, pip install '.[vllm]'")
        self._policy = policy
        self._max_length = settings.vllm.max_model_len or policy.context
        if self._max_length > policy.context:
            raise UserError(
                f"engine.vllm.max_model_len = {self._max_length}: the model's context is {policy.context}; lower it"
            )
        coarse = torch.bfloat16 if rounded(policy) else getattr(torch, settings.dtype)
        self._tolerance = settings.vllm.probe_tolerance or TOLERANCE[coarse]
        self._contents = contents_of(policy, settings)
        self._slots = settings.vllm.adapters if self._contents.adapters else 1
        self._probe = probe_tokens(policy, self._max_length - 1)
        self._whole: list[SharedTensors] = []
        """What draws are beside, while replicas may read it."""
        self._shared: list[SharedTensors] = []
        self._draws: list[Draw | None] = []
        self._expected: list[tuple[int, torch.Tensor]] = []
        """For each loaded draw: the checksum of its weights, and the probe's log-probs under them."""
        self._step = -1
        environments = _environments(settings.vllm)  # before anything is started
        folder = Path(tempfile.mkdtemp(prefix="threepo-vllm-"))
        self._replicas: list[Replica] = []
        self._held = (self._replicas, self._shared, self._whole)
        self._end = weakref.finalize(self, _close, self._held, folder)
        _write_config(policy.architecture, folder)
        with self._closed_on_error():
            for i, environment in enumerate(environments):
                name, log = f"engine.vllm: replica {i}", folder / f"replica-{i}.log"
                self._replicas.append(Replica(name, _PROGRAM, environment, log, settings.vllm.timeout_s))
            start = ("start", settings, str(folder), self._max_length, self._probe, dict(self._contents.adapters))
            try:
                call_all(dict.fromkeys(self._replicas, start))
            except ReplicaError as error:
                reason = str(error).strip().splitlines()[-1]
                raise UserError(
                    f"engine.kind = 'vllm': vLLM does not start: {reason}; its log is in {folder}"
                ) from error
            if self._push_whole(self._contents.frozen()):
                call_all(dict.fromkeys(self._replicas, ("forget", _WHOLE)))
                self._whole.pop().close()

    def prepare(self, draws: int, tokens: int) -> None:
        """See `RolloutEngine.prepare`: the memory that vLLM takes is its own, reserved when it starts."""
        self._check_length("the longest prompt", tokens)
        with self._closed_on_error():
            self._share(draws)

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> None:
        """Copy the weights of every draw into shared memory, in the engine's dtype, and push a draw to each replica.

        The other draws are pushed by `generate` when their turn comes. `UserError` if a replica has died, is stuck, or
        shows other weights by its probe.
        """
        distinct = list(dict.fromkeys(draws))
        with self._closed_on_error():
            self._draws, self._expected, self._step = [], [], step
            self._share(len(distinct))
            self._push_whole(self._contents.mean(posterior))
            beside = self._whole[0].tensors if self._whole else {}
            for draw, shared in zip(distinct, self._shared, strict=False):
                self._contents.write(posterior, draw, shared.tensors)
                expected = self._contents.logprobs(shared.tensors, beside, self._probe)
                self._expected.append((shared.checksum(), expected))
            self._draws, count = distinct, len(self._replicas)
            first = {i: list(range(i, len(distinct), count))[: self._slots] for i in range(min(count, len(distinct)))}
            answers = call_all({self._replicas[i]: ("push", *mine) for i, mine in first.items()})
            for mine, shown in zip(first.values(), answers, strict=True):
                for index, held in zip(mine, shown, strict=True):
                    self._check(index, held)

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """See `RolloutEngine.generate`. `UserError` for a request longer than engine.vllm.max_model_len."""
        for request in requests:
            self._check_length(request.problem.label, len(request.prompt_tokens) + sampling.max_new_tokens)
        keys = [row_key(seed, self._step, request.problem.id, request.rollout) for request in requests]
        encoded = [(request.prompt_tokens, key[0] >> 1) for request, key in zip(requests, keys, strict=True)]
        rows = rows_by_draw(requests, self._draws)
        work: dict[Replica, tuple[Any, ...]] = {}
        for first, replica in enumerate(self._replicas):
            mine = range(first, len(rows), len(self._replicas))
            if own := {index: [encoded[i] for i in rows[index]] for index in mine if rows[index]}:
                work[replica] = "generate", own, sampling, self._policy.stop_tokens
        decoded: dict[int, Decoded] = {}
        with self._closed_on_error():
            answers = call_all(work)
            for index, (held, completions) in (item for answer in answers for item in answer.items()):
                if held is not None:
                    self._check(index, held)
                decoded.update(zip(rows[index], completions, strict=True))
        return [completed(self._policy, request, *decoded[i], self._step) for i, request in enumerate(requests)]

    def close(self) -> None:
        """End all processes and free the shared memory."""
        self._draws = []
        self._end()

    def _check_length(self, what: str, tokens: int) -> None:
        if tokens > self._max_length:
            raise UserError(
                f"engine.vllm.max_model_len = {self._max_length}: {what} and its completion take {tokens} tokens; "
                f"raise it up to the model's context of {self._policy.context}, or lower sampling.max_new_tokens"
            )

    def _share(self, draws: int) -> None:
        """Make shared memory for the weights of so many draws, and send each to the replica that will read it."""
        while len(self._shared) < draws:
            index = len(self._shared)
            self._shared.append(SharedTensors(self._contents.layout))
            replica = self._replicas[index % len(self._replicas)]
            replica.call("share", index, self._contents.layout, self._shared[index].path)

    def _push_whole(self, weights: Weights | None) -> bool:
        """Push what draws are beside into every replica; False if there is nothing."""
        if weights is None:
            return False
        first = not self._whole
        if first:
            self._whole.append(SharedTensors(self._contents.whole))
            share = "share", _WHOLE, self._contents.whole, self._whole[0].path
            call_all(dict.fromkeys(self._replicas, share))
        self._contents.write_whole(weights, self._whole[0].tensors)
        call_all(dict.fromkeys(self._replicas, ("freeze", _WHOLE, first)))
        return True

    def _check(self, index: int, held: Held) -> None:
        """Draws may be closer to one another than the probe's tolerance; what was read is compared to the bit."""
        what, (written, expected), (read, measured) = self._named(index), self._expected[index], held
        if set(read) != {written}:
            sums = [checksum for checksum, _ in self._expected]
            others = [self._named(sums.index(other)) for other in set(read) - {written} if other in sums]
            raise UserError(
                f"engine.kind = 'vllm': a replica read other weights than those of {what} that it was given"
                f"{''.join(f': those of {other}' for other in others)}; please report this"
            )
        check_probe(expected, measured, self._tolerance, what)

    def _named(self, index: int) -> str:
        return f"{self._draws[index] or 'the mean'} at step {self._step}"

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Close the engine if the body raises, since a replica may be in the middle of an answer. Logs are kept."""
        if not self._end.alive:
            raise RuntimeError("the vLLM engine is closed")
        try:
            yield
        except BaseException as error:
            self._end.detach()
            logs = ", ".join(str(replica.log) for replica in self._replicas)
            _close(self._held, None)
            if isinstance(error, ReplicaError):  # such as memory that ran out, or a worker of its own that died
                first, *_, last = str(error).strip().splitlines()
                raise UserError(f"{first} {last}; more is in {logs}") from error
            raise


def _write_config(model: Any, folder: Path) -> None:
    """Write the model's config.json, untied (see the top of this file), and no weights."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    config.save_pretrained(folder)


def _environments(settings: VLLMConfig) -> list[dict[str, str]]:
    """Environment variables of every replica; the user's own values win, except for the GPU and the process model."""
    # The replica is the process; workers of its own cannot be forked after a look for GPUs.
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    inherited = {name: value for name, value in os.environ.items() if not _TORCHRUN.fullmatch(name)}
    count, each = torch.cuda.device_count(), settings.tensor_parallel
    if not count:
        if settings.gpus:
            raise UserError(f"engine.vllm.gpus = {list(settings.gpus)}: torch finds no GPU here; leave it out")
        # Each replica would otherwise take every core, and bind its threads to the same ones.
        threads = str(max(1, len(os.sched_getaffinity(0)) // (settings.replicas * each)))
        defaults = {"OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return [defaults | inherited | ours] * settings.replicas
    gpus = settings.gpus or tuple(range(settings.replicas * each))
    if max(gpus) >= count:
        raise UserError(
            f"engine.vllm.replicas = {settings.replicas}: needs GPU {max(gpus)} of {count} (from 0); lower it, "
            f"or name other GPUs in engine.vllm.gpus"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(count)]
    parts = (gpus[i : i + each] for i in range(0, len(gpus), each))
    return [inherited | ours | {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in part)} for part in parts]


def _close(held: Sequence[list[Any]], folder: Path | None) -> None:
    for some in held:
        for one in some:
            one.close()
        some.clear()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
