"""The vLLM engine: continuous batching in separate processes, with weights pushed into them.

The trainer writes the weights of every draw into shared memory. A replica (rollout.vllm_server) loads them from there
with vLLM's reload_weights, and flushes its prefix cache. With one replica the draws of a step are decoded in turn, with
a replica per draw at the same time.

A probe shows that the engine computes with the weights it was given: log-probs of a fixed prompt, there and in the
trainer. vLLM fuses and repacks weights after loading, so the tensors that its kernels read cannot be compared with
ours. Every weight takes part in the log-probs of the probe, except the embeddings of other tokens.

vLLM is given a model whose output head is not tied to its embedding, and the head's weights by name. If its
configuration ties them, the CPU build of vLLM 0.32 keeps using the packed copy of the head that it made at its start: a
reload repacks only layers that weights are loaded for, and none are loaded for a tied head.

With adapters, the frozen weights are pushed once, and each draw is an adapter beside them (`engine.vllm.adapters`): the
draws of a replica are decoded in one batch. The probe then runs in the trainer's precision, with adapters in the
engine's. So are draws of low-rank noise beside the mean, which is pushed once a step (`engine.vllm.draw_rank`).

Where the model is sharded, the policy's architecture stands for it: nothing here needs its weights.

Neither file has run on a GPU yet.
"""

import copy
import importlib.util
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from threepo.config import EngineConfig, SamplingConfig, VLLMConfig
from threepo.errors import UserError
from threepo.models.adapters import NAME, is_adapter, peft_name, without_adapter
from threepo.models.policy import Policy
from threepo.posterior.layout import is_spread
from threepo.posterior.policy_optimizer import WeightSource
from threepo.rollout.engines import completed, row_key, rows_by_draw
from threepo.rollout.low_rank import adapter_layout, merged, write_adapters
from threepo.rollout.memory import Layout, SharedTensors, layout_of
from threepo.rollout.replicas import Replica, ReplicaError, call_all
from threepo.rollout.vllm_server import RANKS, Decoded, Held
from threepo.types import Completion, Draw, Request

