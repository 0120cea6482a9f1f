"""The PyTorch engine: it decodes the rows of all draws in one batch, each row through its own weights (ensemble.py).

For Hugging Face decoders, on CPU or CUDA. decoding.py has the loop over tokens.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from threepo.config import LocalEngineConfig, SamplingConfig
from threepo.errors import UserError
from threepo.models.adapters import adapter_scale, is_adapter, without_adapter
from threepo.models.policy import Policy
from threepo.posterior.policy_optimizer import WeightSource
from threepo.posterior.shards import is_spread
from threepo.rollout.cache import whole_blocks
from threepo.rollout.decoding import Decoding, GoOn, Reply, Start
from threepo.rollout.engines import Talk, completion_of, row_key, rows_by_draw
from threepo.rollout.ensemble import Ensemble, check_positions
from threepo.rollout.memory import GIB, bytes_per_token, own_bytes, sampling_bytes
from threepo.types import Completion, Draw, Request


class LocalEngine:
    """A `RolloutEngine` in this process, with a copy of the weights for each loaded draw, in the engine's dtype."""

    def __init__(self, policy: Policy, settings: LocalEngineConfig) -> None:
        """Raise `UserError` if the model's weights cannot be stacked."""
        self._policy, self._settings, self.longest = policy, settings, policy.context
        self._model = getattr(policy.architecture, "_orig_mod", policy.architecture)  # before torch.compile
        self._trained = getattr(policy.model, "_orig_mod", policy.model)
        adapters = {name: p for name, p in self._trained.named_parameters() if is_adapter(name)}
        scale = adapter_scale(policy.model) if adapters else 1.0
        self._ensemble = Ensemble(self._model, getattr(torch, settings.dtype), policy.device, adapters, scale)
        if adapters and not any(map(is_spread, self._trained.parameters())):
            self._ensemble.borrow({without_adapter(n): p.detach() for n, p in self._trained.named_parameters()})
        self._draws: list[Draw | None] = []
        self._step = -1

    def prepare(self, draws: int, tokens: int) -> None:
        """See `RolloutEngine.prepare`."""
        self._rows_per_draw(draws, 1, tokens)

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> int | None:
        """Make the weights of every draw: perturbed in float32, rounded once to the engine's dtype.

        Parameters that the posterior lacks are the model's.
        """
        self._draws, distinct = [], list(dict.fromkeys(draws))  # none can be used until all are made
        stacks = self._ensemble.stacks
        self._ensemble.resize(len(distinct))
        for index, draw in enumerate(distinct):
            mine = self._ensemble.views(index)
            missing = {stacks[name] for name in mine}
            for full_name, value in posterior.weights(draw, mine):
                name = without_adapter(full_name)
                assert name in stacks, name
                if name in mine:
                    mine[name].copy_(value)  # does nothing if the posterior wrote it there
                    missing.discard(stacks[name])
            for full_name, p in self._trained.named_parameters() if missing else ():
                if stacks[name := without_adapter(full_name)] in missing:
                    mine[name].copy_(p.detach())
            self._ensemble.pack(index)
        self._draws, self._step = distinct, step
        return None

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        if not requests:
            return []
        longest = max(len(request.prompt_tokens) for request in requests) + sampling.max_new_tokens
        replies = self._decoding(requests, sampling, seed, longest).run()
        return [self._completion(request, reply) for request, reply in zip(requests, replies, strict=True)]

    @torch.inference_mode()
    def converse(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int, talk: Talk) -> None:
        """See `ConversingEngine.converse`; a conversation keeps its place in the cache, and decoding waits for all."""
        asked = list(requests)

        def go_on(replies: Mapping[int, Reply]) -> dict[int, Start]:
            following = talk.follow([(row, self._completion(asked[row], reply)) for row, reply in replies.items()])
            for row, request in following.items():
                asked[row] = request
            return {row: self._start(request, seed) for row, request in following.items()}

        if requests:
            self._decoding(requests, sampling, seed, talk.longest, go_on).run()

    def _start(self, request: Request, seed: int) -> Start:
        return Start(request.prompt_tokens, row_key(seed, self._step, request))

    def _decoding(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        seed: int,
        longest: int,
        go_on: GoOn | None = None,
    ) -> Decoding:
        rows = rows_by_draw(requests, self._draws)
        return Decoding(
            self._ensemble,
            [self._start(request, seed) for request in requests],
            rows,
            rows_per_draw=self._rows_per_draw(len(rows), max(map(len, rows)), longest),
            longest=longest,
            stops=self._policy.stop_tokens,
            sampling=sampling,
            go_on=go_on,
        )

    def _completion(self, request: Request, reply: Reply) -> Completion:
        if math.isnan(sum(reply.logprobs)):
            raise UserError(
                f"engine: the probabilities of {request.draw or 'the mean'} are not numbers at step "
                f"{self._step}: the policy has diverged; lower optimizer.lr, or with IVON raise optimizer.ess"
            )
        return completion_of(self._policy, request, *reply, self._step)

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._draws = []
        self._ensemble.resize(0)

    def _rows_per_draw(self, draws: int, wanted: int, tokens: int) -> int:
        """Rows of each draw to decode together: at most `wanted`, within engine.max_batch_rows and memory."""
        check_positions(self._model.config, tokens)
        allowed = self._settings.max_batch_rows // draws
        if not allowed:
            raise UserError(
                f"engine.max_batch_rows = {self._settings.max_batch_rows}: fewer than the {draws} draws, which are "
                f"decoded together with at least one row each; raise it"
            )
        weights = self._ensemble.bytes_for(draws)
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        cached = whole_blocks(tokens) * bytes_per_token(self._model.config, self._ensemble.dtype)
        row = cached + sampling_bytes(vocabulary)
        budget = self._settings.memory_gib * GIB or own_bytes(self._policy.device) + self._ensemble.bytes
        most = int((budget - weights) // (row * draws))
        if most < 1:
            raise UserError(
                f"engine: {draws} policies of together {weights / GIB:.3g} GiB and cache and logits of "
                f"{row / GIB:.3g} GiB for one row of each ({tokens} tokens) need "
                f"{(weights + row * draws) / GIB:.3g} GiB; there are {budget / GIB:.3g}; lower the method's draws, "
                f"sampling.max_new_tokens or engine.dtype, or raise engine.memory_gib"
            )
        return min(max(wanted, 1), most, allowed)
