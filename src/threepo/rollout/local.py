"""The PyTorch engine: batched decoding with a key-value cache, for any Hugging Face causal LM, on CPU or CUDA.

Draws are decoded one after another, each with weights of its own in the engine's dtype. A prompt is read once per
draw, however many rollouts it gets, and finished rows leave the batch. Legend: R rows, U prompts, T new tokens.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from threepo.config import EngineConfig, SamplingConfig
from threepo.models.policy import Policy
from threepo.posterior.noise import uniforms
from threepo.posterior.policy_optimizer import WeightSource
from threepo.rollout.sampling import choose, processed_logprobs, row_key
from threepo.types import Completion, Draw, FinishReason, Request

COMPACT_BELOW = 0.75
"""Finished rows are taken out of the batch when fewer than this share of it is still running."""


class LocalEngine:
    """A `RolloutEngine` in this process; keeps one copy of the weights per loaded draw."""

    def __init__(self, policy: Policy, settings: EngineConfig) -> None:
        dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
        self._model = copy.deepcopy(policy.model).to(dtype).eval().requires_grad_(False)
        self._policy = policy
        self._dtype = dtype
        self._max_rows = settings.max_batch_rows
        self._weights: dict[Draw | None, dict[str, torch.Tensor]] = {}
        self._step = -1

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> None:
        """Copy the weights of every draw: perturbed in float32, then rounded once to the engine's dtype."""
        self._weights = {
            draw: {name: value.to(self._dtype, copy=True) for name, value in posterior.weights(draw)} for draw in draws
        }
        self._step = step

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        done: dict[int, Completion] = {}
        for draw in dict.fromkeys(request.draw for request in requests):
            if draw not in self._weights:
                raise RuntimeError(f"{draw} is not loaded into the engine; loaded: {list(self._weights)}")
            self._use(self._weights[draw])
            mine = [i for i, request in enumerate(requests) if request.draw == draw]
            for start in range(0, len(mine), self._max_rows):
                rows = mine[start : start + self._max_rows]
                finished = self._decode([requests[i] for i in rows], sampling, seed)
                done.update(zip(rows, finished, strict=True))
        return [done[i] for i in range(len(requests))]

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._weights = {}

    def _use(self, weights: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.data = weights[name]

    def _decode(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        device = self._policy.device
        keys = [row_key(seed, self._step, request.problem.id, request.rollout) for request in requests]
        random = uniforms(keys, 0, sampling.max_new_tokens, device)
        stops = torch.tensor(self._policy.stop_tokens, dtype=torch.int64, device=device)
        tokens = torch.zeros(len(requests), sampling.max_new_tokens, dtype=torch.int64)
        logprobs = torch.zeros(len(requests), sampling.max_new_tokens)
        lengths = torch.full((len(requests),), sampling.max_new_tokens)
        state, logits = self._prefill(requests)
        running = torch.ones(len(requests), dtype=torch.bool, device=device)
        for t in range(sampling.max_new_tokens):
            distribution = processed_logprobs(logits, sampling.temperature, sampling.top_p, sampling.top_k)
            if sampling.temperature:
                chosen = choose(distribution, random[state.rows, t])
            else:
                chosen = distribution.argmax(dim=-1)
            here = state.rows.cpu()
            tokens[here, t] = chosen.cpu()
            logprobs[here, t] = distribution.gather(1, chosen.unsqueeze(1)).squeeze(1).cpu()
            stopped = torch.isin(chosen, stops) & running
            lengths[state.rows[stopped].cpu()] = t + 1
            running &= ~stopped
            if not running.any():
                break
            if t + 1 < sampling.max_new_tokens:
                if running.float().mean() < COMPACT_BELOW:
                    chosen, running = state.keep(running, chosen), running[running]
                logits = self._advance(state, chosen)
        return [
            self._completion(request, tokens[i, : lengths[i]].tolist(), logprobs[i, : lengths[i]].tolist())
            for i, request in enumerate(requests)
        ]

    def _prefill(self, requests: Sequence[Request]) -> tuple["_DecodingState", torch.Tensor]:
        """Read every different prompt once, then hand its cache to all of its rows."""
        device = self._policy.device
        prompts = list(dict.fromkeys(request.prompt_tokens for request in requests))
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self._policy.pad_token, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        cache = DynamicCache(config=self._model.config)
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        position = {prompt: i for i, prompt in enumerate(prompts)}
        owner = torch.tensor([position[request.prompt_tokens] for request in requests], device=device)
        cache.batch_select_indices(owner)
        rows = torch.arange(len(requests), device=device)
        return _DecodingState(cache, mask[owner], rows), output.logits[owner, -1]

    def _advance(self, state: "_DecodingState", chosen: torch.Tensor) -> torch.Tensor:
        """One step of all rows in the batch; logits [R, V] of the next token."""
        state.mask = torch.cat([state.mask, torch.ones_like(state.mask[:, :1])], dim=1)
        output = self._model(
            input_ids=chosen.unsqueeze(1),
            attention_mask=state.mask,
            position_ids=state.mask.sum(dim=1, keepdim=True) - 1,
            past_key_values=state.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]  # type: ignore[no-any-return]

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
        )


@dataclass
class _DecodingState:
    """The rows that are still in the batch."""

    cache: Any
    mask: torch.Tensor
    """[R, tokens so far] 1 where there is a token, 0 where a shorter prompt was padded."""
    rows: torch.Tensor
    """[R] position of each row in the request list."""

    def keep(self, running: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Drop the rows that are not `running`; returns what is left of `chosen`."""
        index = running.nonzero().squeeze(1)
        self.cache.batch_select_indices(index)
        self.mask, self.rows = self.mask[index], self.rows[index]
        return chosen[index]
