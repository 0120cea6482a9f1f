"""Decoding: the way of one call of the local engine from prompts to new tokens, for the rows of all draws in one batch.

Rows of a draw that start together with the same prompt read it once. Finished rows leave the batch; if memory is too
small for all rows, waiting rows take their slots.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from threepo.config import SamplingConfig
from threepo.posterior.noise import Key, uniforms
from threepo.rollout.cache import Decode, Prefill, RowCache
from threepo.rollout.ensemble import Ensemble, Rows
from threepo.rollout.sampling import processed_logprobs, sample_tokens

SETTLE_BELOW = 15 / 16
"""When less than this share of the batch is still running, finished rows leave it and waiting ones enter."""
PREFILL_TOKENS = 1 << 14
"""Most prompt tokens, padding included, that one pass reads."""

TOLD_TOKENS = 64
"""Most tokens that a row is told one by one; more are read with all before them, as a prompt."""

Prompt = tuple[int, ...]


@dataclass(slots=True)
class Place:
    """A place in the batch, with the row that it has."""

    row: int
    """Index of the row."""
    length: int = 0
    """Tokens in the cache."""
    token: int = 0
    """Next token to add to the cache."""
    made: int = 0
    """New tokens so far."""
    slot: int = -1
    """Slot in the cache; -1: none yet."""
    told: int = 0
    """Number of tokens that the row was told."""

    def numbers(self) -> tuple[int, ...]:
        """The place as a column of the batch."""
        return self.row, self.length, self.token, self.made, self.slot, self.told


class Start(NamedTuple):
    """The prompt of a row, and the key of its random numbers."""

    prompt: Prompt
    key: Key


class Reply(NamedTuple):
    """The tokens that a row has written, and their log-probs."""

    tokens: list[int]
    logprobs: list[float]


GoOn = Callable[[Mapping[int, Reply]], Mapping[int, Start]]
"""Gets the replies of rows that have finished, by row, and returns what those read that write another one."""


class Decoding:
    """One call of the engine, from prompts to new tokens and log-probs, token by token.

    Legend: N draws, B rows in the batch, ordered by draw, R rows in all, T new tokens of a reply, V vocabulary.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        starts: Sequence[Start],
        rows_by_draw: Sequence[Sequence[int]],
        *,
        rows_per_draw: int,
        longest: int,
        stops: Sequence[int],
        sampling: SamplingConfig,
        go_on: GoOn | None = None,
    ) -> None:
        """R rows with what each reads first, and `stops`, the tokens that end a reply.

        `rows_by_draw`: the rows of each of the N draws. `rows_per_draw`: most rows of a draw to decode together.
        `longest`: most tokens of a row. `go_on`: None if a row ends with its first reply.
        """
        self._ensemble, self._per_draw, self._sampling, self._go_on = ensemble, rows_per_draw, sampling, go_on
        self._prompts = [start.prompt for start in starts]
        self._waiting = [deque(rows) for rows in rows_by_draw]
        device = self._device = ensemble.device
        self._none = rows = len(starts)
        """The index of empty rows, whose results go to an entry of their own at the end."""
        most = sampling.max_new_tokens
        self._random = torch.zeros(rows + 1, most, dtype=torch.float64, device=device)
        self._random[:rows] = uniforms([start.key for start in starts], 0, most, device)
        self._tokens = torch.zeros(rows + 1, most, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(rows + 1, most, device=device)
        self._lengths = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._stops = torch.tensor(stops, dtype=torch.int64, device=device)
        self._told: torch.Tensor | None = None
        """[R + 1, TOLD_TOKENS + 1] tokens that a row is told before it writes again, then -1; None: no row was told."""
        self._cache = RowCache(len(rows_by_draw) * rows_per_draw, longest)
        self._batch = torch.empty(6, 0, dtype=torch.int64, device=device)
        """[6, B]: the numbers of each `Place`."""
        self._members: list[int] = []
        """B rows, also those that have finished since the batch was arranged."""
        self._counts = [0] * len(rows_by_draw)
        """Rows of each draw in the batch."""
        self._numbers = torch.arange(len(rows_by_draw), device=device).unsqueeze(1)
        self._filled = 0
        """Most tokens of a row in the cache."""

    def run(self) -> list[Reply]:
        """Decode all rows; returns the last reply of each."""
        self._settle()
        while any(self._counts):
            running = self._advance()
            room = sum(min(len(queue), self._per_draw - n) for queue, n in zip(self._waiting, running, strict=True))
            shrunk = sum(self._batch_counts(running)) <= SETTLE_BELOW * sum(self._counts)
            if shrunk or room > (1 - SETTLE_BELOW) * len(self._counts) * self._per_draw:
                self._settle()
        return self._replies(range(self._none))

    def _replies(self, rows: Sequence[int]) -> list[Reply]:
        """The replies of these rows so far."""
        index = torch.tensor(rows, dtype=torch.int64, device=self._device)
        columns = (self._lengths[index].tolist(), self._tokens[index].tolist(), self._logprobs[index].tolist())
        return [Reply(t[:length], p[:length]) for length, t, p in zip(*columns, strict=True)]

    def _batch_counts(self, counts: Sequence[int]) -> list[int]:
        """Rows of each draw in a batch with so many real rows; empty ones are added if all draws need equally many."""
        return list(counts) if self._ensemble.ragged else [max(counts)] * len(counts)

    def _advance(self) -> list[int]:
        """Decode one more token of every row; returns the number of unfinished rows of each draw."""
        sampling = self._sampling
        row, length, token, made, slot, told = self._batch
        output = self._ensemble.model_for(self._rows)(
            input_ids=token.unsqueeze(1),
            position_ids=length.unsqueeze(1),
            use_cache=False,
            rows=Decode(self._cache, length, slot, self._filled),
        )
        distribution = processed_logprobs(output.logits[:, -1], sampling.temperature, sampling.top_p, sampling.top_k)
        index = row * sampling.max_new_tokens + made  # in tensors [R + 1, T]
        random = self._random.take(index)
        chosen = sample_tokens(distribution, random) if sampling.temperature else distribution.argmax(dim=-1)
        writing = going = row != self._none
        if self._told is not None:
            known = self._told[row, told]
            writing = going & (known < 0)
            told += going & ~writing
            index = torch.where(writing, index, self._none * sampling.max_new_tokens)  # what is told is not kept
            chosen = torch.where(known < 0, chosen, known)
        self._tokens.view(-1).scatter_(0, index, chosen)
        self._logprobs.view(-1).scatter_(0, index, distribution.gather(1, chosen.unsqueeze(1)).squeeze(1))
        token.copy_(chosen)
        made += writing
        length += going
        over = writing & (torch.isin(chosen, self._stops) | (made == sampling.max_new_tokens))
        self._lengths.scatter_(0, row, made)
        # A finished row keeps decoding until the batch is rearranged: at the beginning of its slot, or at its own end.
        row.masked_fill_(over, self._none)
        if self._go_on is None:
            length.masked_fill_(over, 0)
        made.masked_fill_(over, 0)
        running = ((self._rows.draws == self._numbers) & (row != self._none)).sum(dim=1)
        # The only wait for the device in a token.
        *counts, self._filled = torch.cat([running, length.max().view(1)]).tolist()
        return counts

    def _settle(self) -> None:
        """Remove finished rows, or let them go on, add waiting ones, and move all into the first slots."""
        places = [Place(*numbers) for numbers in self._batch.T.tolist()]
        finished = {
            member: index
            for index, member in enumerate(self._members)
            if member != self._none and places[index].row == self._none
        }
        for member, start in self._longer(list(finished)).items():
            index = finished[member]
            places[index] = self._tell(member, start, places[index])
        running: list[list[Place]] = []
        started: list[list[Place]] = []
        for (begin, end), queue in zip(pairwise(accumulate(self._counts, initial=0)), self._waiting, strict=True):
            own = [place for place in places[begin:end] if place.row != self._none]
            running.append([place for place in own if place.slot >= 0])
            room = min(len(queue), self._per_draw - len(own))
            waiting = [self._reading(queue.popleft()) for _ in range(room)]
            started.append([place for place in own if place.slot < 0] + waiting)
        self._counts = self._batch_counts([len(own) + len(new) for own, new in zip(running, started, strict=True)])
        batch: list[Place] = []
        for own, new, count in zip(running, started, self._counts, strict=True):
            batch += own + new + [Place(self._none) for _ in range(count - len(own) - len(new))]
        self._assign_slots(batch)
        self._members = [place.row for place in batch]
        columns = torch.tensor([place.numbers() for place in batch], dtype=torch.int64, device=self._device)
        self._batch = columns.view(-1, 6).T.contiguous()
        self._filled = max((place.length for place in batch), default=0)
        self._rows = Rows(self._counts, self._device)
        self._read(started)

    def _reading(self, row: int) -> Place:
        """The place of a row that will read its prompt."""
        prompt = self._prompts[row]
        return Place(row, length=len(prompt) - 1, token=prompt[-1], told=TOLD_TOKENS)

    def _longer(self, finished: Sequence[int]) -> Mapping[int, Start]:
        """The starts of finished rows that write another reply."""
        if not self._go_on or not finished:
            return {}
        longer = self._go_on(dict(zip(finished, self._replies(finished), strict=True)))
        for row, start in longer.items():
            self._random[row] = uniforms([start.key], 0, self._sampling.max_new_tokens, self._device)[0]
        return longer

    def _tell(self, row: int, start: Start, finished: Place) -> Place:
        """A finished row that goes on: it is told the new tokens of its prompt, or reads all again if they are many."""
        self._prompts[row] = start.prompt
        known = finished.length + 1  # its last token is not in the cache
        new = start.prompt[known:]
        if len(new) > TOLD_TOKENS:
            return self._reading(row)
        if self._told is None:
            self._told = torch.full((self._none + 1, TOLD_TOKENS + 1), -1, dtype=torch.int64, device=self._device)
        self._told[row] = torch.tensor([*new] + [-1] * (TOLD_TOKENS + 1 - len(new)), device=self._device)
        return Place(row, finished.length, start.prompt[known - 1], slot=finished.slot)

    def _assign_slots(self, batch: Sequence[Place]) -> None:
        """Give each row one of the first slots, and move the cache of rows whose slots lie behind."""
        taken = {place.slot for place in batch}
        free = [slot for slot in range(len(batch)) if slot not in taken]
        moved = [place for place in batch if place.slot >= len(batch)]
        targets = torch.tensor(free, dtype=torch.int64, device=self._device)
        self._cache.clear(targets)
        if moved:
            longest = max(place.length for place in moved)
            sources = torch.tensor([place.slot for place in moved], device=self._device)
            self._cache.move(sources, targets[: len(moved)], longest)
        for place, slot in zip(moved + [place for place in batch if place.slot < 0], free, strict=True):
            place.slot = slot

    def _read(self, started: Sequence[Sequence[Place]]) -> None:
        """Read the prompts of each draw's new rows, except the last token, which is decoded."""
        prompts = []
        for places in started:
            slots: dict[Prompt, list[int]] = {}
            for place in places:
                if prompt := self._prompts[place.row][:-1]:
                    slots.setdefault(prompt, []).append(place.slot)
            prompts.append(sorted(slots.items(), key=lambda item: len(item[0])))
        longest = max((len(of_draw[-1][0]) for of_draw in prompts if of_draw), default=0)
        step = max(1, PREFILL_TOKENS // (len(prompts) * max(1, longest)))
        for begin in range(0, max(map(len, prompts)), step):
            self._prefill([of_draw[begin : begin + step] for of_draw in prompts])

    def _prefill(self, prompts: list[list[tuple[Prompt, list[int]]]]) -> None:
        """Read some prompts of each draw into the slots that are paired with them."""
        counts = self._batch_counts([len(mine) for mine in prompts])
        longest = max(len(prompt) for mine in prompts for prompt, _ in mine)
        ids = torch.zeros(sum(counts), longest, dtype=torch.int64)
        first, sources, slots = 0, [], []
        for mine, count in zip(prompts, counts, strict=True):
            for source, (prompt, targets) in enumerate(mine, start=first):
                ids[source, : len(prompt)] = torch.tensor(prompt)
                sources += [source] * len(targets)
                slots += targets
            first += count
        self._ensemble.model_for(Rows(counts, self._device)).base_model(
            input_ids=ids.to(self._device),
            position_ids=torch.arange(longest, device=self._device).expand(len(ids), -1),
            use_cache=False,
            rows=Prefill(self._cache, *torch.tensor([sources, slots], device=self._device)),
        )
