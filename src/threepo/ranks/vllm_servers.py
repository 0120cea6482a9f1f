"""The vLLM engine on inference nodes: servers that users start, which make each draw from its address.

Once a step all ranks write mean and Hessian, or what has changed of them, into a folder that the servers see
(ranks/pushed_files.py), and a server makes its draws from that, whatever their number.

Each server is driven by one rank. Every change of weights is checked (rollout/weight_check.py). Not yet run on a GPU.
"""

import asyncio
import json
import warnings
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from threepo.config.engine import SamplingConfig, VLLMEngineConfig
from threepo.errors import ThreepoWarning, UserError
from threepo.models.parts import parts_in_files
from threepo.models.policy import Policy
from threepo.posterior.draw_file import RoundedWeights, file_contents, roundings
from threepo.posterior.policy_optimizer import WeightSource
from threepo.ranks.dealing import server_of_each
from threepo.ranks.pushed_files import PushedFiles
from threepo.ranks.sharding import added_up_shards, shard_sums, source_sums
from threepo.ranks.world import World
from threepo.rollout.bit_sums import Sums
from threepo.rollout.engines import Talk, answering_threads, ask_once, completion_of, row_key, rows_by_draw
from threepo.rollout.inference_server import InferenceServer
from threepo.rollout.payloads import has_bfloat16, parameter_names
from threepo.rollout.vllm_replica import decoding_parameters
from threepo.rollout.weight_check import TOLERANCE, Logprobs, WeightCheck, expected_logprobs, fixed_prompt
from threepo.types import Completion, Draw, Request
from threepo.workers import allow_open_files

KEPT_NOISE = 0.1
"""Share of weights that a draw must change in bfloat16: a tenth where numbers lie 3.3 sigma apart, which still leaves
noise its size; smaller noise is lost more and more."""


