"""Log-probabilities of the tokens that a loss counts, and entropies of their distributions, in bounded memory.

Only positions that predict such a token go through the output head, one chunk at a time, and the backward pass
recomputes each chunk's logits, so there is never a [tokens, vocabulary] tensor. Legend: R rows, L length of the
longest, T tokens of all rows, K tokens that the loss counts, D width, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from threepo.models import fused_scores
from threepo.models.attention import PackedRows, padded_slots, run_packed
from threepo.types import MicroBatch

CPU_CHUNK, PLAIN_CHUNK, FUSED_CHUNK = 1 << 24, 1 << 26, 1 << 28
"""Logits per chunk, K * V: on a CPU, elsewhere, and where they are scored without float32 tensors of their size.

A chunk costs a gradient of the head to add up: an update of 0.5B took 318 ms with 2^28, 341 with 2^26, 486 with 2^24
on an H100, all scored by torch (docs/gpu.md).
"""


class TokenLogprobs(NamedTuple):
    """Scores of the tokens that a loss counts: [K] each; nats, float32."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    """Entropy of the distribution that the token was drawn from."""


class Scorer(torch.nn.Module):
    """A model's whole way from tokens to log-probs as one module, whose forward pass FSDP2 can hook.

    What lies outside the blocks (embedding, last norm, head) is then gathered for body and head together.
    """

    def __init__(
        self, model: Any, linear_head: bool = True, packed_rows: bool = False, chunk: int = 0, fused: bool = False
    ) -> None:
        """Take a causal LM with the results of `has_linear_head` and `attention.takes_packed_rows` for it.

        `chunk`: most logits at a time, by default what suits the device. `fused`: logits are scored as on a GPU
        (fused_scores.py) wherever they are, as the plan's tensors without memory are.
        """
        super().__init__()
        self.model, self.linear_head, self.packed_rows = model, linear_head, packed_rows
        self.chunk, self.fused = chunk, fused

    def forward(
        self, packed: MicroBatch, temperature: float = 1.0, *, with_entropy_gradient: bool = False
    ) -> TokenLogprobs:
        """Log-probs of `packed.targets`, and measures of their distributions; `temperature` divides the logits.

        `with_entropy_gradient`: gradients flow through the entropy, too (for an entropy bonus).
        """
        output = self.model.get_output_embeddings()
        head = output if self.linear_head else torch.nn.Identity()
        device = packed.targets.device
        fused = self.fused or fused_scores.serves(device)

        def score(hidden: torch.Tensor, targets: torch.Tensor) -> TokenLogprobs:
            """Scores of the tokens `targets` [K] from final hidden states [K, D]."""
            if not fused:
                return plain_scores(head(hidden), targets, temperature, with_entropy_gradient)
            logprobs, entropy, *_ = fused_scores.token_scores(head(hidden), targets, temperature)
            return TokenLogprobs(logprobs, entropy if with_entropy_gradient else entropy.detach())

        usual = FUSED_CHUNK if fused else CPU_CHUNK if device.type == "cpu" else PLAIN_CHUNK
        step = max(1, (self.chunk or usual) // output.weight.shape[0])
        chunks = list(zip(torch.split(self._states(packed), step), torch.split(packed.targets, step), strict=True))
        if torch.is_grad_enabled() and len(chunks) > 1:
            scores = [checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks]
        else:
            scores = [score(*chunk) for chunk in chunks]
        return TokenLogprobs(*map(torch.cat, zip(*scores, strict=True)))

    def _states(self, packed: MicroBatch) -> torch.Tensor:
        """Final hidden states [K, D], or logits [K, V] of a model that changes them after the head (soft caps)."""
        ids, lengths, positions = packed.input_ids, packed.row_lengths, packed.loss_positions
        inner = self.model.base_model if self.linear_head else self.model
        if self.packed_rows:
            output = run_packed(inner, ids, PackedRows(lengths, ids.device))
        else:  # side by side [R, L], without a mask: a causal model never looks from a real token to padding after it
            slots = padded_slots(lengths, ids.device)
            padded = ids.new_zeros(len(lengths) * max(lengths)).index_copy(0, slots, ids).view(len(lengths), -1)
            output, positions = inner(input_ids=padded, use_cache=False), slots[positions]
        states = output.logits if "logits" in output else output.last_hidden_state
        return states.flatten(0, 1).index_select(0, positions)  # type: ignore[no-any-return]


def plain_scores(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy_gradient: bool
) -> TokenLogprobs:
    """Scores of the tokens `targets` [K] from logits [K, V]."""
    distribution = (logits.float() / temperature).log_softmax(dim=-1)
    logprobs = distribution.gather(1, targets.unsqueeze(1)).squeeze(1)
    with torch.set_grad_enabled(with_entropy_gradient and torch.is_grad_enabled()):
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return TokenLogprobs(logprobs, entropy)


@torch.no_grad()
def has_linear_head(model: torch.nn.Module) -> bool:
    """True if the model's logits are its output embedding applied to its last hidden state, found by a trial."""
    if model.base_model is model:
        return False
    probe = torch.arange(1, 5, device=next(model.parameters()).device).unsqueeze(0)
    hidden = model.base_model(input_ids=probe, use_cache=False).last_hidden_state  # type: ignore[operator]
    ours = model.get_output_embeddings()(hidden)  # type: ignore[operator]
    return bool(torch.equal(ours, model(input_ids=probe, use_cache=False).logits))
