"""The vLLM engine: continuous batching in separate processes, with weights pushed into them.

The trainer writes the payload of every draw (rollout.payloads) into shared memory. A replica (rollout.vllm_replica)
loads it from there, flushes its prefix cache, and shows by a weight check that it computes with it. One replica decodes
the draws of a step in turn; a replica for each decodes all at the same time.

vLLM gets a model whose output head is not tied to its embedding, and the head's weights by name: the CPU build of vLLM
0.32 does not repack a tied head in a reload (docs/engines.md). Not yet run on a GPU.
"""

import copy
import importlib.util
import math
import os
import re
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from threepo.config.engine import SamplingConfig, VLLMConfig, VLLMEngineConfig
from threepo.errors import UserError
from threepo.models.policy import Policy
from threepo.posterior.policy_optimizer import WeightSource
from threepo.rollout.bit_sums import SumCheck, Sums
from threepo.rollout.engines import Talk, answering_threads, ask_once, completion_of, row_key, rows_by_draw
from threepo.rollout.memory import SharedTensors
from threepo.rollout.payloads import AdapterPayload, choose_payload, has_bfloat16
from threepo.rollout.replicas import Replica, ReplicaError, call_all, drive_all
from threepo.rollout.vllm_replica import Evidence, Generated
from threepo.rollout.weight_check import TOLERANCE, WeightCheck, fixed_prompt
from threepo.types import Completion, Draw, Request