LENGTH = 32
"""Tokens of the probe; fewer where the model's context is shorter."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference in log-prob (nats). Seen on a CPU with the models of tests/rollout/test_vllm.py: between
equal weights 4e-7 in float32 and 0.011 in bfloat16."""
_TORCHRUN = re.compile("(|LOCAL_|GROUP_|ROLE_)(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
"""Variables by which torchrun tells a rank who it is; vLLM would take itself for that rank."""
_FROZEN = -1
"""The index of the shared memory with the weights that adapters are beside."""
_PROGRAM = "from threepo.rollout import replicas, vllm_server; replicas.serve_requests(vllm_server.Server)"


class VLLMEngine:
    """A `RolloutEngine` in `settings.vllm.replicas` processes; they end with `close`, with this object, or with Python.

    After an error of a replica or of a push the engine is closed. `UserError` if vLLM is missing or does not start.
    Draw number i of a load is in shared memory i, which replica i % replicas reads. A replica has one slot, or one for
    each of engine.vllm.adapters.
    """

    def __init__(self, policy: Policy, settings: EngineConfig) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UserError("engine.kind = 'vllm': vLLM is not installed; in a clone, pip install '.[vllm]'")
        self._policy, dtype = policy, getattr(torch, settings.dtype)
        self._max_length = settings.vllm.max_model_len or policy.context
        if self._max_length > policy.context:
            raise UserError(
                f"engine.vllm.max_model_len = {self._max_length}: the model's context is {policy.context}; lower it"
            )
        self._rounded = any(p.dtype == torch.bfloat16 for p in policy.model.parameters())
        coarse = torch.bfloat16 if self._rounded else dtype
        self._tolerance = settings.vllm.probe_tolerance or TOLERANCE[coarse]
        self._sources = parameter_names(policy.architecture)
        state = policy.architecture.state_dict()
        whole = layout_of({name: state[name] for name in self._sources}, dtype)
        self._rank = settings.vllm.draw_rank
        served = settings.vllm.adapters if policy.has_adapters or self._rank else 0
        if self._rank and (policy.has_adapters or not served):
            fix = "draws beside the mean need engine.vllm.adapters above 0, and no adapters of the model; set it to 0"
            raise UserError(f"engine.vllm.draw_rank = {self._rank}: {fix}")
        if served and any(map(is_spread, policy.model.parameters())):
            fix = "several ranks push draws as all weights; set it to 0"
            raise UserError(f"engine.vllm.adapters = {served}: {fix}")
        self._slots = served or 1
        own = policy.model.named_parameters() if policy.has_adapters and served else ()
        self._adapters = {peft_name(name): (name, p) for name, p in own if is_adapter(name)}
        """If draws are pushed as adapters: their parameters, by their names in vLLM."""
        self._layout, described = whole, {}
        if self._rank:
            self._layout = adapter_layout(policy.architecture, self._rank, dtype)
            described = adapter_settings(self._layout, "engine.vllm.draw_rank", self._rank, self._rank)
        elif served:
            self._layout = layout_of({name: p for name, (_, p) in self._adapters.items()}, dtype)
            config = policy.model.peft_config[NAME]
            described = adapter_settings(self._layout, "model.lora.rank", config.r, config.lora_alpha)
        self._frozen: list[SharedTensors] = []
        """What adapters are beside, while replicas may read it."""
        self._whole = whole
        self._probe = probe_tokens(policy, self._max_length - 1)
        self._shared: list[SharedTensors] = []
        self._draws: list[Draw | None] = []
        self._expected: list[tuple[int, torch.Tensor]] = []
        """For each loaded draw: the checksum of its weights, and the probe's log-probs under them."""
        self._step = -1
        environments = _environments(settings.vllm)  # before anything is started
        folder = Path(tempfile.mkdtemp(prefix="threepo-vllm-"))
        self._replicas: list[Replica] = []
        self._held = (self._replicas, self._shared, self._frozen)
        self._end = weakref.finalize(self, _close, self._held, folder)
        _write_config(policy.architecture, folder)
        with self._closed_on_error():
            for i, environment in enumerate(environments):
                name, log = f"engine.vllm: replica {i}", folder / f"replica-{i}.log"
                self._replicas.append(Replica(name, _PROGRAM, environment, log, settings.vllm.timeout_s))
            start = ("start", settings, str(folder), self._max_length, self._probe, described)
            try:
                call_all(dict.fromkeys(self._replicas, start))
            except ReplicaError as error:
                reason = str(error).strip().splitlines()[-1]
                raise UserError(
                    f"engine.kind = 'vllm': vLLM does not start: {reason}; its log is in {folder}"
                ) from error
            if served and not self._rank:
                own_values = {without_adapter(name): p.detach() for name, p in policy.model.named_parameters()}
                self._freeze(own_values.items(), rehearsed=True)
                call_all(dict.fromkeys(self._replicas, ("forget", _FROZEN)))
                self._frozen.pop().close()

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
            if self._rank:
                self._freeze(posterior.weights(None), rehearsed=not self._frozen)
            for index, draw in enumerate(distinct):
                self._write(posterior, draw, self._shared[index])
                self._expected.append((self._shared[index].checksum(), self._probed(self._shared[index].tensors)))
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
            self._shared.append(SharedTensors(self._layout))
            replica = self._replicas[index % len(self._replicas)]
            replica.call("share", index, self._layout, self._shared[index].path)

    def _write(self, posterior: WeightSource, draw: Draw | None, shared: SharedTensors) -> None:
        """Write the weights of a draw, a tied tensor under each name; the model's where the posterior has none."""
        if self._rank:
            write_adapters(posterior, draw, shared.tensors)
            return
        if self._adapters:
            for name, value in posterior.weights(draw):
                if is_adapter(name):
                    shared.tensors[peft_name(name)].copy_(value)
            return
        weights = self._policy.served(posterior).weights(draw)
        written = {self._sources[name]: shared.tensors[name].copy_(value) for name, value in weights}
        state = self._policy.architecture.state_dict()
        for name, source in self._sources.items():
            shared.tensors[name].copy_(written.get(source, state[name]))

    def _probed(self, written: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What the trainer's model computes with what was written for a draw."""
        if self._adapters:
            own = {name: written[called].to(p.dtype) for called, (name, p) in self._adapters.items()}
            with torch.autocast(self._policy.device.type, self._policy.compute_dtype, enabled=self._rounded):
                return expected_logprobs(self._policy.model, own, self._probe, self._policy.device)
        if self._rank:
            written = merged(self._frozen[0].tensors, written)
        own = {name: written[name] for name, of in self._sources.items() if of == name}
        return expected_logprobs(self._policy.architecture, own, self._probe, self._policy.device)

    def _freeze(self, weights: Iterable[tuple[str, torch.Tensor]], rehearsed: bool) -> None:
        """Push the weights that adapters are beside into every replica; `rehearsed`: for the first time."""
        if not self._frozen:
            self._frozen.append(SharedTensors(self._whole))
            call_all(dict.fromkeys(self._replicas, ("share", _FROZEN, self._whole, self._frozen[0].path)))
        tensors, state = self._frozen[0].tensors, self._policy.architecture.state_dict()
        own = dict(weights)
        for name, source in self._sources.items():
            tensors[name].copy_(own.get(source, state[name]).detach())
        call_all(dict.fromkeys(self._replicas, ("freeze", _FROZEN, rehearsed)))

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


def probe_tokens(policy: Policy, room: int) -> tuple[int, ...]:
    """The fixed prompt, at most `room` tokens: spread over the vocabulary, so that its tokens differ."""
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    return tuple(int(vocabulary * (0.6180339887498949 * i % 1.0)) for i in range(1, min(LENGTH, room) + 1))


@torch.no_grad()
def expected_logprobs(
    model: Any, weights: Mapping[str, torch.Tensor], tokens: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Log-probs [len(tokens) - 1] (float32, CPU) of tokens 1, 2, ... by a model under `weights`, computed on `device`.

    The model itself does not change. `weights` has tensors for its parameters; the forward pass runs in their dtype.
    """
    ids = torch.tensor([tokens], device=device)
    on_device = {name: value.to(device) for name, value in weights.items()}
    output = torch.func.functional_call(model, on_device, kwargs={"input_ids": ids, "use_cache": False})
    logprobs = output.logits[0, :-1].float().log_softmax(dim=-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu()  # type: ignore[no-any-return]


def check_probe(expected: torch.Tensor, measured: Sequence[float], tolerance: float, what: str) -> None:
    """Raise `UserError` unless log-probs of the probe agree; `what` names the weights."""
    if not expected.isfinite().all():
        raise UserError(f"the weights of {what} give log-probs that are not finite: training has diverged")
    difference = (torch.tensor(measured) - expected).abs()
    mean, most = difference.mean().item(), difference.max().item()
    if not mean <= tolerance:  # also where it is not a number
        raise UserError(
            f"engine.kind = 'vllm': the engine does not compute with the weights of {what} that it was given: its "
            f"log-probs of a probe are off by {mean:.2g} on average and {most:.2g} at most (allowed: "
            f"engine.vllm.probe_tolerance, {tolerance:g}). Either this vLLM reloads this model wrongly (use another "
            f"version, or engine.kind = 'local'), or it computes too coarsely (engine.dtype = 'float32')"
        )


def parameter_names(model: Any) -> dict[str, str]:
    """For every tensor of the state dict: the name of its parameter, which is another one where it is tied."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: known.get(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def adapter_settings(layout: Layout, setting: str, rank: int, alpha: float) -> dict[str, Any]:
    """What vLLM has to know of adapters; `UserError` for a rank that it does not serve, which `setting` names."""
    if rank > RANKS[-1]:
        whole = "engine.vllm.adapters = 0" if setting.startswith("model") else f"{setting} = 0"
        raise UserError(f"{setting} = {rank}: vLLM serves up to {RANKS[-1]}; lower it, or push all weights: {whole}")
    # vLLM leaves other layers alone. With adapters for the head of a Llama, 0.32 fails at the probe on a CPU.
    layers = sorted({name.split(".")[-3] for name in layout})
    return {"r": rank, "lora_alpha": alpha, "target_modules": layers}


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