class VLLMServers:
    """A `ConversingEngine`. All ranks load it together; then each generates with the servers that it drives."""

    def __init__(self, policy: Policy, settings: VLLMEngineConfig, world: World) -> None:
        """`UserError` if a server is not there, was started with options that do not fit, or serves another run."""
        if policy.has_adapters:
            raise UserError("engine.vllm.servers: take no adapters yet; use engine.vllm.replicas")
        fix = "the model is in bfloat16, to which its draws are rounded; set 'bfloat16', here and for the servers"
        settings.check("dtype", settings.dtype == "bfloat16" or not has_bfloat16(policy), fix)
        own, self._policy, self._world = settings.vllm, policy, world
        self._dtype, self._together = getattr(torch, settings.dtype), settings.max_batch_rows
        self._weight_check = WeightCheck(own.check_tolerance or TOLERANCE[self._dtype])
        self._sources = parameter_names(policy.architecture)
        self._parts = parts_in_files(policy.architecture, policy.architecture.state_dict())
        self._servers = [InferenceServer(url, own.timeout_s) for url in own.servers]
        self._draws: list[Draw | None] = []
        self._sums: dict[Draw | None, Sums] = {}
        self._step, self._warned = -1, False
        lengths = world.share(lambda: _side_by_side(self._servers[i].check(settings.dtype) for i in self._driven()))
        self.longest = min(chain(*lengths))
        self._files = PushedFiles(Path(own.weights_folder).absolute(), own.full_push_every, world)
        self._prompt = fixed_prompt(policy.model.get_input_embeddings().weight.shape[0], self.longest)
        allow_open_files()  # for a connection per request

    def prepare(self, draws: int, tokens: int) -> None:
        """See `RolloutEngine.prepare`: the memory of the servers is their own."""
        self._check_length("the longest prompt", tokens)

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> int:
        """Write mean and Hessian, and tell every server its first draw; the others are told by `generate`.

        `UserError` if a server is down, fails, does not answer, or fails the weight check.
        """
        self._draws, self._step = list(dict.fromkeys(draws)), step
        noisy = self._files.rounded or any(draw is not None for draw in self._draws)
        tensors, metadata = file_contents(posterior, self._policy.saved_tensors(), self._sources, noisy)
        metadata["parts"] = json.dumps(self._parts)
        written = self._files.push(tensors, metadata, roundings(posterior, tensors))
        self._weight_check.expect(self._draws, step, self._expected_logprobs(posterior))
        turn = self._draws[step % len(self._draws)]  # one draw, as this takes as long as making it
        if self._files.rounded:
            rounded = RoundedWeights(posterior)
            self._warn_of_lost_noise(rounded)
            own = ((self._sources[name], value) for name, value in rounded.weights(turn))
            self._sums = {turn: added_up_shards(lambda: shard_sums(own, self._dtype), self._world)}
        else:
            self._sums = {turn: source_sums(self._policy, posterior, turn, self._dtype, self._world)}
        with self._world.together():
            _side_by_side(self._ready(i, i % len(self._draws)) for i in self._driven())
        return written

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """See `RolloutEngine.generate`. `UserError` as for `load`, and for a request too long for the servers."""
        return ask_once(self, requests, sampling, seed)

    def converse(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int, talk: Talk) -> None:
        """See `ConversingEngine.converse`: each conversation goes on as soon as it is answered.

        A server has one draw for whole conversations, then the next. It keeps what it has read in its prefix cache.
        """
        parameters = decoding_parameters(sampling, self._policy.stop_tokens)
        servers = server_of_each(requests, self._draws, len(self._servers), self._driven())
        with answering_threads(len(requests)) as threads:  # a slow environment holds up no other

            async def hold(row: int, limit: asyncio.Semaphore) -> None:
                request: Request | None = requests[row]
                while request:
                    self._check_length(request.problem.label, len(request.prompt_tokens) + sampling.max_new_tokens)
                    own = parameters | {"seed": row_key(seed, self._step, request)[0] >> 1}
                    async with limit:
                        generated = await self._servers[servers[row]].complete(request.prompt_tokens, own)
                    reply = completion_of(self._policy, request, *generated, self._step)
                    loop = asyncio.get_running_loop()
                    request = (await loop.run_in_executor(threads, talk.follow, [(row, reply)])).get(row)

            async def hold_all(server: int) -> None:
                limit = asyncio.Semaphore(self._together)
                for index, rows in enumerate(rows_by_draw(requests, self._draws)):
                    if mine := [row for row in rows if servers[row] == server]:
                        await self._ready(server, index)
                        await asyncio.gather(*(hold(row, limit) for row in mine))

            _side_by_side(map(hold_all, self._driven()))

    def close(self) -> None:
        """Delete the weights; the servers keep running."""
        self._files.close()

    def _warn_of_lost_noise(self, rounded: RoundedWeights) -> None:
        """Warn if the first draw of the run loses its noise, because means were rounded before noise was added."""
        draw = next(filter(None, self._draws), None)
        if self._warned or draw is None:
            return
        self._warned = True
        moved, noisy = map(sum, zip(*self._world.share(lambda: rounded.moved(draw)), strict=True))
        if moved < KEPT_NOISE * noisy and self._world.rank == 0:
            warnings.warn(
                f"engine.vllm.full_push_every: a draw differs from the mean in {moved / noisy:.1%} of the weights, "
                f"because most noise is smaller than {self._dtype} resolves; set it to 1",
                ThreepoWarning,
                stacklevel=2,
            )

    async def _ready(self, i: int, index: int) -> None:
        """Let server number i hold the draw of this index, and check that it does."""
        server, draw = self._servers[i], self._draws[index]
        version = f"{self._files.version} {draw or 'the mean'}"
        if server.version != version:
            pushed = self._files.full, self._files.changes
            measured = await server.tell(pushed, draw, self._sums.get(draw, {}), version, self._prompt)
            self._weight_check.check(index, measured, server.url)

    def _expected_logprobs(self, posterior: WeightSource) -> list[Logprobs]:
        """The trainer's log-probs for the fixed prompt under each draw; the draws are dealt to the ranks."""
        size, found = self._world.size, []
        for first in range(0, len(self._draws), size):
            mine = first + self._world.rank
            weights = posterior.weights(self._draws[mine % len(self._draws)], gather=True)  # by all, at the same time
            own = {self._sources[name]: value.to(self._dtype) for name, value in weights}
            if mine < len(self._draws):
                found.append(expected_logprobs(self._policy.architecture, own, self._prompt, self._policy.device))
        shares = self._world.gather(found)
        return [shares[index % size][index // size] for index in range(len(self._draws))]

    def _driven(self) -> range:
        """The servers that this rank drives."""
        return self._world.own(len(self._servers))

    def _check_length(self, what: str, tokens: int) -> None:
        if tokens > self.longest:
            raise UserError(
                f"engine.vllm.servers: {what} and its completion take {tokens} tokens, and a server takes "
                f"{self.longest}; start it with a larger --max-model-len, or lower sampling.max_new_tokens"
            )


def _side_by_side(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of coroutines; the first error ends all."""

    async def all_of_it() -> list[Any]:
        return await asyncio.gather(*work)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(all_of_it())
    with ThreadPoolExecutor(1) as thread:  # a notebook's own thread runs a loop already, and can run no second one
        return thread.submit(asyncio.run, all_of_it()).result()
