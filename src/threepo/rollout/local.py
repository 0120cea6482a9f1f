"""The PyTorch engine: it decodes the rows of all draws in one batch, each row through its own weights (ensemble.py).

For Hugging Face decoders, on CPU or CUDA (not run on a GPU yet). Rows of a draw that start together with the same
prompt read it once. Finished rows leave the batch; if memory is too small for all rows, waiting rows take their slots.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from threepo.config import LocalEngineConfig, SamplingConfig
from threepo.errors import UserError
from threepo.models.adapters import adapter_scale, is_adapter, without_adapter
from threepo.models.policy import Policy
from threepo.posterior.noise import Key, uniforms
from threepo.posterior.policy_optimizer import WeightSource
from threepo.posterior.shards import is_spread
from threepo.rollout.cache import Decode, Prefill, RowCache, whole_blocks
from threepo.rollout.engines import Talk, completion_of, row_key, rows_by_draw
from threepo.rollout.ensemble import Ensemble, Rows, check_positions
from threepo.rollout.memory import GIB, bytes_per_token, own_bytes, sampling_bytes
from threepo.rollout.sampling import processed_logprobs, sample_tokens
from threepo.types import Completion, Draw, Request

SETTLE_BELOW = 15 / 16
"""When less than this share of the batch is still running, finished rows leave it and waiting ones enter."""
PREFILL_TOKENS = 1 << 14
"""Most prompt tokens, padding included, that one pass reads."""

TOLD_TOKENS = 64
"""Most tokens that a row is told one by one; more are read with all before them, as a prompt."""

ROW, LENGTH, TOKEN, MADE, SLOT, TOLD = range(6)
"""The numbers of a row in the batch, by their position."""
Prompt = tuple[int, ...]


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


class LocalEngine:
    """A `RolloutEngine` in this process, with a copy of the weights for each loaded draw, in the engine's dtype."""

    def __init__(self, policy: Policy, settings: LocalEngineConfig) -> None:
        """Raise `UserError` if the model's weights cannot be stacked."""
        self._policy, self._settings = policy, settings
        self._model = getattr(policy.architecture, "_orig_mod", policy.architecture)  # before torch.compile
        self._trained = getattr(policy.model, "_orig_mod", policy.model)
        adapters = {name: p for name, p in self._trained.named_parameters() if is_adapter(name)}
        scale = adapter_scale(policy.model) if adapters else 1.0
        self._ensemble = Ensemble(self._model, getattr(torch, settings.dtype), policy.device, adapters, scale)
        if adapters and not any(map(is_spread, self._trained.parameters())):
            self._ensemble.borrow({without_adapter(n): p.detach() for n, p in self._trained.named_parameters()})
        self._draws: list[Draw | None] = []
        self._step = -1

    def prepare(self, draws: int, tokens: int) -> None:
        """See `RolloutEngine.prepare`."""
        self._rows_per_draw(draws, 1, tokens)

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> int | None:
        """Make the weights of every draw: perturbed in float32, rounded once to the engine's dtype.

        Parameters that the posterior lacks are the model's. `UserError` if it has parameters that the model lacks.
        """
        self._draws, distinct = [], list(dict.fromkeys(draws))  # none can be used until all are made
        stacks = self._ensemble.stacks
        self._ensemble.resize(len(distinct))
        for index, draw in enumerate(distinct):
            mine = self._ensemble.views(index)
            others = {stacks[name] for name in mine}
            for full_name, value in posterior.weights(draw, mine):
                name = without_adapter(full_name)
                if name not in stacks:
                    raise UserError(
                        f"engine.kind = 'local': the optimizer has a parameter {name!r}, which the model does not "
                        f"have; construct it with the policy's model.named_parameters()"
                    )
                if name in mine:
                    mine[name].copy_(value)  # does nothing if the posterior wrote it there
                    others.discard(stacks[name])
            for full_name, p in self._trained.named_parameters() if others else ():
                if stacks[name := without_adapter(full_name)] in others:
                    mine[name].copy_(p.detach())
            self._ensemble.pack(index)
        self._draws, self._step = distinct, step
        return None

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        rows = rows_by_draw(requests, self._draws)
        if not requests:
            return []
        longest = max(len(request.prompt_tokens) for request in requests) + sampling.max_new_tokens
        replies = self._decoding(requests, rows, sampling, seed, longest).run()
        return [self._completion(request, reply) for request, reply in zip(requests, replies, strict=True)]

    @torch.inference_mode()
    def converse(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int, talk: Talk) -> None:
        """See `ConversingEngine.converse`; a conversation keeps its place in the cache, and decoding waits for all."""
        asked = list(requests)

        def go_on(replies: Mapping[int, Reply]) -> dict[int, Start]:
            following = talk.follow([(row, self._completion(asked[row], reply)) for row, reply in replies.items()])
            for row, request in following.items():
                asked[row] = request
            return {row: self._start(request, seed) for row, request in following.items()}

        if requests:
            rows = rows_by_draw(requests, self._draws)
            self._decoding(requests, rows, sampling, seed, talk.longest, go_on).run()

    def _start(self, request: Request, seed: int) -> "Start":
        return Start(request.prompt_tokens, row_key(seed, self._step, request))

    def _decoding(
        self,
        requests: Sequence[Request],
        rows: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seed: int,
        longest: int,
        go_on: "GoOn | None" = None,
    ) -> "Decoding":
        most = self._rows_per_draw(len(rows), max(map(len, rows)), longest)
        starts = [self._start(request, seed) for request in requests]
        return Decoding(
            self._ensemble,
            starts,
            rows,
            rows_per_draw=most,
            longest=longest,
            stops=self._policy.stop_tokens,
            sampling=sampling,
            go_on=go_on,
        )

    def _completion(self, request: Request, reply: "Reply") -> Completion:
        if math.isnan(sum(reply.logprobs)):
            raise UserError(
                f"engine: the probabilities of {request.draw or 'the mean'} are not numbers at step "
                f"{self._step}: the policy has diverged; lower optimizer.lr, or with IVON raise optimizer.ess"
            )
        return completion_of(self._policy, request, *reply, self._step)

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._draws = []
        self._ensemble.resize(0)

    def _rows_per_draw(self, draws: int, wanted: int, tokens: int) -> int:
        """Rows of each draw to decode together: at most `wanted`, within engine.max_batch_rows and memory."""
        check_positions(self._model.config, tokens)
        allowed = self._settings.max_batch_rows // draws
        if not allowed:
            raise UserError(
                f"engine.max_batch_rows = {self._settings.max_batch_rows}: fewer than the {draws} draws, which are "
                f"decoded together with at least one row each; raise it"
            )
        weights = self._ensemble.bytes_for(draws)
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        cached = whole_blocks(tokens) * bytes_per_token(self._model.config, self._ensemble.dtype)
        row = cached + sampling_bytes(vocabulary)
        budget = self._settings.memory_gib * GIB or own_bytes(self._policy.device) + self._ensemble.bytes
        most = int((budget - weights) // (row * draws))
        if most < 1:
            raise UserError(
                f"engine: {draws} policies of together {weights / GIB:.3g} GiB and cache and logits of "
                f"{row / GIB:.3g} GiB for one row of each ({tokens} tokens) need "
                f"{(weights + row * draws) / GIB:.3g} GiB; there are {budget / GIB:.3g}; lower the method's draws, "
                f"sampling.max_new_tokens or engine.dtype, or raise engine.memory_gib"
            )
        return min(max(wanted, 1), most, allowed)


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
        """[6, B]: each row's index; tokens in the cache; next token to add; new tokens so far; slot in the cache; how
        many tokens it was told."""
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
        rows = self._batch.T.tolist()
        finished = {m: i for i, m in enumerate(self._members) if rows[i][ROW] == self._none != m}
        for member, start in self._longer(list(finished)).items():
            rows[finished[member]] = self._tell(member, start, rows[finished[member]])
        parts = [rows[begin:end] for begin, end in pairwise(accumulate(self._counts, initial=0))]
        running = [[row for row in part if row[ROW] != self._none and row[SLOT] >= 0] for part in parts]
        started = [[row for row in part if row[ROW] != self._none and row[SLOT] < 0] for part in parts]
        for queue, own, new in zip(self._waiting, running, started, strict=True):
            new += self._take(queue, len(own) + len(new))
        self._counts = self._batch_counts([len(own) + len(new) for own, new in zip(running, started, strict=True)])
        batch: list[list[int]] = []
        for own, new, count in zip(running, started, self._counts, strict=True):
            batch += own + new + [[self._none, 0, 0, 0, -1, 0] for _ in range(count - len(own) - len(new))]
        self._assign_slots(batch)
        self._members = [row[ROW] for row in batch]
        self._batch = torch.tensor(batch, dtype=torch.int64, device=self._device).view(-1, 6).T.contiguous()
        self._filled = max((row[LENGTH] for row in batch), default=0)
        self._rows = Rows(self._counts, self._device)
        self._read(started)

    def _take(self, queue: deque[int], running: int) -> list[list[int]]:
        """Take waiting rows of a draw that fit in addition to the running ones; they have no slot yet."""
        rows = [queue.popleft() for _ in range(min(len(queue), self._per_draw - running))]
        return [self._reading(row) for row in rows]

    def _reading(self, row: int) -> list[int]:
        """A row that will read its prompt."""
        return [row, len(self._prompts[row]) - 1, self._prompts[row][-1], 0, -1, TOLD_TOKENS]

    def _longer(self, finished: Sequence[int]) -> Mapping[int, Start]:
        """The starts of finished rows that write another reply."""
        if not self._go_on or not finished:
            return {}
        longer = self._go_on(dict(zip(finished, self._replies(finished), strict=True)))
        for row, start in longer.items():
            self._random[row] = uniforms([start.key], 0, self._sampling.max_new_tokens, self._device)[0]
        return longer

    def _tell(self, index: int, start: Start, finished: Sequence[int]) -> list[int]:
        """A finished row that goes on: it is told the new tokens of its prompt, or reads all again if they are many."""
        self._prompts[index], known = start.prompt, finished[LENGTH] + 1  # its last token is not in the cache
        new = start.prompt[known:]
        if len(new) > TOLD_TOKENS:
            return self._reading(index)
        if self._told is None:
            self._told = torch.full((self._none + 1, TOLD_TOKENS + 1), -1, dtype=torch.int64, device=self._device)
        self._told[index] = torch.tensor([*new] + [-1] * (TOLD_TOKENS + 1 - len(new)), device=self._device)
        return [index, finished[LENGTH], start.prompt[known - 1], 0, finished[SLOT], 0]

    def _assign_slots(self, batch: Sequence[list[int]]) -> None:
        """Give each row one of the first slots, and move the cache of rows whose slots lie behind."""
        taken = {row[SLOT] for row in batch}
        free = [slot for slot in range(len(batch)) if slot not in taken]
        moved = [row for row in batch if row[SLOT] >= len(batch)]
        self._cache.clear(free)
        if moved:
            self._cache.move([row[SLOT] for row in moved], free[: len(moved)], max(row[LENGTH] for row in moved))
        for row, slot in zip(moved + [row for row in batch if row[SLOT] < 0], free, strict=True):
            row[SLOT] = slot

    def _read(self, started: Sequence[Sequence[Sequence[int]]]) -> None:
        """Read the prompts of each draw's new rows, except the last token, which is decoded."""
        prompts = []
        for rows in started:
            slots: dict[Prompt, list[int]] = {}
            for row, *_, slot, _ in rows:
                if prompt := self._prompts[row][:-1]:
                    slots.setdefault(prompt, []).append(slot)
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
            rows=Prefill(self._cache, sources, slots),
        )
