"""Rows to micro-batches: similar lengths together, under a token budget. Legend: R rows, L padded length."""

from collections.abc import Iterator, Sequence

import torch

from threepo.types import MicroBatch, TrainingRow


def pack(rows: Sequence[TrainingRow], token_budget: int, pad_token: int, device: torch.device) -> Iterator[MicroBatch]:
    """Micro-batches of at most `token_budget` tokens, padding included; a longer single row goes alone.

    Rows are taken by length, then by their place in the step, so the packing depends on nothing else.
    """
    waiting: list[TrainingRow] = []
    for row in sorted(rows, key=lambda row: (_length(row), row.index)):
        if waiting and (len(waiting) + 1) * _length(row) > token_budget:
            yield collate(waiting, pad_token, device)
            waiting = []
        waiting.append(row)
    if waiting:
        yield collate(waiting, pad_token, device)


def _length(row: TrainingRow) -> int:
    return len(row.completion.prompt_tokens) + len(row.completion.tokens)


def collate(rows: Sequence[TrainingRow], pad_token: int, device: torch.device) -> MicroBatch:
    """Rows as one padded micro-batch (see `MicroBatch` for the shapes)."""
    longest = max(map(_length, rows))
    input_ids = torch.full((len(rows), longest), pad_token, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    mask = torch.zeros(len(rows), longest - 1, dtype=torch.bool)
    for i, row in enumerate(rows):
        prompt, tokens = row.completion.prompt_tokens, row.completion.tokens
        input_ids[i, : len(prompt) + len(tokens)] = torch.tensor(prompt + tokens)
        attention_mask[i, : len(prompt) + len(tokens)] = 1
        mask[i, len(prompt) - 1 : len(prompt) + len(tokens) - 1] = True
    behaviour = spread([torch.tensor(row.completion.logprobs) for row in rows], mask)
    return MicroBatch(
        rows=tuple(rows),
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.to(device),
        mask=mask.to(device),
        behaviour_logprobs=behaviour.to(device),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32, device=device),
        row_weights=torch.tensor([row.weight for row in rows], dtype=torch.float32, device=device),
    )


def spread(values: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """One value per completion token of each row, laid out as [R, L-1] with zeros outside the mask."""
    flat = torch.cat([value.to(mask.device, torch.float32) for value in values])
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, flat)
