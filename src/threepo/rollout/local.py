"""The PyTorch engine: the rows of all draws decoded in one batch, each through its own weights (ensemble.py).

For Hugging Face decoders, on CPU or CUDA (not yet run on a GPU). Of a draw's rows that begin together, those with the
same prompt have it read once. Finished rows leave the batch, and where there are more rows than memory, waiting ones
take their places.
"""

import math
from collections import deque
from collections.abc import Sequence

import torch

from threepo.config import EngineConfig, SamplingConfig
from threepo.errors import UserError
from threepo.models.policy import Policy
from threepo.posterior.policy_optimizer import WeightSource
from threepo.rollout.cache import room_for
from threepo.rollout.decoding import Decoding, Job
from threepo.rollout.ensemble import Ensemble, check_positions
from threepo.rollout.memory import GIB, available_bytes, bytes_per_token, choosing_bytes
from threepo.rollout.sampling import row_key
from threepo.types import Completion, Draw, FinishReason, Request


class LocalEngine:
    """A `RolloutEngine` in this process; keeps one copy of the weights per loaded draw, in the engine's dtype."""

    def __init__(self, policy: Policy, settings: EngineConfig) -> None:
        """`UserError` if the model's weights cannot be stacked."""
        dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
        self._model = getattr(policy.model, "_orig_mod", policy.model)  # what torch.compile was given
        self._ensemble = Ensemble(self._model, dtype)
        self._policy = policy
        self._settings = settings
        self._draws: list[Draw | None] = []
        self._step = -1

    def prepare(self, draws: int, tokens: int) -> None:
        """Refuse, with the numbers, what cannot fit: so many draws, and one row of so many tokens for each."""
        self._slots(draws, 1, tokens)

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> None:
        """Make the weights of every draw: perturbed in float32, rounded once to the engine's dtype.

        What the posterior has no say in is as in the model. `UserError` if it names what the model does not have.
        """
        self._draws = []  # until all are made, none can be used
        others = self._not_in(posterior)
        self._ensemble.resize(len(draws))
        for index, draw in enumerate(draws):
            mine = self._ensemble.views(index)
            for name, value in posterior.weights(draw, mine):
                if value is not mine[name]:
                    mine[name].copy_(value)
            for name, value in others.items():
                mine[name].copy_(value)
            self._ensemble.pack(index)
        self._draws = list(draws)
        self._step = step

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        number = {draw: n for n, draw in enumerate(self._draws)}
        waiting: list[deque[Job]] = [deque() for _ in self._draws]
        for index, request in enumerate(requests):
            if request.draw not in number:
                raise RuntimeError(f"{request.draw} is not loaded into the engine; loaded: {self._draws}")
            key = row_key(seed, self._step, request.problem.id, request.rollout)
            waiting[number[request.draw]].append(Job(index, request.prompt_tokens, key))
        if not requests:
            return []
        tokens = max(len(request.prompt_tokens) for request in requests) + sampling.max_new_tokens
        slots = self._slots(len(self._draws), max(map(len, waiting)), tokens)
        decoding = Decoding(self._ensemble, waiting, slots, tokens, self._policy.stop_tokens, sampling)
        completions = [
            self._completion(request, *decoded) for request, decoded in zip(requests, decoding.run(), strict=True)
        ]
        for completion in completions:
            if math.isnan(sum(completion.logprobs)):
                raise UserError(
                    f"engine: the probabilities of {completion.draw or 'the mean'} are not numbers at step "
                    f"{self._step}: the policy has diverged; lower optimizer.lr, or with IVON raise optimizer.ess"
                )
        return completions

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._draws = []
        self._ensemble.resize(0)

    def _not_in(self, posterior: WeightSource) -> dict[str, torch.Tensor]:
        """The model's parameters that a posterior does not have, by name."""
        stacks, known = self._ensemble.by_any_name, set()
        for name, _ in posterior.weights(None):
            if name not in stacks:
                raise UserError(
                    f"engine.kind = 'local': the optimizer has a parameter {name!r}, which the model does not have; "
                    f"make it with the policy's model.named_parameters()"
                )
            known.add(stacks[name])
        return {name: p.detach() for name, p in self._model.named_parameters() if stacks[name] not in known}

    def _slots(self, draws: int, wanted: int, tokens: int) -> int:
        """Rows of each draw that are decoded together: as many as wanted, allowed, and as fit into memory."""
        check_positions(self._model.config, tokens)
        allowed = self._settings.max_batch_rows // draws
        if not allowed:
            raise UserError(
                f"engine.max_batch_rows = {self._settings.max_batch_rows}: fewer than the {draws} draws that are "
                f"decoded together, a row of each at least; raise it"
            )
        weights = draws * self._ensemble.numbers * self._ensemble.dtype.itemsize
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        row = room_for(tokens) * bytes_per_token(self._model.config, self._ensemble.dtype) + choosing_bytes(vocabulary)
        budget = self._settings.memory_gib * GIB or available_bytes(self._policy.device) + self._ensemble.bytes
        fitting = int((budget - weights) // (row * draws))
        if fitting < 1:
            raise UserError(
                f"engine: {draws} policies of {weights / draws / GIB:.3g} GiB and cache and logits of "
                f"{row / GIB:.3g} GiB for one row of each ({tokens} tokens) need "
                f"{(weights + row * draws) / GIB:.3g} GiB; there are {budget / GIB:.3g}; lower the method's draws, "
                f"sampling.max_new_tokens or engine.dtype, or raise engine.memory_gib"
            )
        return min(max(wanted, 1), fitting, allowed)

    def _completion(self, request: Request, tokens: list[int], logprobs: list[float]) -> Completion:
        stopped = tokens[-1] in self._policy.stop_tokens
        reason: FinishReason = "stop" if stopped else "length"
        text = self._policy.tokenizer.decode(tokens[:-1] if stopped else tokens, skip_special_tokens=True)
        return Completion(
            problem=request.problem,
            prompt_tokens=request.prompt_tokens,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            text=text,
            finish_reason=reason,
            draw=request.draw,
            rollout=request.rollout,
            policy_step=self._step,
            opening=self._policy.opening(request.prompt_tokens),
        )
