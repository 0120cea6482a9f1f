"""Episodes: a rollout engine whose completions are played with environments, for several turns.

One draw of the weights writes all replies of an episode, and what a policy reads is exactly what it and its environment
have written, token by token (models/turns.py). The engine holds the conversations; it hands over replies as they end.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from threepo.config import DataConfig, EnvironmentConfig, SamplingConfig
from threepo.environment import Observation, Turn
from threepo.errors import ThreepoWarning, UserError
from threepo.models.policy import Policy
from threepo.models.turns import TurnEncoder
from threepo.posterior.noise import address_key
from threepo.posterior.policy_optimizer import WeightSource
from threepo.rollout.engines import ConversingEngine, RolloutEngine, Talk, rows_by_draw
from threepo.rollout.environments import Environments
from threepo.types import Completion, Draw, Episode, EpisodeStatus, Problem, Request, integers, numbers

AT_ONCE = 2048
"""Most episodes at a time: each has a process. A default probe asks for 8,192."""


@dataclass
class Play:
    """An episode while it is played."""

    index: int
    """Number of its environment."""
    request: Request
    """Request of the first reply, and so the prompt that the policy reads first."""
    begin: tuple[tuple[str, str], ...] = ()
    """First observation, if it is not the problem's prompt."""
    read: Problem | None = None
    """The problem with the first observation as its prompt, if there was one."""
    tokens: list[int] = field(default_factory=list)
    own: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    transcript: list[tuple[str, str]] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    """Rewards by the number of the reply."""
    metrics: dict[str, float] = field(default_factory=dict)
    status: EpisodeStatus | None = None
    """The way in which it ended; None while it goes on."""
    reason: str = ""
    last: Completion | None = None
    """The last reply."""
    unheard: str = ""
    """The last reply until the environment has got it."""

    def ask(self) -> Request:
        """The request of the next reply."""
        return replace(self.request, prompt_tokens=self.request.prompt_tokens + tuple(self.tokens), turn=len(self.own))

    def add(self, reply: Completion) -> None:
        """Add a reply, which ends the episode if it was cut."""
        self.own.append((len(self.tokens), len(self.tokens) + len(reply.tokens)))
        self.tokens += reply.tokens
        self.logprobs += reply.logprobs
        self.transcript.append(("assistant", reply.text))
        self.last, self.unheard = reply, reply.text
        if reply.finish_reason == "length":
            self.status = "tokens"

    def pay(self, turn: Turn) -> None:
        """Add an environment's reward of the last reply, and its metrics."""
        number = len(self.own) - 1
        self.rewards[number] = self.rewards.get(number, 0.0) + turn.reward
        self.metrics |= turn.metrics

    def fail(self, reason: str) -> None:
        """End the episode because its environment failed."""
        self.status, self.reason = "failed", reason

    def completion(self, step: int, discount: float, pays: bool) -> Completion:
        """The episode as a completion."""
        assert self.status
        paid = math.fsum(reward * discount**turn for turn, reward in self.rewards.items())
        episode = Episode(
            own=tuple(self.own),
            begin=self.begin,
            transcript=tuple(self.transcript),
            reward=paid if pays or self.rewards else None,
            status=self.status,
            reason=self.reason,
            metrics=self.metrics,
            rewards=tuple(self.rewards.get(turn, 0.0) for turn in range(len(self.own))) if self.rewards else (),
        )
        last = self.last
        return Completion(
            **vars(self.request),
            tokens=integers(self.tokens[: self.own[-1][1] if self.own else 0]),  # nobody has read what follows
            logprobs=numbers(self.logprobs),
            text=last.text if last else "",
            finish_reason=last.finish_reason if last else "stop",
            policy_step=last.policy_step if last else step,
            opening=last.opening if last else "",
            episode=episode,
        )


def _said(observation: Observation) -> tuple[tuple[str, str], ...]:
    """An observation as (role, text)."""
    if isinstance(observation, str):
        return (("user", observation),)
    return tuple((str(message["role"]), str(message["content"])) for message in observation)


