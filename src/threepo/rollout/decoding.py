"""Decoding the rows of several policies in one batch: which rows are in it, and from logits to tokens.

Random numbers depend on the row and not on the batch.
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

SETTLE_BELOW = 15 / 16
"""When fewer than this share of the batch is still running, finished rows leave it and waiting ones enter."""
PREFILL_TOKENS = 1 << 14
"""Most prompt tokens, padding included, that one pass reads."""
BLOCK = 128
"""Tokens in a block of `choose`."""

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
        """Rows 0 to R - 1 have `prompts`, and random numbers of `keys`; `stops` are the tokens that end them.

        `rows_by_draw`: the rows of each of the N draws. `rows_per_draw`: most rows of a draw to decode together.
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
        self._batch = torch.empty(5, 0, dtype=torch.int64, device=device)
        """[5, B]: each row's index; tokens in the cache; next token to add; new tokens so far; slot in the cache."""
        self._counts = [0] * len(rows_by_draw)
        """Rows of each draw in the batch."""

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
        sampling = self._sampling
        row, length, token, made, slot = self._batch
        output = self._ensemble.model_for(self._rows)(
            input_ids=token.unsqueeze(1),
            position_ids=length.unsqueeze(1),
            use_cache=False,
            rows=Decode(self._cache, length, slot, int(length.max())),
        )
        distribution = processed_logprobs(output.logits[:, -1], sampling.temperature, sampling.top_p, sampling.top_k)
        index = row * sampling.max_new_tokens + made  # in tensors [R + 1, T]
        random = self._random.take(index)
        chosen = choose(distribution, random) if sampling.temperature else distribution.argmax(dim=-1)
        self._tokens.put_(index, chosen)
        self._logprobs.put_(index, distribution.gather(1, chosen.unsqueeze(1)).squeeze(1))
        token.copy_(chosen)
        going = row != self._none
        made += going
        length += going
        over = going & (torch.isin(chosen, self._stops) | (made == sampling.max_new_tokens))
        self._lengths.put_(row, made)
        # A finished row keeps decoding, at the beginning of its slot, until the batch is rearranged.
        row.masked_fill_(over, self._none)
        length.masked_fill_(over, 0)
        made.masked_fill_(over, 0)
        return self._rows.draws[row != self._none].bincount(minlength=len(self._counts)).tolist()

    # Which rows are in the batch

    def _settle(self) -> None:
        """Remove finished rows, add waiting ones, and move all into the first slots."""
        old = self._batch.T.tolist()
        bounds = pairwise(accumulate(self._counts, initial=0))
        by_draw = [[entry for entry in old[slice(*bound)] if entry[0] != self._none] for bound in bounds]
        for queue, mine in zip(self._waiting, by_draw, strict=True):
            for row in [queue.popleft() for _ in range(min(len(queue), self._per_draw - len(mine)))]:
                mine.append([row, len(self._prompts[row]) - 1, self._prompts[row][-1], 0, -1])
        started = [[entry for entry in mine if entry[-1] < 0] for mine in by_draw]
        self._counts = self._batch_counts([len(mine) for mine in by_draw])
        for mine, count in zip(by_draw, self._counts, strict=True):
            mine += [[self._none, 0, 0, 0, -1] for _ in range(count - len(mine))]
        entries = [entry for mine in by_draw for entry in mine]
        held = {slot for *_, slot in entries}
        free = [slot for slot in range(len(entries)) if slot not in held]
        moved = [entry for entry in entries if entry[-1] >= len(entries)]
        self._cache.clear(free)
        if moved:
            longest = max(length for _, length, *_ in moved)
            self._cache.move([slot for *_, slot in moved], free[: len(moved)], longest)
        for entry, slot in zip(moved + [entry for entry in entries if entry[-1] < 0], free, strict=True):
            entry[-1] = slot
        self._batch = torch.tensor(entries, dtype=torch.int64, device=self._device).view(-1, 5).T.contiguous()
        self._rows = Rows(self._counts, self._device)
        self._read(started)

    def _read(self, started: Sequence[Sequence[Sequence[int]]]) -> None:
        """Read the prompts of each draw's new rows, except the last token, which is decoded."""
        by_length = []
        for mine in started:
            slots: dict[Prompt, list[int]] = {}
            for row, *_, slot in mine:
                if prompt := self._prompts[row][:-1]:
                    slots.setdefault(prompt, []).append(slot)
            by_length.append(sorted(slots.items(), key=lambda item: len(item[0])))
        longest = max((len(found[-1][0]) for found in by_length if found), default=0)
        step = max(1, PREFILL_TOKENS // (len(by_length) * max(1, longest)))
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


def processed_logprobs(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """Log-probs [R, V] (float32) of the distribution that tokens are drawn from: temperature, then top-k, then top-p.

    Tokens outside the cuts have log-prob -inf, and the rest is renormalised. Temperature 0 means greedy decoding; its
    log-probs are those of temperature 1 without cuts (method.md 3.5), since a deterministic choice has none.
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


def choose(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens [R] by inverse transform of uniforms [R] in [0, 1) through the distributions [R, V].

    First a block of tokens is chosen, then a token in it: with a vocabulary of 150,000, cumulative sums over all tokens
    would cost more than the model.
    """
    rows, size = logprobs.shape
    blocks = -(-size // BLOCK)
    probabilities = torch.nn.functional.pad(logprobs.exp(), (0, blocks * BLOCK - size)).view(rows, blocks, BLOCK)
    ends = probabilities.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    # Below the total by more than rounding, so that the target is not past the last token with positive probability.
    target = uniforms.double().clamp(max=1 - 2.0**-40).unsqueeze(1) * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp(max=blocks - 1)  # NaN would be past the end
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    within = probabilities[torch.arange(rows, device=block.device), block.squeeze(1)].double().cumsum(dim=-1)
    # right=True skips tokens of zero probability, whose cumulative value equals the one before them. This sum may end
    # below the block's, because of rounding; the clamp then selects the last token with positive probability.
    inside = torch.minimum(target - before, within[:, -1:] * (1 - 2.0**-40))
    token = torch.searchsorted(within, inside, right=True)
    return (block * BLOCK + token).squeeze(1).clamp(max=size - 1)
