"""The kernels of fused_scores.py, in Triton: a program keeps running sums of one token's row of logits.

A first version was run on an H100; this one has only been interpreted and compiled (docs/gpu.md).
tests/models/triton_scores_interpreted.py holds the numbers against float64.
"""

# Triton reads annotations as its own, so the kernels have none of ours.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Logits at a time."""
_OPTIONS = {"block": BLOCK, "num_warps": 8, "enable_fp_fusion": False}
"""Options of every launch. Without fusion, the largest logit minus itself is exactly 0."""
_LOWEST = tl.constexpr(-3e38)  # finite: no difference of two is NaN
_jit: Any = triton.jit


@_jit
def _forward(logits, targets, inverse, logprobs, entropy, top, log_sum, vocabulary, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    logits += token * vocabulary
    # With x - most and its exponential e: the sums of e and of e * (x - most), where `most` is the largest x so far.
    most = tl.full((), _LOWEST, tl.float32)
    mass, moment = tl.zeros_like(most), tl.zeros_like(most)
    for start in range(0, vocabulary, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < vocabulary, other=0.0).to(tl.float32) * inverse
        higher = tl.maximum(most, tl.max(tl.where(at < vocabulary, x, _LOWEST)))
        shrunk, lowered = tl.exp(most - higher), most - higher
        moment = shrunk * (moment + lowered * mass)
        distance = x - higher
        e = tl.where(at < vocabulary, tl.exp(distance), 0.0)
        mass = shrunk * mass + tl.sum(e)
        moment += tl.sum(tl.where(e == 0, 0.0, e * distance))  # not 0 * inf, of a token that cannot be
        most = higher
    log_mass = tl.log(mass)
    chosen = tl.load(logits + tl.load(targets + token)).to(tl.float32) * inverse
    tl.store(logprobs + token, chosen - most - log_mass)
    tl.store(entropy + token, log_mass - moment / mass)
    tl.store(top + token, most)
    tl.store(log_sum + token, log_mass)


@_jit
def _backward(
    grad, logits, targets, inverse, entropy, top, log_sum, grad_logprobs, grad_entropy, vocabulary,
    block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    logits += token * vocabulary
    grad += token * vocabulary
    target, h = tl.load(targets + token), tl.load(entropy + token)
    to_logprob, to_entropy = tl.load(grad_logprobs + token), tl.load(grad_entropy + token)
    most, log_mass = tl.load(top + token), tl.load(log_sum + token)
    for start in range(0, vocabulary, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < vocabulary, other=0.0).to(tl.float32) * inverse
        logprob = x - most - log_mass
        p = tl.exp(logprob)
        moved = tl.where(p == 0, 0.0, -p * (to_logprob + to_entropy * (logprob + h)))
        moved = tl.where(at == target, moved + to_logprob, moved) * inverse
        tl.store(grad + at, moved.to(grad.dtype.element_ty), mask=at < vocabulary)


def forward(logits: torch.Tensor, targets: torch.Tensor, temperature: float, out: list[torch.Tensor]) -> None:
    """Write log-prob, entropy, the largest logit, and the log of the sum of exponentials."""
    with torch.cuda.device_of(logits):  # Triton launches on the current device, wherever the tensors are
        _forward[(len(logits),)](logits, targets, 1 / temperature, *out, logits.shape[1], **_OPTIONS)


def backward(
    out: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, temperature: float, *given: torch.Tensor
) -> None:
    """Write the gradient of logits; given are all but the log-prob of `forward`, and two gradients."""
    with torch.cuda.device_of(logits):
        _backward[(len(logits),)](out, logits, targets, 1 / temperature, *given, logits.shape[1], **_OPTIONS)
