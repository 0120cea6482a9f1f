"""The vLLM engine: continuous batching in processes of their own, with weights pushed into them.

The trainer writes the weights of every draw into shared memory; a replica (rollout.vllm_server) takes them from there
with vLLM's own reload_weights, flushes its prefix cache, and shows by a probe that it computes with them
(rollout.probe). With one replica the draws of a step are decoded in turn; with as many as draws, a step costs one push
and one generation per replica, whatever their number.

vLLM is given a model whose output head is not tied to its embedding, and the head's weights by name. Told of the tie,
the CPU build of vLLM 0.32 goes on with the packed copy of the head that it made when it started: a reload repacks the
layers that it has loaded weights for, and a tied head is never loaded any.

On a GPU neither file has run yet.
"""

import copy
import importlib.util
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from threepo.config import EngineConfig, SamplingConfig, VLLMConfig
from threepo.errors import UserError
from threepo.models.policy import Policy
from threepo.posterior.policy_optimizer import WeightSource
from threepo.rollout.probe import TOLERANCE, check_probe, expected_logprobs, probe_tokens
from threepo.rollout.replicas import Replica, gather
from threepo.rollout.sampling import row_key
from threepo.rollout.shared import Layout, SharedTensors
from threepo.rollout.vllm_server import Decoded, Row
from threepo.types import Completion, Draw, Request

_PROGRAM = "import sys; from threepo.rollout.vllm_server import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"


@dataclass(frozen=True)
class _Loaded:
    """The weights of one draw, as the trainer knows them."""

    index: int
    """Which shared memory they are in; replica index % replicas reads it."""
    expected: torch.Tensor
    """Log-probs of the probe under them."""


