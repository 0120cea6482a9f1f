"""Log-probabilities and entropy of given tokens, in bounded memory.

Only the positions that are asked for go through the output head, a chunk at a time, and each chunk's logits are made
again in the backward pass: a [rows, tokens, vocabulary] tensor never exists. Legend: R rows, L padded length, K
positions asked for, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 24
"""Logits per chunk, K * V: 64 MiB in float32."""


@dataclass(frozen=True)
class TokenLogprobs:
    """[R, L-1] each, float32; entry t speaks of token t+1; zero outside the mask."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    """Of the whole distribution, in nats."""


def token_logprobs(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    temperature: float = 1.0,
    *,
    plain_head: bool = True,
    with_entropy_gradient: bool = False,
) -> TokenLogprobs:
    """Log-probs and entropies of the tokens that `mask` [R, L-1] selects, under logits divided by `temperature`.

    Args:
        model: a Hugging Face causal LM.
        input_ids: [R, L], padded on the right, so that a causal model needs no mask: nothing looks at what comes later.
        mask: [R, L-1] bool.
        temperature: above 0.
        plain_head: what `has_plain_head` found for this model.
        with_entropy_gradient: let gradients flow through the entropy (for an entropy bonus).
    """
    hidden, head = _split(model, input_ids[:, :-1], plain_head)
    selected = hidden[mask]
    targets = input_ids[:, 1:][mask]
    vocabulary = model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
    step = max(1, CHUNK_ELEMENTS // vocabulary)
    score = partial(_score, head, temperature=temperature, with_entropy_gradient=with_entropy_gradient)
    pieces = [
        checkpoint(score, selected[i : i + step], targets[i : i + step], use_reentrant=False)
        if torch.is_grad_enabled() and len(selected) > step
        else score(selected[i : i + step], targets[i : i + step])
        for i in range(0, len(selected), step)
    ]
    logprobs = torch.zeros(mask.shape, dtype=torch.float32, device=input_ids.device)
    entropy = torch.zeros_like(logprobs)
    if pieces:
        logprobs = logprobs.masked_scatter(mask, torch.cat([piece[0] for piece in pieces]))
        entropy = entropy.masked_scatter(mask, torch.cat([piece[1] for piece in pieces]))
    return TokenLogprobs(logprobs, entropy)


def _score(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    with_entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [K] of `targets` [K] from final hidden states [K, D]."""
    logits = head(hidden).float() / temperature
    distribution = logits.log_softmax(dim=-1)
    logprobs = distribution.gather(1, targets.unsqueeze(1)).squeeze(1)
    with torch.set_grad_enabled(with_entropy_gradient and torch.is_grad_enabled()):
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return logprobs, entropy


def _split(
    model: torch.nn.Module, input_ids: torch.Tensor, plain_head: bool
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Final hidden states [R, L, D], and the function from those to logits.

    A model that shapes its logits after the head (soft caps, scales) gives its full logits at once instead, at the
    price of their memory.
    """
    inputs = {"input_ids": input_ids, "use_cache": False}
    if plain_head:
        return model.base_model(**inputs).last_hidden_state, model.get_output_embeddings()  # type: ignore[operator]
    return model(**inputs).logits, _identity


def _identity(logits: torch.Tensor) -> torch.Tensor:
    return logits


@torch.no_grad()
def has_plain_head(model: torch.nn.Module) -> bool:
    """Whether the model's logits are its output embedding applied to its last hidden state, found by trying it."""
    if model.base_model is model:
        return False
    probe = torch.arange(1, 5, device=next(model.parameters()).device).unsqueeze(0)
    hidden = model.base_model(input_ids=probe, use_cache=False).last_hidden_state  # type: ignore[operator]
    ours = model.get_output_embeddings()(hidden)  # type: ignore[operator]
    return bool(torch.equal(ours, model(input_ids=probe, use_cache=False).logits))
