"""Decoding the rows of several policies in one batch: which rows are in it, token by token.

Legend: N draws, B rows in the batch, ordered by draw, R rows in all, T new tokens, V vocabulary.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from threepo.config import SamplingConfig
from threepo.posterior.noise import Key, uniforms
from threepo.rollout.cache import Decode, Prefill, RowCache
from threepo.rollout.ensemble import Ensemble, Rows
from threepo.rollout.sampling import choose, processed_logprobs

SETTLE_BELOW = 15 / 16
"""When fewer than this share of the batch is still running, finished rows leave it and waiting ones enter."""
PREFILL_TOKENS = 1 << 14
"""Most prompt tokens, padding included, that one pass reads."""

Prompt = tuple[int, ...]


class Decoding:
    """One call of an engine: from prompts to new tokens and their log-probs."""

    def __init__(
        self,
        ensemble: Ensemble,
        prompts: Sequence[Prompt],
        keys: list[Key],
        rows_by_draw: Sequence[Sequence[int]],
        rows_per_draw: int,
        stops: Sequence[int],
        sampling: SamplingConfig,
    ) -> None:
        """Rows have the indices 0 to R - 1 in this call.

        Args:
            ensemble: the weights of N draws.
            prompts: of each row.
            keys: of each row, for its random numbers.
            rows_by_draw: the rows of each draw.
            rows_per_draw: most rows of a draw that are decoded together.
            stops: tokens that end a row.
            sampling: how tokens are sampled.
        """
        self._ensemble, self._prompts, self._per_draw, self._sampling = ensemble, prompts, rows_per_draw, sampling
        self._waiting = [deque(rows) for rows in rows_by_draw]
        device = self._device = ensemble.device
        self._none = rows = len(prompts)
        """The index of no row; results of empty rows go to an entry of their own at the end."""
        longest = sampling.max_new_tokens
        self._random = torch.zeros(rows + 1, longest, dtype=torch.float64, device=device)
        self._random[:rows] = uniforms(keys, 0, longest, device)
        self._tokens = torch.zeros(rows + 1, longest, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(rows + 1, longest, device=device)
        self._lengths = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._stops = torch.tensor(stops, dtype=torch.int64, device=device)
        self._cache = RowCache(len(rows_by_draw) * rows_per_draw, max(map(len, prompts)) + longest)
        self._batch = _Batch(torch.empty(5, 0, dtype=torch.int64, device=device))
        self._counts = [0] * len(rows_by_draw)
        """Rows of each draw in the batch."""
        self._rows = Rows(self._counts, device)
        self._slots: list[int] = []
        """The cache's slot of each row in the batch, as the host knows it."""

    def run(self) -> list[tuple[list[int], list[float]]]:
        """Decode all rows: new tokens and log-probs of each."""
        self._settle()
        while any(self._counts):
            running = self._advance()
            room = sum(min(len(queue), self._per_draw - n) for queue, n in zip(self._waiting, running, strict=True))
            shrunk = sum(self._batch_counts(running)) <= SETTLE_BELOW * sum(self._counts)
            if shrunk or room > (1 - SETTLE_BELOW) * len(self._counts) * self._per_draw:
                self._settle()
        return [
            (self._tokens[i, :length].tolist(), self._logprobs[i, :length].tolist())
            for i, length in enumerate(self._lengths[: self._none].tolist())
        ]

    def _batch_counts(self, counts: Sequence[int]) -> list[int]:
        """Rows of each draw in a batch with so many real ones: empty rows are added if all draws need equally many."""
        return list(counts) if self._ensemble.ragged else [max(counts)] * len(counts)

    def _advance(self) -> list[int]:
        """Decode one more token of every row; returns how many rows of each draw go on."""
        batch, sampling = self._batch, self._sampling
        logits = self._forward()
        distribution = processed_logprobs(logits, sampling.temperature, sampling.top_p, sampling.top_k)
        index = batch.row * sampling.max_new_tokens + batch.made  # in tensors [R + 1, T]
        random = self._random.take(index)
        chosen = choose(distribution, random) if sampling.temperature else distribution.argmax(dim=-1)
        self._tokens.put_(index, chosen)
        self._logprobs.put_(index, distribution.gather(1, chosen.unsqueeze(1)).squeeze(1))
        batch.token.copy_(chosen)
        going = batch.row != self._none
        batch.made += going
        batch.length += going
        over = going & (torch.isin(chosen, self._stops) | (batch.made == sampling.max_new_tokens))
        self._lengths.put_(batch.row, batch.made)
        # A finished row keeps decoding, at the beginning of its slot, until the batch is rearranged.
        batch.row.masked_fill_(over, self._none)
        batch.length.masked_fill_(over, 0)
        batch.made.masked_fill_(over, 0)
        return self._rows.draws[batch.row != self._none].bincount(minlength=len(self._counts)).tolist()

    def _forward(self) -> torch.Tensor:
        """Add the tokens of the batch to the cache; logits [B, V] of the next ones."""
        batch = self._batch
        output = self._ensemble.model_for(self._rows)(
            input_ids=batch.token.unsqueeze(1),
            position_ids=batch.length.unsqueeze(1),
            use_cache=False,
            rows=Decode(self._cache, batch.length, batch.slot, int(batch.length.max())),
        )
        return output.logits[:, -1]  # type: ignore[no-any-return]

    # Which rows are in the batch

    def _settle(self) -> None:
        """Remove finished rows, add waiting ones, and move all into the first slots."""
        rows = self._batch.row.tolist()
        bounds = pairwise(accumulate(self._counts, initial=0))
        stayed = [[i for i in range(*bound) if rows[i] != self._none] for bound in bounds]
        """For each draw: positions in the old batch of the rows that go on."""
        new = [
            [queue.popleft() for _ in range(min(len(queue), self._per_draw - len(mine)))]
            for queue, mine in zip(self._waiting, stayed, strict=True)
        ]
        counts = self._batch_counts([len(mine) + len(begin) for mine, begin in zip(stayed, new, strict=True)])
        size = sum(counts)
        sources: list[int] = []
        started: list[tuple[int, int, int]] = []
        for draw, (mine, begin, count) in enumerate(zip(stayed, new, counts, strict=True)):
            first = len(sources) + len(mine)
            started += [(draw, position, row) for position, row in enumerate(begin, first)]
            sources += mine + [-1] * (count - len(mine))
        slots = [self._slots[i] if i >= 0 else -1 for i in sources]
        held = set(slots)
        free = (slot for slot in range(size) if slot not in held)
        moves = {slot: next(free) for slot in slots if slot >= size}
        slots = [moves.get(slot, slot) for slot in slots]
        slots = [next(free) if slot < 0 else slot for slot in slots]
        self._cache.clear([slot for slot in slots if slot not in held])
        if moves:
            self._cache.move(list(moves), list(moves.values()), int(self._batch.length.max()))
        self._batch = self._batch.select(sources, slots, self._none)
        if counts != self._counts:
            self._rows = Rows(counts, self._device)
        self._counts, self._slots = counts, slots
        if started:
            self._start(started)

    def _start(self, started: Sequence[tuple[int, int, int]]) -> None:
        """Read the prompts of new rows (draw, position in the batch, row), except the last token, which is decoded."""
        batch = self._batch
        positions = [position for _, position, _ in started]
        prompts = [self._prompts[row] for _, _, row in started]
        batch.row[positions] = torch.tensor([row for _, _, row in started], device=self._device)
        batch.length[positions] = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        batch.token[positions] = torch.tensor([prompt[-1] for prompt in prompts], device=self._device)
        different: list[dict[Prompt, list[int]]] = [{} for _ in self._counts]
        """For each draw: its different prompts, each with the slots of its rows."""
        for (draw, position, _), prompt in zip(started, prompts, strict=True):
            if len(prompt) > 1:
                different[draw].setdefault(prompt[:-1], []).append(self._slots[position])
        by_length = [sorted(found.items(), key=lambda item: len(item[0])) for found in different]
        step = max(1, PREFILL_TOKENS // (len(by_length) * max(1, max(map(len, prompts)) - 1)))
        for begin in range(0, max(map(len, by_length)), step):
            self._prefill([found[begin : begin + step] for found in by_length])

    def _prefill(self, prompts: list[list[tuple[Prompt, list[int]]]]) -> None:
        """Read some prompts of each draw into the given slots."""
        counts = self._batch_counts([len(mine) for mine in prompts])
        longest = max(len(prompt) for mine in prompts for prompt, _ in mine)
        ids = torch.zeros(sum(counts), longest, dtype=torch.int64)
        first, sources, slots = 0, [], []
        for mine, count in zip(prompts, counts, strict=True):
            for u, (prompt, into) in enumerate(mine, start=first):
                ids[u, : len(prompt)] = torch.tensor(prompt)
                sources += [u] * len(into)
                slots += into
            first += count
        self._ensemble.model_for(Rows(counts, self._device)).base_model(
            input_ids=ids.to(self._device),
            position_ids=torch.arange(longest, device=self._device).expand(len(ids), -1),
            use_cache=False,
            rows=Prefill(self._cache, sources, slots),
        )


class _Batch:
    """What the device knows of each row in the batch, all [B] int64."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.row, self.length, self.token, self.made, self.slot = values
        """Its index; tokens in the cache; the next token to add; new tokens so far; slot in the cache."""

    def select(self, sources: Sequence[int], slots: Sequence[int], none: int) -> "_Batch":
        """The rows at these positions, with new slots; -1 stands for an empty row, whose index is `none`."""
        empty = torch.tensor([none, 0, 0, 0, 0], device=self._values.device).unsqueeze(1)
        batch = _Batch(torch.cat([self._values, empty], dim=1)[:, list(sources)])
        batch.slot.copy_(torch.tensor(slots))
        return batch