class VLLMEngine:
    """A `RolloutEngine` in `settings.vllm.replicas` processes; they end with `close`, with this object, or with Python.

    After an error of a replica or of a push the engine is closed. `UserError` if vLLM is missing or does not start.
    """

    def __init__(self, policy: Policy, settings: EngineConfig) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UserError("engine.kind = 'vllm': vLLM is not installed; pip install 'threepo[vllm]'")
        self._policy = policy
        self._dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
        self._room = settings.vllm.max_model_len or policy.context
        if self._room > policy.context:
            raise UserError(
                f"engine.vllm.max_model_len = {self._room}: the model's context is {policy.context}; lower it"
            )
        self._tolerance = settings.vllm.probe_tolerance or TOLERANCE[self._dtype]
        self._sources = _sources(policy.model)
        state = policy.model.state_dict()
        self._layout = Layout.of({name: state[name] for name in self._sources}, self._dtype)
        self._probe = probe_tokens(policy, self._room - 1)
        self._shared: list[SharedTensors] = []
        self._loaded: dict[Draw | None, _Loaded] = {}
        self._step = -1
        environments = _environments(settings.vllm)  # before anything is started
        folder = Path(tempfile.mkdtemp(prefix="threepo-vllm-"))
        _write_config(policy.model, folder)
        self._replicas: list[Replica] = []
        self._end = weakref.finalize(self, _close, self._replicas, self._shared, folder)
        with self._closed_on_error():
            for i, environment in enumerate(environments):
                log = folder / f"replica-{i}.log"
                name = f"engine.vllm: replica {i}"
                self._replicas.append(Replica(name, _PROGRAM, environment, log, settings.vllm.timeout_s))
            for replica in self._replicas:
                replica.send("start", settings, str(folder), self._room, self._probe)
            try:
                gather(self._replicas)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[-1]
                raise UserError(
                    f"engine.kind = 'vllm': vLLM does not start: {reason}; its log is in {folder}"
                ) from error

    def prepare(self, draws: int, tokens: int) -> None:
        """See `RolloutEngine.prepare`: the memory that vLLM takes is its own, reserved when it starts."""
        if tokens > self._room:
            raise UserError(
                f"engine.vllm.max_model_len = {self._room}: the longest prompt and sampling.max_new_tokens are "
                f"{tokens} tokens together; raise it, or lower that"
            )
        with self._closed_on_error():
            self._make_room(draws)

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> None:
        """Copy the weights of every draw into shared memory, in the engine's dtype, and push a draw to each replica.

        The other draws are pushed by `generate` when their turn comes. `UserError` if a replica has died, is stuck, or
        shows other weights by its probe.
        """
        distinct = list(dict.fromkeys(draws))
        with self._closed_on_error():
            self._loaded, self._step = {}, step
            self._make_room(len(distinct))
            for index, draw in enumerate(distinct):
                self._write(posterior, draw, self._shared[index])
                own = {name: self._shared[index].tensors[name] for name, of in self._sources.items() if of == name}
                self._loaded[draw] = _Loaded(index, expected_logprobs(self._policy, own, self._probe))
                if index < len(self._replicas):
                    self._replicas[index].send("push", index)
            pushed = distinct[: len(self._replicas)]
            for draw, measured in zip(pushed, gather(self._replicas[: len(pushed)]), strict=True):
                self._check(draw, measured)

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """See `RolloutEngine.generate`. `UserError` for a request longer than engine.vllm.max_model_len."""
        rows: dict[Draw | None, list[int]] = {}
        for i, request in enumerate(requests):
            if request.draw not in self._loaded:
                raise RuntimeError(f"{request.draw} is not loaded into the engine; loaded: {list(self._loaded)}")
            self._check_room(request, sampling)
            rows.setdefault(request.draw, []).append(i)
        with self._closed_on_error():
            decoded = self._decode(requests, rows, sampling, seed)
        return [self._completion(request, decoded[i]) for i, request in enumerate(requests)]

    def close(self) -> None:
        """End all processes and give the shared memory back."""
        self._loaded = {}
        self._end()

    def _decode(
        self,
        requests: Sequence[Request],
        rows: Mapping[Draw | None, Sequence[int]],
        sampling: SamplingConfig,
        seed: int,
    ) -> dict[int, Decoded]:
        """Hand every replica its draws' rows at once, and take the answers apart again."""
        dealt: dict[int, list[Draw | None]] = {}
        for draw in rows:
            dealt.setdefault(self._loaded[draw].index % len(self._replicas), []).append(draw)
        for replica, draws in dealt.items():
            jobs = [(self._loaded[draw].index, [self._row(requests[i], seed) for i in rows[draw]]) for draw in draws]
            self._replicas[replica].send("generate", jobs, sampling, self._policy.stop_tokens)
        decoded: dict[int, Decoded] = {}
        answers = gather([self._replicas[replica] for replica in dealt])
        for draws, answer in zip(dealt.values(), answers, strict=True):
            for draw, (measured, completions) in zip(draws, answer, strict=True):
                if measured is not None:
                    self._check(draw, measured)
                decoded.update(zip(rows[draw], completions, strict=True))
        return decoded

    def _make_room(self, draws: int) -> None:
        """Shared memory for as many sets of weights, each known to the replica that will read it."""
        while len(self._shared) < draws:
            index = len(self._shared)
            self._shared.append(SharedTensors(self._layout))
            replica = self._replicas[index % len(self._replicas)]
            replica.send("share", index, self._layout, descriptor=self._shared[index].descriptor)
            replica.receive()

    def _write(self, posterior: WeightSource, draw: Draw | None, shared: SharedTensors) -> None:
        """A tied tensor is written under each of its names; what the posterior has no say in is as in the model."""
        written = {name: shared.tensors[name].copy_(value) for name, value in posterior.weights(draw)}
        weights = {self._sources[name]: value for name, value in written.items()}
        state = self._policy.model.state_dict()
        for name, source in self._sources.items():
            if name not in written:
                shared.tensors[name].copy_(weights.get(source, state[name]))

    def _check(self, draw: Draw | None, measured: Sequence[float]) -> None:
        what = f"{draw or 'the mean'} at step {self._step}"
        check_probe(self._loaded[draw].expected, measured, self._tolerance, what)

    def _check_room(self, request: Request, sampling: SamplingConfig) -> None:
        if len(request.prompt_tokens) + sampling.max_new_tokens > self._room:
            raise UserError(
                f"{request.problem.label}: prompt of {len(request.prompt_tokens)} tokens and max_new_tokens = "
                f"{sampling.max_new_tokens} exceed the engine's room of {self._room}; raise engine.vllm.max_model_len "
                f"up to the model's context of {self._policy.context}, or shorten them"
            )

    def _row(self, request: Request, seed: int) -> Row:
        key = row_key(seed, self._step, request.problem.id, request.rollout)
        return request.prompt_tokens, key[0] >> 1  # vLLM holds seeds in signed 64-bit integers

    def _completion(self, request: Request, decoded: Decoded) -> Completion:
        tokens, logprobs, reason = decoded
        assert reason in ("stop", "length"), reason
        text = tokens[:-1] if reason == "stop" else tokens
        return Completion(
            problem=request.problem,
            prompt_tokens=request.prompt_tokens,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            text=self._policy.tokenizer.decode(text, skip_special_tokens=True),
            finish_reason="stop" if reason == "stop" else "length",
            draw=request.draw,
            rollout=request.rollout,
            policy_step=self._step,
            opening=self._policy.opening(request.prompt_tokens),
        )

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """For a body that must not leave replicas in the middle of an answer; their logs are kept."""
        if not self._end.alive:
            raise RuntimeError("the vLLM engine is closed")
        try:
            yield
        except BaseException:
            self._end.detach()
            _close(self._replicas, self._shared, None)
            raise


def _sources(model: Any) -> dict[str, str]:
    """For every tensor of the state dict, the name that a posterior knows it by: another one where it is tied."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: known.get(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def _write_config(model: Any, folder: Path) -> None:
    """The model's config.json, untied (see the top of this file); weights come by push alone."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    config.save_pretrained(folder)


def _environments(settings: VLLMConfig) -> list[dict[str, str]]:
    """Environment variables of every replica. The user's own values stand, but for the GPU and the process model."""
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the replica is the process
    count = torch.cuda.device_count()
    if not count:
        if settings.gpus:
            raise UserError(f"engine.vllm.gpus = {list(settings.gpus)}: torch finds no GPU here; leave it out")
        # Each replica would otherwise take every core, and bind its threads to the same ones.
        threads = str(max(1, len(os.sched_getaffinity(0)) // settings.replicas))
        defaults = {"OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return [defaults | os.environ | ours] * settings.replicas
    gpus = settings.gpus or tuple(range(settings.replicas))
    if max(gpus) >= count:
        raise UserError(
            f"engine.vllm.replicas = {settings.replicas}: needs GPU {max(gpus)} of {count} (from 0); lower it, "
            f"or name other GPUs in engine.vllm.gpus"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(count)]
    return [dict(os.environ) | ours | {"CUDA_VISIBLE_DEVICES": names[gpu]} for gpu in gpus]


def _close(replicas: list[Replica], shared: list[SharedTensors], folder: Path | None) -> None:
    for replica in replicas:
        replica.close()
    for tensors in shared:
        tensors.close()
    replicas.clear()
    shared.clear()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
