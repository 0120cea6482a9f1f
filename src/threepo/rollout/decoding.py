"""Decoding the rows of several policies in one batch: who is in it, token by token.

Legend: N draws, S slots of each draw, W slots in use, R rows asked for, T new tokens, V vocabulary.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from threepo.config import SamplingConfig
from threepo.posterior.noise import Key, uniforms
from threepo.rollout.cache import Decode, Prefill, RowCache
from threepo.rollout.ensemble import Ensemble
from threepo.rollout.sampling import choose, processed_logprobs

SETTLE_BELOW = 7 / 8
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
        self._ensemble, self._waiting, self._sampling = ensemble, waiting, sampling
        self._draws, self._slots = len(waiting), slots
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
        self._cache = RowCache(self._draws, slots, capacity)
        self._jobs: list[list[Job | None]] = [[None] * slots for _ in waiting]
        """Who sits where, as the host knows it: brought up to date when the batch settles."""
        self._state = _State(self._draws, slots, self._none, self._device)
        self._width = 0

    def run(self) -> list[tuple[list[int], list[float]]]:
        """Decode all rows; tokens and log-probs of each, in the order of their indices."""
        self._settle()
        while self._width:
            running = self._advance()
            width = max(running)
            room = sum(min(len(queue), self._slots - n) for queue, n in zip(self._waiting, running, strict=True))
            if width <= SETTLE_BELOW * self._width or room > (1 - SETTLE_BELOW) * self._draws * self._slots:
                self._settle()
        lengths = self._lengths.tolist()
        return [
            (self._tokens[i, : lengths[i]].tolist(), self._logprobs[i, : lengths[i]].tolist())
            for i in range(self._none)
        ]

    def _advance(self) -> list[int]:
        """One more token of every row; returns how many rows of each draw go on."""
        state, sampling = self._state, self._sampling
        row, length, token, made = (x[:, : self._width] for x in (state.row, state.length, state.token, state.made))
        logits = self._forward(token, length)
        distribution = processed_logprobs(logits, sampling.temperature, sampling.top_p, sampling.top_k)
        place = (row * sampling.max_new_tokens + made).flatten()  # in the tables of rows and new tokens
        random = self._random.take(place)
        chosen = choose(distribution, random) if sampling.temperature else distribution.argmax(dim=-1)
        self._tokens.put_(place, chosen)
        self._logprobs.put_(place, distribution.gather(1, chosen.unsqueeze(1)).squeeze(1))
        token.copy_(chosen.view_as(token))
        going = row != self._none
        made += going
        length += going
        over = going & (torch.isin(token, self._stops) | (made == sampling.max_new_tokens))
        self._lengths.put_(row, made)
        # An empty slot keeps decoding, at the beginning of its memory, until the batch settles.
        row.masked_fill_(over, self._none)
        length.masked_fill_(over, 0)
        made.masked_fill_(over, 0)
        return (row != self._none).sum(dim=1).tolist()

    def _forward(self, token: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Logits [N * W, V] of the tokens after these [N, W], which go into the cache."""
        rows = Decode(self._cache, length.contiguous(), int(length.max()))
        output = self._ensemble.model(
            input_ids=token.reshape(-1, 1), position_ids=length.reshape(-1, 1), use_cache=False, rows=rows
        )
        return output.logits[:, -1]  # type: ignore[no-any-return]

    # Who is in the batch

    def _settle(self) -> None:
        """Bring the running rows of each draw together in its first slots, and fill the others from its queue."""
        row = self._state.row.tolist()
        moves, started = [], []
        for n, jobs in enumerate(self._jobs):
            jobs[:] = [job if row[n][s] != self._none else None for s, job in enumerate(jobs)]
            running = [s for s, job in enumerate(jobs) if job]
            free = iter(s for s in range(len(running)) if not jobs[s])
            for source in running[::-1]:
                target = next(free, None)
                if target is None:
                    break
                moves.append((n, source, target))
                jobs[target], jobs[source] = jobs[source], None
            for s in range(len(running), self._slots):
                if not self._waiting[n]:
                    break
                job = jobs[s] = self._waiting[n].popleft()
                started.append((n, s, job))
        if moves:
            draws, sources, targets = zip(*moves, strict=True)
            self._cache.move(draws, sources, targets, int(self._state.length.max()))
            self._state.move(draws, sources, targets)
        if started:
            self._start(started)
        self._width = max(sum(job is not None for job in jobs) for jobs in self._jobs)

    def _start(self, started: list[tuple[int, int, Job]]) -> None:
        """Read the prompts of rows (draw, slot, job) that begin, all but the last token, which is decoded as any."""
        state = self._state
        places = [n for n, _, _ in started], [s for _, s, _ in started]
        prompts = [job.prompt for _, _, job in started]
        state.row[places] = torch.tensor([job.index for _, _, job in started], device=self._device)
        state.length[places] = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        state.token[places] = torch.tensor([prompt[-1] for prompt in prompts], device=self._device)
        state.made[places] = 0
        different: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(self._draws)]
        for n, s, job in started:
            if len(job.prompt) > 1:
                different[n].setdefault(job.prompt[:-1], []).append(s)
        by_length = [sorted(prompts.items(), key=lambda item: len(item[0])) for prompts in different]
        for begin in range(0, max(map(len, by_length)), step := max(1, PREFILL_TOKENS // self._longest(by_length))):
            self._prefill([prompts[begin : begin + step] for prompts in by_length])

    def _longest(self, by_length: list[list[tuple[tuple[int, ...], list[int]]]]) -> int:
        """Tokens that the prompts of one position in all draws take, padding included."""
        return self._draws * max((len(prompt) for prompts in by_length for prompt, _ in prompts), default=1)

    def _prefill(self, prompts: list[list[tuple[tuple[int, ...], list[int]]]]) -> None:
        """Read up to U prompts of each draw into the given slots."""
        most = max(map(len, prompts))
        longest = max(len(prompt) for mine in prompts for prompt, _ in mine)
        ids = torch.zeros(self._draws, most, longest, dtype=torch.int64)
        sources, slots, draws = [], [], []
        for n, mine in enumerate(prompts):
            for u, (prompt, places) in enumerate(mine):
                ids[n, u, : len(prompt)] = torch.tensor(prompt)
                sources += [n * most + u] * len(places)
                slots += places
                draws += [n] * len(places)
        self._ensemble.model.base_model(
            input_ids=ids.flatten(0, 1).to(self._device),
            position_ids=torch.arange(longest, device=self._device).expand(self._draws * most, -1),
            use_cache=False,
            rows=Prefill(self._cache, sources, slots, draws),
        )


class _State:
    """What the device knows of each slot, [N, S] int64."""

    def __init__(self, draws: int, slots: int, none: int, device: torch.device) -> None:
        self.row = torch.full((draws, slots), none, dtype=torch.int64, device=device)
        """Index of the row that sits there."""
        self.length = torch.zeros_like(self.row)
        """Its tokens in the cache."""
        self.token = torch.zeros_like(self.row)
        """The next to go into it."""
        self.made = torch.zeros_like(self.row)
        """New tokens so far."""
        self._none = none

    def move(self, draws: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Take rows from their slots to others of the same draw."""
        for values in (self.row, self.length, self.token, self.made):
            values[draws, targets] = values[draws, sources]
        self.row[draws, sources] = self._none
        for values in (self.length, self.made):
            values[draws, sources] = 0
