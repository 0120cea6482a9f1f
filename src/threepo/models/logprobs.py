"""Log-probabilities of the tokens that a loss counts, and measures of their distributions, in bounded memory.

Only positions that predict such a token go through the output head, one chunk at a time, and the backward pass
recomputes each chunk's logits, so there is never a [tokens, vocabulary] tensor. Legend: R rows, L length of the
longest, T tokens of all rows, K tokens that the loss counts, D width, V vocabulary.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from threepo.models.attention import PackedRows, padded_slots, run_packed
from threepo.types import MicroBatch

CHUNK_ELEMENTS = 1 << 24
"""Logits per chunk, K * V: 64 MiB in float32."""


class TokenLogprobs(NamedTuple):
    """Scores of the tokens that a loss counts: [K] each; nats, float32."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    """Entropy of the distribution that the token was drawn from."""
    self_certainty: torch.Tensor
    """KL(uniform || that distribution) (arXiv 2502.18581); never with gradient."""


def token_logprobs(
    model: torch.nn.Module,
    packed: MicroBatch,
    temperature: float = 1.0,
    *,
    linear_head: bool = True,
    packed_rows: bool = False,
    with_entropy_gradient: bool = False,
) -> TokenLogprobs:
    """Log-probs of `packed.targets`, and measures of their distributions.

    Args:
        model: a Hugging Face causal LM.
        packed: rows of tokens, on the model's device.
        temperature: divides the logits; above 0.
        linear_head: the result of `has_linear_head` for this model.
        packed_rows: the result of `attention.takes_packed_rows` for it.
        with_entropy_gradient: let gradients flow through the entropy (for an entropy bonus).
    """
    # A model that changes logits after the head (soft caps, scales) computes all of them at once, which costs memory.
    inner: Any = model.base_model if linear_head else model
    head: Any = model.get_output_embeddings() if linear_head else torch.nn.Identity()  # type: ignore[operator]

    def score(hidden: torch.Tensor, targets: torch.Tensor) -> TokenLogprobs:
        """Scores of the tokens `targets` [K] from final hidden states [K, D]."""
        distribution = (head(hidden).float() / temperature).log_softmax(dim=-1)
        logprobs = distribution.gather(1, targets.unsqueeze(1)).squeeze(1)
        with torch.set_grad_enabled(with_entropy_gradient and torch.is_grad_enabled()):
            entropy = -(distribution.exp() * distribution).sum(dim=-1)
        return TokenLogprobs(logprobs, entropy, -distribution.detach().mean(dim=-1) - math.log(distribution.shape[1]))

    states = _states(inner, packed, packed_rows)
    vocabulary = model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
    step = max(1, CHUNK_ELEMENTS // vocabulary)
    chunks = list(zip(torch.split(states, step), torch.split(packed.targets, step), strict=True))
    again = partial(checkpoint, score, use_reentrant=False) if torch.is_grad_enabled() and len(chunks) > 1 else score
    return TokenLogprobs(*map(torch.cat, zip(*(again(*chunk) for chunk in chunks), strict=True)))


def _states(inner: Any, packed: MicroBatch, packed_rows: bool) -> torch.Tensor:
    """Final hidden states [K, D] of a base model, or logits [K, V] of a whole one."""
    ids, lengths, positions = packed.input_ids, packed.row_lengths, packed.loss_positions
    if packed_rows:
        output = run_packed(inner, ids, PackedRows(lengths, ids.device))
    else:  # side by side [R, L], without a mask: a causal model never looks from a real token to padding on the right
        slots = padded_slots(lengths, ids.device)
        padded = ids.new_zeros(len(lengths) * max(lengths)).index_copy(0, slots, ids).view(len(lengths), -1)
        output, positions = inner(input_ids=padded, use_cache=False), slots[positions]
    states = output.logits if "logits" in output else output.last_hidden_state
    return states.flatten(0, 1).index_select(0, positions)  # type: ignore[no-any-return]


@torch.no_grad()
def has_linear_head(model: torch.nn.Module) -> bool:
    """True if the model's logits are its output embedding applied to its last hidden state, found by a trial."""
    if model.base_model is model:
        return False
    probe = torch.arange(1, 5, device=next(model.parameters()).device).unsqueeze(0)
    hidden = model.base_model(input_ids=probe, use_cache=False).last_hidden_state  # type: ignore[operator]
    ours = model.get_output_embeddings()(hidden)  # type: ignore[operator]
    return bool(torch.equal(ours, model(input_ids=probe, use_cache=False).logits))
