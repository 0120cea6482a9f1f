"""Group-relative advantages (paper section 2.1; method.md 2.1). Every choice is a field of `config.Advantage`."""

import torch

from threepo.config import Advantage


def group_advantages(rewards: torch.Tensor, settings: Advantage) -> torch.Tensor:
    """Advantages of completions that compete with each other.

    Args:
        rewards: [..., G], one group along the last dimension.
        settings: scale, ddof, epsilon. (`zero_variance` is obeyed where rows are chosen.)

    Returns:
        [..., G] of the same dtype: (r - mean) / (std + epsilon). Equal rewards give exactly 0. A group of one has
        nothing to compare with: its mean counts as 0 and its deviation as 1, so A = r / (1 + epsilon), as in verl.
    """
    size = rewards.shape[-1]
    if size == 1:
        return rewards / (1.0 + settings.epsilon) if settings.scale == "std" else rewards.clone()
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    # A float mean of equal numbers may be off by a rounding; equal rewards must give exactly nothing.
    centred = torch.where(zero_variance(rewards).unsqueeze(-1), torch.zeros_like(centred), centred)
    if settings.scale == "none":
        return centred
    return centred / (rewards.std(dim=-1, correction=settings.ddof, keepdim=True) + settings.epsilon)


def zero_variance(rewards: torch.Tensor) -> torch.Tensor:
    """Which groups have advantages of 0 throughout: bool of shape [...] for rewards of shape [..., G]."""
    if rewards.shape[-1] == 1:
        return rewards[..., 0] == 0
    return (rewards == rewards[..., :1]).all(dim=-1)
