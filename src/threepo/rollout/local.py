"""The PyTorch engine: it decodes the rows of all draws in one batch, each row through its own weights (ensemble.py).

For Hugging Face decoders, on CPU or CUDA (not run on a GPU yet). Rows of a draw that start together and have the same
prompt read it once. Finished rows leave the batch. If memory is too small for all rows, waiting rows take their slots.
"""

import math
from collections.abc import Sequence

import torch

from threepo.config import EngineConfig, SamplingConfig
from threepo.errors import UserError
from threepo.models.policy import Policy
from threepo.posterior.policy_optimizer import WeightSource
from threepo.rollout.cache import whole_blocks
from threepo.rollout.decoding import Decoding
from threepo.rollout.engines import completed, row_key, rows_by_draw
from threepo.rollout.ensemble import Ensemble, check_positions
from threepo.rollout.memory import GIB, available_bytes, bytes_per_token, sampling_bytes
from threepo.types import Completion, Draw, Request


class LocalEngine:
    """A `RolloutEngine` in this process, with a copy of the weights for each loaded draw, in the engine's dtype."""

    def __init__(self, policy: Policy, settings: EngineConfig) -> None:
        """`UserError` if the model's weights cannot be stacked."""
        self._policy, self._settings = policy, settings
        self._model = getattr(policy.model, "_orig_mod", policy.model)  # before torch.compile
        self._ensemble = Ensemble(self._model, getattr(torch, settings.dtype))
        self._draws: list[Draw | None] = []
        self._step = -1

    def prepare(self, draws: int, tokens: int) -> None:
        """See `RolloutEngine.prepare`."""
        self._rows_per_draw(draws, 1, tokens)

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> None:
        """Make the weights of every draw: perturbed in float32, rounded once to the engine's dtype.

        Parameters that the posterior does not have are the model's. `UserError` if it has others than the model.
        """
        self._draws, distinct = [], list(dict.fromkeys(draws))  # none can be used until all are made
        stacks, known = self._ensemble.stacks, set()
        for name, _ in posterior.weights(None):
            if name not in stacks:
                raise UserError(
                    f"engine.kind = 'local': the optimizer has a parameter {name!r}, which the model does not have; "
                    f"construct it with the policy's model.named_parameters()"
                )
            known.add(stacks[name])
        others = {name: p.detach() for name, p in self._model.named_parameters() if stacks[name] not in known}
        self._ensemble.resize(len(distinct))
        for index, draw in enumerate(distinct):
            mine = self._ensemble.views(index)
            for name, value in posterior.weights(draw, mine):
                if value is not mine[name]:
                    mine[name].copy_(value)
            for name, value in others.items():
                mine[name].copy_(value)
            self._ensemble.pack(index)
        self._draws, self._step = distinct, step

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        rows = rows_by_draw(requests, self._draws)
        if not requests:
            return []
        prompts = [request.prompt_tokens for request in requests]
        keys = [row_key(seed, self._step, request.problem.id, request.rollout) for request in requests]
        most = self._rows_per_draw(len(rows), max(map(len, rows)), max(map(len, prompts)) + sampling.max_new_tokens)
        decoded = Decoding(self._ensemble, prompts, keys, rows, most, self._policy.stop_tokens, sampling).run()
        for request, (_, logprobs) in zip(requests, decoded, strict=True):
            if math.isnan(sum(logprobs)):
                raise UserError(
                    f"engine: the probabilities of {request.draw or 'the mean'} are not numbers at step "
                    f"{self._step}: the policy has diverged; lower optimizer.lr, or with IVON raise optimizer.ess"
                )
        return [
            completed(self._policy, request, *of, self._step) for request, of in zip(requests, decoded, strict=True)
        ]

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
        weights = draws * self._ensemble.bytes_per_draw
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        cached = whole_blocks(tokens) * bytes_per_token(self._model.config, self._ensemble.dtype)
        row = cached + sampling_bytes(vocabulary)
        budget = self._settings.memory_gib * GIB or available_bytes(self._policy.device) + self._ensemble.bytes
        most = int((budget - weights) // (row * draws))
        if most < 1:
            raise UserError(
                f"engine: {draws} policies of {weights / draws / GIB:.3g} GiB and cache and logits of "
                f"{row / GIB:.3g} GiB for one row of each ({tokens} tokens) need "
                f"{(weights + row * draws) / GIB:.3g} GiB; there are {budget / GIB:.3g}; lower the method's draws, "
                f"sampling.max_new_tokens or engine.dtype, or raise engine.memory_gib"
            )
        return min(max(wanted, 1), most, allowed)
