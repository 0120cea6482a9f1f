"""Sampling of tokens from logits, with random numbers that depend on the row and not on the batch.

Legend: R rows, V vocabulary.
"""

import torch

BLOCK = 128
"""Tokens in a block of `sample_tokens`."""


def processed_logprobs(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """Log-probs [R, V] (float32) of the distribution that tokens are drawn from: temperature, then top-k, then top-p.

    Tokens outside the cuts have log-prob -inf, and the rest is renormalised. Temperature 0 decodes greedily; since a
    deterministic choice has no log-probs, it gets the log-probs of temperature 1 without cuts (method.md 3.5).
    """
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(dim=-1)
    if temperature == 0 or (top_p >= 1 and top_k == 0):
        return logprobs
    if 0 < top_k < logprobs.shape[-1]:
        # Several tokens may share the k-th value; a stable sort breaks the tie by index, so exactly k tokens stay.
        order = logprobs.argsort(dim=-1, descending=True, stable=True)
        logprobs = logprobs.scatter(-1, order[:, top_k:], float("-inf")).log_softmax(dim=-1)
    if top_p < 1:
        ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
        before = ordered.exp().cumsum(dim=-1) - ordered.exp()
        cut = ordered.masked_fill(before >= top_p, float("-inf"))  # the most probable token always stays
        logprobs = torch.empty_like(logprobs).scatter_(-1, order, cut).log_softmax(dim=-1)
    return logprobs


def sample_tokens(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens [R] by inverse transform of uniforms [R] in [0, 1) through the distributions [R, V].

    A block of tokens is sampled first, then a token in it: with a vocabulary of 150,000, cumulative sums over all
    tokens would cost more than the model.
    """
    rows, size = logprobs.shape
    blocks = -(-size // BLOCK)
    probabilities = torch.nn.functional.pad(logprobs.exp(), (0, blocks * BLOCK - size)).view(rows, blocks, BLOCK)
    ends = probabilities.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    # Below the total by more than rounding, so that the target is never past the last token of positive probability.
    target = uniforms.double().clamp(max=1 - 2.0**-40).unsqueeze(1) * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp(max=blocks - 1)  # NaN would be past the end
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    within = probabilities[torch.arange(rows, device=block.device), block.squeeze(1)].double().cumsum(dim=-1)
    # right=True skips tokens of zero probability, whose cumulative value equals the one before them. This sum may end
    # below the block's, because of rounding; the clamp then selects the last token of positive probability.
    inside = torch.minimum(target - before, within[:, -1:] * (1 - 2.0**-40))
    token = torch.searchsorted(within, inside, right=True)
    return (block * BLOCK + token).squeeze(1).clamp(max=size - 1)