_TORCHRUN = re.compile("(|LOCAL_|GROUP_|ROLE_)(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
"""Variables by which torchrun tells a process its rank; vLLM would read them as its own."""
_PROGRAM = "from threepo.rollout import replicas, vllm_replica; replicas.serve_requests(vllm_replica.Server)"


class VLLMEngine:
    """A `RolloutEngine` in `settings.vllm.replicas` processes; they end with `close`, with this object, or with Python.

    An error of a replica or of a push closes the engine. `UserError` if vLLM is missing or does not start. Draw number
    i of a load is in shared memory i, which replica i % replicas reads. A replica holds one draw at a time, or
    engine.vllm.adapters of them.
    """

    def __init__(self, policy: Policy, settings: VLLMEngineConfig) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UserError("engine.kind = 'vllm': vLLM is not installed; in a clone, pip install '.[vllm]'")
        self._policy = policy
        self.longest = settings.vllm.max_model_len or policy.context
        if self.longest > policy.context:
            raise UserError(
                f"engine.vllm.max_model_len = {self.longest}: the model's context is {policy.context}; lower it"
            )
        coarse = torch.bfloat16 if has_bfloat16(policy) else getattr(torch, settings.dtype)
        self._weight_check = WeightCheck(settings.vllm.check_tolerance or TOLERANCE[coarse])
        self._payload = choose_payload(policy, settings)
        self._slots = settings.vllm.adapters if self._payload.adapters else 1
        self._sleep = settings.vllm.sleep
        self._prompt = fixed_prompt(policy.model.get_input_embeddings().weight.shape[0], self.longest)
        """The prompt of the weight check."""
        self._shared: list[SharedTensors] = []
        self._draws: list[Draw | None] = []
        self._exact = 0
        """Index of the draw that is compared to the bit, for which the draws take turns."""
        self._sums: Sums = {}
        self._sum_check = SumCheck(settings.vllm.tensor_parallel)
        self._step = -1
        self._held: dict[Replica, set[int]] = {}
        """The draws that each replica has, by their indices."""
        self._checking = Lock()
        """Held by the replica whose evidence is being compared."""
        environments = _environments(settings.vllm, settings.dtype)  # before anything is started
        folder = Path(tempfile.mkdtemp(prefix="threepo-vllm-"))
        self._replicas: list[Replica] = []
        self._end = weakref.finalize(self, _close, self._replicas, self._shared, folder)
        _write_config(policy.architecture, folder)
        torch.cuda.empty_cache()  # replicas may share the GPU, here and in `load`
        with self._closed_on_error():
            for i, environment in enumerate(environments):
                name, log = f"engine.vllm: replica {i}", folder / f"replica-{i}.log"
                self._replicas.append(Replica(name, _PROGRAM, environment, log, settings.vllm.timeout_s))
            try:
                adapters = dict(self._payload.adapters)
                start = ("start", settings, str(folder), self.longest, self._prompt, adapters)
                call_all(dict.fromkeys(self._replicas, start))
            except ReplicaError as error:
                reason = str(error).strip().splitlines()[-1]
                raise UserError(
                    f"engine.kind = 'vllm': vLLM does not start: {reason}; its log is in {folder}"
                ) from error
            if isinstance(self._payload, AdapterPayload):
                layout = self._payload.base_layout
                with closing(SharedTensors(layout)) as base:
                    self._payload.write_base(base.tensors)
                    call_all(dict.fromkeys(self._replicas, ("load_base", layout, base.path, self._payload.parts)))
            self._rest()

    def prepare(self, draws: int, tokens: int) -> None:
        """See `RolloutEngine.prepare`: the memory that vLLM takes is its own, reserved when it starts."""
        self._check_length("the longest prompt", tokens)
        with self._closed_on_error():
            self._share(draws)

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> int:
        """Write every draw into shared memory, in the engine's dtype, and push the first draws into their replicas.

        `generate` pushes the other draws when their turn comes. `UserError` if a replica has died, is stuck, or fails
        the weight check.
        """
        distinct = list(dict.fromkeys(draws))
        with self._closed_on_error():
            self._draws, expected, self._step = [], [], step
            self._share(len(distinct))
            for draw, shared in zip(distinct, self._shared, strict=False):
                self._payload.write(posterior, draw, shared.tensors)
                expected.append(self._payload.logprobs(shared.tensors, self._prompt))
            self._weight_check.expect(distinct, step, expected)
            self._draws = distinct
            of_ranks = getattr(posterior, "sums", {})  # of one draw of all ranks, which may be another rank's
            turn = (i for i, draw in enumerate(distinct) if draw in of_ranks)
            self._exact = next(turn, step % len(distinct))
            self._sums = self._payload.sums(self._shared[self._exact].tensors)
            self._check_written(posterior)
            self._held.clear()
            torch.cuda.empty_cache()
            first = {replica: self._draws_of(replica)[: self._slots] for replica in self._replicas}
            drive_all({replica: partial(self._hold, replica, own) for replica, own in first.items() if own})
            return sum(shared.size for shared in self._shared[: len(distinct)])

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """See `RolloutEngine.generate`. `UserError` for a request longer than engine.vllm.max_model_len."""
        return ask_once(self, requests, sampling, seed)

    def converse(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int, talk: Talk) -> None:
        """See `ConversingEngine.converse`: draws that are pushed in turn have their turn for whole conversations.

        vLLM keeps what it has read in its prefix cache.
        """
        for request in requests:
            self._check_length(request.problem.label, len(request.prompt_tokens) + sampling.max_new_tokens)
        rows = rows_by_draw(requests, self._draws)

        def take_turns(replica: Replica) -> None:
            own = [index for index in self._draws_of(replica) if rows[index]]
            for first in range(0, len(own), self._slots):
                held = own[first : first + self._slots]
                self._hold(replica, held)
                begun = {row: requests[row] for index in held for row in rows[index]}
                self._talk(replica, begun, sampling, seed, talk)

        with self._closed_on_error():
            drive_all({replica: partial(take_turns, replica) for replica in self._replicas})
            self._rest()

    def _talk(
        self, replica: Replica, begun: Mapping[int, Request], sampling: SamplingConfig, seed: int, talk: Talk
    ) -> None:
        """Hold conversations with one replica, which decodes some while environments answer others.

        A reply begins a fixed number of steps after the last one of its conversation has ended, so that the batches do
        not depend on time. If the environment has not answered by then, all wait for it.
        """
        asked = dict(begun)
        """Requests whose replies are being written."""
        new = dict(begun)
        """Requests that the replica does not know yet."""
        steps = 0
        answers: deque[tuple[float, Future[Mapping[int, Request]]]] = deque()
        """Answers of environments, and the step at which the next replies begin."""
        finished: dict[int, Generated]
        with answering_threads(len(begun)) as threads:
            while asked or answers:
                rows = {
                    i: (self._draws.index(one.draw), one.prompt_tokens, row_key(seed, self._step, one)[0] >> 1)
                    for i, one in new.items()
                }
                most = answers[0][0] - steps if answers else math.inf
                least = len(asked) if math.isinf(talk.answer_steps) else 1
                finished, more = replica.call("decode", rows, sampling, self._policy.stop_tokens, most, least)
                steps += more
                if finished:
                    replies = [
                        (i, completion_of(self._policy, asked.pop(i), *generated, self._step))
                        for i, generated in sorted(finished.items())
                    ]
                    answers.append((steps + talk.answer_steps, threads.submit(talk.follow, replies)))
                new = {}
                while answers and (answers[0][0] <= steps or not asked):
                    new |= answers.popleft()[1].result()
                    asked |= new

    def close(self) -> None:
        """End all processes and free the shared memory."""
        self._draws = []
        self._end()

    def _check_length(self, what: str, tokens: int) -> None:
        if tokens > self.longest:
            raise UserError(
                f"engine.vllm.max_model_len = {self.longest}: {what} and its completion take {tokens} tokens; "
                f"raise it up to the model's context of {self._policy.context}, or lower sampling.max_new_tokens"
            )

    def _rest(self) -> None:
        """Let replicas give back their memory, if they are to; they hold no draw then."""
        if self._sleep:
            self._held.clear()
            call_all(dict.fromkeys(self._replicas, ("sleep",)))

    def _draws_of(self, replica: Replica) -> range:
        """The indices of the draws that a replica serves."""
        return range(self._replicas.index(replica), len(self._draws), len(self._replicas))

    def _hold(self, replica: Replica, draws: Sequence[int]) -> None:
        """Let a replica load draws, unless it has them, and check what it computes with."""
        if set(draws) <= self._held.get(replica, set()):
            return
        self._held[replica] = set(draws)
        evidence = replica.call("push", draws, self._exact)
        with self._checking:
            for index, shown in zip(draws, evidence, strict=True):
                self._check(index, shown)

    def _share(self, draws: int) -> None:
        """Make shared memory for so many draws, and tell each replica of the memory that it will read."""
        for index in range(len(self._shared), draws):
            self._shared.append(SharedTensors(self._payload.layout))
            self._shared[index].register()
            replica = self._replicas[index % len(self._replicas)]
            replica.call("share", index, self._payload.layout, self._shared[index].path, self._payload.parts)

    def _check(self, index: int, evidence: Evidence) -> None:
        """Compare what a replica computes with the trainer's weights, and its tensors to the bit."""
        self._weight_check.check(index, evidence.logprobs)
        if wrong := self._sum_check.differing(self._sums, evidence.sums):
            raise UserError(
                f"engine.kind = 'vllm': after a reload, {len(wrong)} tensors of vLLM are not those of "
                f"{self._draws[index] or 'the mean'} at step {self._step} that it was given: {', '.join(wrong[:4])}. "
                f"Use another version of vLLM, or engine.kind = 'local'"
            )

    def _check_written(self, posterior: WeightSource) -> None:
        """Compare a draw that was written, to the bit, with the trainer's own model under it.

        This takes as long as making the draw. Several ranks have made the sums of one draw together (`source_sums`).
        """
        draw = self._draws[self._exact]
        if hasattr(posterior, "sums"):
            source = posterior.sums.get(draw, {})
        else:
            source = self._payload.source_sums(posterior, draw)
        if wrong := [name for name, value in source.items() if self._sums[name] != value]:
            raise UserError(
                f"engine.kind = 'vllm': {len(wrong)} tensors were not written as the trainer's model has them under "
                f"{draw or 'the mean'}: {', '.join(wrong[:4])}; please report this"
            )

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
            _close(self._replicas, self._shared, None)
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


def _environments(settings: VLLMConfig, dtype: str) -> list[dict[str, str]]:
    """Environment variables of every replica; the user's values win, except for the GPU and the process model."""
    # The replica is vLLM's process; workers of its own cannot be forked after a look for GPUs.
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    # vLLM's attention in float32 is Triton's, which would multiply with ten bits.
    exact = {"TRITON_F32_DEFAULT": "ieee"} if dtype == "float32" else {}
    inherited = exact | {name: value for name, value in os.environ.items() if not _TORCHRUN.fullmatch(name)}
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
            f"engine.vllm.replicas = {settings.replicas} with tensor_parallel = {each}: needs GPU {max(gpus)} of "
            f"{count} (from 0); lower one of them, or name other GPUs in engine.vllm.gpus"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(count)]
    parts = (gpus[i : i + each] for i in range(0, len(gpus), each))
    return [inherited | ours | {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in part)} for part in parts]


def _close(replicas: list[Replica], shared: list[SharedTensors], folder: Path | None) -> None:
    """Close replicas and shared memory, and delete the folder."""
    for replica in replicas:
        replica.close()
    for tensors in shared:
        tensors.close()
    replicas.clear()
    shared.clear()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
