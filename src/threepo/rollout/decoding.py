"""Decoding the rows of several policies in one batch: who is in it, token by token.

Legend: N draws, B rows in the batch, ordered by draw, R rows asked for, T new tokens, V vocabulary.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from threepo.config import SamplingConfig
from threepo.posterior.noise import Key, uniforms
from threepo.rollout.cache import Decode, Prefill, RowCache
from threepo.rollout.ensemble import Ensemble, Rows
from threepo.rollout.sampling import choose, processed_logprobs

SETTLE_BELOW = 15 / 16
"""Finished rows are taken out of the batch, and waiting ones in, when fewer than this share of it is still running."""
PREFILL_TOKENS = 1 << 14
"""Prompt tokens, padding included, read in one pass."""


@dataclass(frozen=True)
class Job:
    """A row to decode."""

    index: int
    """Its place among all rows, 0 to R-1."""
    prompt: tuple[int, ...]
    key: Key
    """Of its random numbers."""


class Decoding:
    """One call of an engine: from queues of rows, one for each draw, to their tokens."""

    def __init__(
        self,
        ensemble: Ensemble,
        waiting: Sequence[deque[Job]],
        slots: int,
        capacity: int,
        stops: Sequence[int],
        sampling: SamplingConfig,
    ) -> None:
        """`slots` is how many rows of a draw are decoded together, at most, each of `capacity` tokens at most."""
        self._ensemble, self._waiting, self._slots, self._sampling = ensemble, waiting, slots, sampling
        self._device = ensemble.device
        jobs = sorted((job for queue in waiting for job in queue), key=lambda job: job.index)
        self._none = rows = len(jobs)
        """What stands for a row where there is none; a place of its own keeps what it writes out of the way."""
        longest = sampling.max_new_tokens
        self._random = torch.zeros(rows + 1, longest, dtype=torch.float64, device=self._device)
        self._random[:rows] = uniforms([job.key for job in jobs], 0, longest, self._device)
        self._tokens = torch.zeros(rows + 1, longest, dtype=torch.int64, device=self._device)
        self._logprobs = torch.zeros(rows + 1, longest, device=self._device)
        self._lengths = torch.zeros(rows + 1, dtype=torch.int64, device=self._device)
        self._stops = torch.tensor(stops, dtype=torch.int64, device=self._device)
        self._cache = RowCache(len(waiting) * slots, capacity)
        self._batch = _Batch(torch.empty(len(_Batch.FIELDS), 0, dtype=torch.int64, device=self._device))
        self._counts = [0] * len(waiting)
        """Rows of each draw in the batch."""
        self._rows = Rows(self._counts, self._device)
        self._places: list[int] = []
        """Where in the cache each row of the batch is, as the host knows it."""

    def run(self) -> list[tuple[list[int], list[float]]]:
        """Decode all rows; tokens and log-probs of each, in the order of their indices."""
        self._settle()
        while any(self._counts):
            running = self._advance()
            size, after = sum(self._counts), self._size(running)
            room = sum(min(len(queue), self._slots - n) for queue, n in zip(self._waiting, running, strict=True))
            if after <= SETTLE_BELOW * size or room > (1 - SETTLE_BELOW) * len(self._counts) * self._slots:
                self._settle()
        lengths = self._lengths.tolist()
        return [
            (self._tokens[i, : lengths[i]].tolist(), self._logprobs[i, : lengths[i]].tolist())
            for i in range(self._none)
        ]

    def _size(self, running: Sequence[int]) -> int:
        """Of a batch with so many rows of each draw: some stand empty where all draws need to have equally many."""
        return sum(running) if self._ensemble.ragged else len(running) * max(running)

    def _advance(self) -> list[int]:
        """One more token of every row; returns how many rows of each draw go on."""
        batch, sampling = self._batch, self._sampling
        logits = self._forward()
        distribution = processed_logprobs(logits, sampling.temperature, sampling.top_p, sampling.top_k)
        place = batch.row * sampling.max_new_tokens + batch.made  # in the tables of rows and new tokens
        random = self._random.take(place)
        chosen = choose(distribution, random) if sampling.temperature else distribution.argmax(dim=-1)
        self._tokens.put_(place, chosen)
        self._logprobs.put_(place, distribution.gather(1, chosen.unsqueeze(1)).squeeze(1))
        batch.token.copy_(chosen)
        going = batch.row != self._none
        batch.made += going
        batch.length += going
        over = going & (torch.isin(chosen, self._stops) | (batch.made == sampling.max_new_tokens))
        self._lengths.put_(batch.row, batch.made)
        # A row that is over keeps decoding, at the beginning of its memory, until the batch settles.
        batch.row.masked_fill_(over, self._none)
        batch.length.masked_fill_(over, 0)
        batch.made.masked_fill_(over, 0)
        return self._rows.draws[batch.row != self._none].bincount(minlength=len(self._counts)).tolist()

    def _forward(self) -> torch.Tensor:
        """Logits [B, V] of what follows the tokens of the batch, which go into the cache."""
        batch = self._batch
        output = self._ensemble.deal(self._rows)(
            input_ids=batch.token.unsqueeze(1),
            position_ids=batch.length.unsqueeze(1),
            use_cache=False,
            rows=Decode(self._cache, batch.length, batch.place, int(batch.length.max())),
        )
        return output.logits[:, -1]  # type: ignore[no-any-return]

    # Who is in the batch

    def _settle(self) -> None:
        """Take out the rows that are over, let waiting ones in, and bring all together in the first places."""
        rows, position = self._batch.row.tolist(), 0
        stayed: list[list[int]] = []
        """Of each draw, the positions in the old batch of the rows that go on."""
        for count in self._counts:
            stayed.append([i for i in range(position, position + count) if rows[i] != self._none])
            position += count
        begin = [
            [queue.popleft() for _ in range(min(len(queue), self._slots - len(mine)))]
            for queue, mine in zip(self._waiting, stayed, strict=True)
        ]
        counts = [len(mine) + len(new) for mine, new in zip(stayed, begin, strict=True)]
        size = self._size(counts)
        if not self._ensemble.ragged:
            counts = [max(counts)] * len(counts)
        held = {self._places[i] for mine in stayed for i in mine}
        free = (place for place in range(size) if place not in held)
        sources, places, moves, started = [], [], [], []
        for n, count in enumerate(counts):
            for i in stayed[n]:
                place = self._places[i] if self._places[i] < size else next(free)
                if place != self._places[i]:
                    moves.append((self._places[i], place))
                sources.append(i)
                places.append(place)
            started += [(n, len(places) + i, job) for i, job in enumerate(begin[n])]
            new = count - len(stayed[n])
            sources += [-1] * new
            places += [-1] * new  # those left, when all that stay have theirs
        places = [next(free) if place < 0 else place for place in places]
        self._cache.clear([place for place in places if place not in held])
        if moves:
            longest = int(self._batch.length.max())
            self._cache.move([before for before, _ in moves], [after for _, after in moves], longest)
        self._batch = self._batch.of(sources, places, self._none)
        if counts != self._counts:
            self._rows = Rows(counts, self._device)
        self._counts, self._places = counts, places
        if started:
            self._start(started)

    def _start(self, started: list[tuple[int, int, Job]]) -> None:
        """Read the prompts of rows (draw, position, job) that begin, but the last token, which is decoded as any."""
        batch = self._batch
        positions = [position for _, position, _ in started]
        prompts = [job.prompt for _, _, job in started]
        batch.row[positions] = torch.tensor([job.index for _, _, job in started], device=self._device)
        batch.length[positions] = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        batch.token[positions] = torch.tensor([prompt[-1] for prompt in prompts], device=self._device)
        different: list[dict[tuple[int, ...], list[int]]] = [{} for _ in self._counts]
        for n, position, job in started:
            if len(job.prompt) > 1:
                different[n].setdefault(job.prompt[:-1], []).append(self._places[position])
        by_length = [sorted(prompts.items(), key=lambda item: len(item[0])) for prompts in different]
        for begin in range(0, max(map(len, by_length)), step := max(1, PREFILL_TOKENS // self._longest(by_length))):
            self._prefill([prompts[begin : begin + step] for prompts in by_length])

    def _longest(self, by_length: list[list[tuple[tuple[int, ...], list[int]]]]) -> int:
        """Tokens that the prompts of one position in all draws take, padding included."""
        return len(by_length) * max((len(prompt) for prompts in by_length for prompt, _ in prompts), default=1)

    def _prefill(self, prompts: list[list[tuple[tuple[int, ...], list[int]]]]) -> None:
        """Read some prompts of each draw into the given places."""
        counts = [len(mine) for mine in prompts]
        if not self._ensemble.ragged:
            counts = [max(counts)] * len(counts)
        longest = max(len(prompt) for mine in prompts for prompt, _ in mine)
        ids = torch.zeros(sum(counts), longest, dtype=torch.int64)
        first, sources, places = 0, [], []
        for mine, count in zip(prompts, counts, strict=True):
            for u, (prompt, into) in enumerate(mine, start=first):
                ids[u, : len(prompt)] = torch.tensor(prompt)
                sources += [u] * len(into)
                places += into
            first += count
        self._ensemble.deal(Rows(counts, self._device)).base_model(
            input_ids=ids.to(self._device),
            position_ids=torch.arange(longest, device=self._device).expand(len(ids), -1),
            use_cache=False,
            rows=Prefill(self._cache, sources, places),
        )


class _Batch:
    """What the device knows of each row in the batch, all [B] int64."""

    FIELDS = ("row", "length", "token", "made", "place")

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.row, self.length, self.token, self.made, self.place = values
        """Its index; tokens in the cache; the next to go into it; new tokens so far; where its memory is."""

    def of(self, sources: Sequence[int], places: Sequence[int], none: int) -> "_Batch":
        """The batch of the rows at these positions of this one; -1 is `none`, an empty row. All have these places."""
        empty = torch.tensor([none, 0, 0, 0, 0], device=self._values.device).unsqueeze(1)
        batch = _Batch(torch.cat([self._values, empty], dim=1)[:, list(sources)])
        batch.place.copy_(torch.tensor(places))
        return batch