class EpisodeEngine:
    """A `RolloutEngine` that plays episodes, with an engine that generates their replies."""

    def __init__(
        self,
        engine: ConversingEngine,
        policy: Policy,
        settings: EnvironmentConfig,
        data: DataConfig,
        environments: Environments,
        judges: bool = True,
    ) -> None:
        """`UserError` for environments that do not fit the chat template, which closes them.

        `judges`: refuse a step of which too many episodes have failed; if not, whoever knows all of them does.
        """
        self._engine, self._policy, self._settings = engine, policy, settings
        self._failures = Failures(settings) if judges else None
        self._environments = environments
        self._step = -1
        try:
            tools = self._environments.tools
            self._turns = TurnEncoder(policy.tokenizer, frozenset(policy.stop_tokens), data, tools)
            if not settings.keep_thoughts and data.chat_template == "auto":
                self._turns.refuse_rewriting("user" if self._environments.steps else "tool")
        except BaseException:
            self._environments.close()
            raise

    def prepare(self, draws: int, tokens: int) -> None:
        """See `RolloutEngine.prepare`; an episode may be longer than a single answer."""
        longest = min(self._policy.context, self._engine.longest, tokens + self._settings.max_tokens)
        self._engine.prepare(draws, max(tokens, longest))

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> int | None:
        """See `RolloutEngine.load`."""
        self._step = step
        if self._failures:
            self._failures.restart()
        return self._engine.load(posterior, draws, step)

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """Play an episode for each request."""
        # By draw, so that an engine that holds one at a time has to load, and play, each of them once.
        by_draw = rows_by_draw(requests, list(dict.fromkeys(request.draw for request in requests)))
        order = list(chain.from_iterable(by_draw))
        played: dict[int, Completion] = {}
        for first in range(0, len(order), AT_ONCE):
            some = order[first : first + AT_ONCE]
            played |= zip(some, self._play([requests[i] for i in some], sampling, seed), strict=True)
        completions = [played[i] for i in range(len(requests))]
        if self._failures:
            self._failures.add(completions)
        return completions

    def _play(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """Play episodes at once."""
        plays = [Play(index, request) for index, request in enumerate(requests)]
        self._environments.begin(len(plays))
        try:
            self._reset(plays, sampling, seed)
            going = [play for play in plays if play.status is None]
            longest = max((len(play.request.prompt_tokens) for play in going), default=0) + self._settings.max_tokens

            def follow(replies: Sequence[tuple[int, Completion]]) -> dict[int, Request]:
                for number, reply in replies:
                    going[number].add(reply)
                self._answer([going[number] for number, _ in replies], sampling)
                return {number: going[number].ask() for number, _ in replies if going[number].status is None}

            talk = Talk(follow, min(longest, self._engine.longest), self._settings.answer_steps)
            self._engine.converse([play.ask() for play in going], sampling, seed, talk)
            self._end(plays)
        finally:
            self._environments.end()
        discount, pays = self._settings.discount, self._environments.pays
        return [play.completion(self._step, discount, pays) for play in plays]

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._environments.close()
        self._engine.close()

    def _reset(self, plays: Sequence[Play], sampling: SamplingConfig, seed: int) -> None:
        """Begin all episodes: the policy's first prompt is the environment's, or the problem's."""
        calls = {}
        for play in plays:
            address = seed, self._step, play.request.problem.id, play.request.rollout
            calls[play.index] = "reset", play.request.problem, address_key("threepo-episode", *address)[0] >> 1
        answers = self._environments.call(calls)
        for play in plays:
            answer = answers[play.index]
            if answer.failure:
                play.fail(f"reset: {answer.failure}")
                continue
            if answer.value is not None or self._environments.tools:
                try:
                    play.read, prompt = self._turns.prompt(play.request.problem, answer.value)
                    self._policy.check_vocabulary(f"the first observation of {play.request.problem.label}", prompt)
                except UserError as error:
                    play.fail(f"reset: {error}")
                    continue
                play.request = replace(play.request, prompt_tokens=prompt)
                play.begin = _said(answer.value or ())
            self._end_if_full(play, sampling)

    def _answer(self, plays: Sequence[Play], sampling: SamplingConfig) -> None:
        """Let environments answer the replies that have just been written."""
        calls: dict[int, tuple[object, ...]] = {}
        for play in plays:
            if play.status is not None:
                continue
            assert play.last
            if called := self._turns.calls(play.last.text, play.last.opening):
                calls[play.index] = "tools", called, play.last.text
            elif self._environments.steps:
                calls[play.index] = "step", play.last.text
            else:
                play.status = "done"
        answers = self._environments.call(calls)
        for play in plays:
            if play.index not in calls:
                continue
            answer, play.unheard = answers[play.index], ""
            if answer.failure:
                play.fail(f"{calls[play.index][0]}: {answer.failure}")
                continue
            if isinstance(answer.value, Turn):
                self._take(play, answer.value)
            else:
                self._observe(play, [{"role": "tool", "content": text} for text in answer.value])
            self._end_if_full(play, sampling)

    def _take(self, play: Play, turn: Turn) -> None:
        """Add an environment's turn to the episode."""
        play.pay(turn)
        if turn.done:
            play.status = "done"
        else:
            self._observe(play, turn.observation)

    def _observe(self, play: Play, observation: Observation) -> None:
        if len(play.own) == self._settings.max_turns:
            play.status = "turns"
            return
        try:
            tokens = self._turns.following(play.read or play.request.problem, play.tokens[-1], observation)
            if tokens:
                self._policy.check_vocabulary(f"an observation of {play.request.problem.label}", tokens)
        except UserError as error:
            play.fail(f"observation: {error}")
            return
        play.transcript += _said(observation)
        play.tokens += tokens

    def _end(self, plays: Sequence[Play]) -> None:
        """Let environments hear that their episodes are over."""
        if not self._environments.ends:
            return
        ended = [play for play in plays if play.status != "failed"]
        answers = self._environments.call({play.index: ("end", play.unheard) for play in ended})
        for play in ended:
            answer = answers[play.index]
            if answer.failure:
                play.fail(f"end: {answer.failure}")
            elif answer.value:
                play.pay(answer.value)

    def _end_if_full(self, play: Play, sampling: SamplingConfig) -> None:
        """End an episode that has no room for one more reply."""
        if play.status is not None:
            return
        prompt, room = len(play.request.prompt_tokens), sampling.max_new_tokens
        most = min(self._settings.max_tokens, self._engine.longest - prompt)
        if len(play.tokens) + room > most:
            if not play.own:
                left = f"{max(most, 0)} tokens are left after a prompt of {prompt}"
                play.fail(f"reset: {left}, too few for a reply of sampling.max_new_tokens = {room}")
            else:
                play.status = "tokens"


class Failures:
    """Counts the episodes of loaded weights, and ends a run in which too many of them fail.

    A step with dynamic sampling, or an evaluation, plays them in several calls, of which the last may be a small one.
    """

    def __init__(self, settings: EnvironmentConfig) -> None:
        self._most, self._told = settings.max_failed_share, False
        self.restart()

    def restart(self) -> None:
        """Count anew, for other weights."""
        self._failed = self._all = 0

    def add(self, completions: Sequence[Completion]) -> None:
        """Count episodes; `UserError` if more than environment.max_failed_share have failed."""
        failed = [one for one in completions if one.failed]
        self._failed += len(failed)
        self._all += len(completions)
        if not failed:
            return
        episode, label = failed[0].episode, failed[0].problem.label
        assert episode
        shown = f"{self._failed} of {self._all} episodes have failed, one ({label}) with: {episode.reason}"
        if self._failed > self._most * self._all:
            fix = "fix the environment, or raise the share"
            raise UserError(f"environment.max_failed_share = {self._most:g}: {shown}; {fix}")
        if not self._told:
            self._told = True
            warnings.warn(
                f"environment: {shown}; the update leaves them out, evaluations count them as wrong",
                ThreepoWarning,
                stacklevel=2,
            )


def with_episodes(
    engine: ConversingEngine, policy: Policy, settings: EnvironmentConfig, data: DataConfig, judges: bool
) -> RolloutEngine:
    """The engine, which plays episodes if there is an environment. Takes over the engine: an error closes it."""
    if not settings.factory:
        return engine
    try:
        return EpisodeEngine(engine, policy, settings, data, Environments(settings), judges)
    except BaseException:
        engine.close()
        raise
