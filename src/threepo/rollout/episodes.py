"""Episodes: a rollout engine whose completions are played with environments, for several turns.

One draw of the weights writes all replies of an episode. A step's episodes take their turns together; what a policy
reads is exactly what it and its environment have written, token by token (models/turns.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from threepo.config import DataConfig, EnvironmentConfig, SamplingConfig
from threepo.environment import Observation, Turn
from threepo.errors import UserError
from threepo.models.policy import Policy
from threepo.models.turns import TurnEncoder
from threepo.posterior.noise import address_key
from threepo.posterior.policy_optimizer import WeightSource
from threepo.rollout.engines import RolloutEngine
from threepo.rollout.environments import Environments
from threepo.types import Completion, Draw, Episode, EpisodeStatus, Request


@dataclass
class Play:
    """An episode while it is played."""

    request: Request
    """With the prompt that the policy reads first."""
    tokens: list[int] = field(default_factory=list)
    own: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    transcript: list[tuple[str, str]] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    """By the number of the reply."""
    metrics: dict[str, float] = field(default_factory=dict)
    status: EpisodeStatus | None = None
    """None while it goes on."""
    reason: str = ""
    last: Completion | None = None
    """The last reply."""

    def ask(self) -> Request:
        """The request of the next reply."""
        return replace(self.request, prompt_tokens=self.request.prompt_tokens + tuple(self.tokens), turn=len(self.own))

    def add(self, reply: Completion) -> None:
        """Add a reply, which ends the episode if it was cut."""
        self.own.append((len(self.tokens), len(self.tokens) + len(reply.tokens)))
        self.tokens += reply.tokens
        self.logprobs += reply.logprobs
        self.transcript.append(("assistant", reply.text))
        self.last = reply
        if reply.finish_reason == "length":
            self.status = "tokens"

    def fail(self, reason: str) -> None:
        """End the episode because its environment failed."""
        self.status, self.reason = "failed", reason

    def completion(self, step: int, discount: float) -> Completion:
        """The episode as a completion."""
        assert self.status
        paid = math.fsum(reward * discount**turn for turn, reward in self.rewards.items())
        episode = Episode(tuple(self.own), tuple(self.transcript), paid, self.status, self.reason, self.metrics)
        last = self.last
        return Completion(
            **vars(self.request),
            tokens=tuple(self.tokens[: self.own[-1][1] if self.own else 0]),  # nobody has read what follows
            logprobs=tuple(self.logprobs),
            text=last.text if last else "",
            finish_reason=last.finish_reason if last else "stop",
            policy_step=last.policy_step if last else step,
            opening=last.opening if last else "",
            episode=episode,
        )


class EpisodeEngine:
    """A `RolloutEngine` that plays episodes, with an engine that generates their replies."""

    def __init__(self, engine: RolloutEngine, policy: Policy, settings: EnvironmentConfig, data: DataConfig) -> None:
        """`UserError` for an environment that cannot be made, or does not fit the chat template."""
        self._engine, self._policy, self._settings = engine, policy, settings
        self._environments = Environments(settings)
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
        longest = self._settings.max_tokens + tokens if self._settings.max_tokens else self._policy.context
        self._engine.prepare(draws, min(self._policy.context, max(tokens, longest)))

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> None:
        """See `RolloutEngine.load`."""
        self._step = step
        self._engine.load(posterior, draws, step)

    def rounds(self) -> Sequence[Sequence[Draw | None]]:
        """See `RolloutEngine.rounds`."""
        return self._engine.rounds()

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """Play an episode for each request. `UserError` if too many fail."""
        plays = [Play(request) for request in requests]
        for draws in self._engine.rounds():
            self._play([play for play in plays if play.request.draw in draws], sampling, seed)
        self._refuse_failures(plays)
        return [play.completion(self._step, self._settings.discount) for play in plays]

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._environments.close()
        self._engine.close()

    def _play(self, plays: Sequence[Play], sampling: SamplingConfig, seed: int) -> None:
        """Play episodes to their end, turn by turn."""
        self._environments.begin(len(plays))
        try:
            self._reset(plays, sampling, seed)
            while going := [play for play in plays if play.status is None]:
                replies = self._engine.generate([play.ask() for play in going], sampling, seed)
                for play, reply in zip(going, replies, strict=True):
                    play.add(reply)
                self._answer(plays, sampling)
        finally:
            self._environments.end()

    def _reset(self, plays: Sequence[Play], sampling: SamplingConfig, seed: int) -> None:
        """Begin all episodes: the policy's first prompt is the environment's, or the problem's."""
        addresses = [
            address_key("threepo-episode", seed, self._step, play.request.problem.id, play.request.rollout)
            for play in plays
        ]
        answers = self._environments.call(
            {i: ("reset", play.request.problem, addresses[i][0] >> 1) for i, play in enumerate(plays)}
        )
        for i, play in enumerate(plays):
            if answers[i].failure:
                play.fail(f"reset: {answers[i].failure}")
                continue
            if answers[i].value is not None or self._environments.tools:
                prompt = self._turns.prompt(play.request.problem, answers[i].value)
                play.request = replace(play.request, prompt_tokens=prompt)
            self._end_if_full(play, sampling)

    def _answer(self, plays: Sequence[Play], sampling: SamplingConfig) -> None:
        """Let environments answer the replies that have just been written."""
        calls: dict[int, tuple[object, ...]] = {}
        for i, play in enumerate(plays):
            if play.status is None:
                assert play.last
                if called := self._turns.calls(play.last.text):
                    calls[i] = "tools", called
                elif self._environments.steps:
                    calls[i] = "step", play.last.text
                else:
                    play.status = "done"
        for i, outcome in self._environments.call(calls).items():
            play = plays[i]
            if outcome.failure:
                play.fail(f"{calls[i][0]}: {outcome.failure}")
                continue
            if isinstance(outcome.value, Turn):
                self._take(play, outcome.value)
            else:
                results = [{"role": "tool", "content": text} for text in outcome.value]
                self._observe(play, results)
            self._end_if_full(play, sampling)

    def _take(self, play: Play, turn: Turn) -> None:
        """Add an environment's turn to the episode."""
        play.rewards[len(play.own) - 1] = turn.reward
        play.metrics |= turn.metrics
        if turn.done:
            play.status = "done"
        else:
            self._observe(play, turn.observation)

    def _observe(self, play: Play, observation: Observation) -> None:
        if len(play.own) == self._settings.max_turns:
            play.status = "turns"
            return
        told = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        play.transcript += [(str(message["role"]), str(message.get("content", ""))) for message in told]
        tokens = self._turns.following(play.request.problem, play.tokens[-1], observation)
        if tokens:
            self._policy.check_vocabulary(f"an observation of {play.request.problem.label}", tokens)
        play.tokens += tokens

    def _end_if_full(self, play: Play, sampling: SamplingConfig) -> None:
        """End an episode that has no room for one more reply."""
        if play.status is not None:
            return
        prompt, room = len(play.request.prompt_tokens), sampling.max_new_tokens
        most = min(self._settings.max_tokens or self._policy.context, self._policy.context - prompt)
        if len(play.tokens) + room > most:
            if not play.own:
                play.fail(f"reset: a prompt of {prompt} tokens leaves no room for a reply of {room}")
            else:
                play.status = "tokens"

    def _refuse_failures(self, plays: Sequence[Play]) -> None:
        failed = [play for play in plays if play.status == "failed"]
        if len(failed) > self._settings.max_failed_share * len(plays):
            first = failed[0]
            raise UserError(
                f"environment.max_failed_share = {self._settings.max_failed_share:g}: {len(failed)} of {len(plays)} "
                f"episodes have failed, the first one ({first.request.problem.label}) with: {first.reason}; mend the "
                f"environment, or raise the share"
            )


def with_episodes(
    engine: RolloutEngine, policy: Policy, settings: EnvironmentConfig, data: DataConfig
) -> RolloutEngine:
    """The engine, which plays episodes if there is an environment. Takes over the engine: an error closes it."""
    if not settings.factory:
        return engine
    try:
        return EpisodeEngine(engine, policy, settings, data)
    except BaseException:
        engine.close()
        raise
