"""Episodes: contract 14 of the design, with real engines and real processes."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from chats import CHATML, FORGETFUL, chat_tokenizer
from threepo.config import DataConfig, EnvironmentConfig, LocalEngineConfig, ModelConfig, SamplingConfig, TinyConfig
from threepo.errors import ThreepoWarning, UserError
from threepo.models.packing import flatten
from threepo.models.policy import Policy, load_policy
from threepo.models.turns import DEEPEST, TOOL_FORMATS, ToolCall, TurnEncoder
from threepo.posterior.ivon import IVON
from threepo.rollout.engines import Follow, Talk, answering_threads
from threepo.rollout.environments import Environments
from threepo.rollout.episodes import EpisodeEngine
from threepo.rollout.local import LocalEngine
from threepo.types import Completion, CreditedRow, Draw, Problem, Request, integers, numbers
from threepo.workers import Outcome
from worlds import DEEDS, REASONS

pytestmark = pytest.mark.filterwarnings("ignore:environment. .* episodes have failed")

SAMPLING = SamplingConfig(max_new_tokens=8)
DRAWS = [Draw(0, 0, i) for i in range(2)]
DATA = DataConfig(train="x")


def talkative() -> Policy:
    """A tiny policy that ends its replies after some tokens, since a quarter of its vocabulary are stop tokens."""
    shape = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1)
    policy = load_policy(ModelConfig(path="tiny-qwen2", tiny=shape), seed=2)
    policy.model.generation_config.eos_token_id = [policy.tokenizer.eos_token_id, *range(0, 250, 4)]
    return policy


def requests(draws: Sequence[Draw | None], count: int = 4, each: int = 2) -> list[Request]:
    problems = [Problem(id=f"p{i}", prompt=f"problem {i}: ") for i in range(count)]
    return [
        Request(p, (1, 2), draw, i * each + k) for p in problems for i, draw in enumerate(draws) for k in range(each)
    ]


def play(
    policy: Policy,
    environment: EnvironmentConfig,
    asked: Sequence[Request],
    rows: int = 64,
    seed: int = 1,
    longest: int | None = None,
) -> list[Completion]:
    optimizer = IVON(policy.model.named_parameters(), ess=1e6)
    inner = LocalEngine(policy, LocalEngineConfig(max_batch_rows=rows))
    inner.longest = longest or inner.longest
    engine = EpisodeEngine(inner, policy, environment, DATA, Environments(environment))
    try:
        engine.load(optimizer, list(dict.fromkeys(r.draw for r in asked)), 0)
        return engine.generate(asked, SAMPLING, seed)
    finally:
        engine.close()


Echoed = tuple[Policy, list[Request], list[Completion]]


@pytest.fixture(scope="module")
def echoed() -> Echoed:
    """A policy, requests, and their episodes in the environment that does as it should."""
    policy, asked = talkative(), requests([*DRAWS, None])
    return policy, asked, play(policy, EnvironmentConfig(factory="worlds:Echo"), asked)


MARK = f"THREEPO_TEST_OF_EPISODES={os.getpid()}"


@pytest.fixture(autouse=True)
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*MARK.split("="))


def processes() -> int:
    """Processes of environments that these tests have started, and what those have started."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += int(path.parent.name) != os.getpid() and MARK.encode() in path.read_bytes()
    return found


def assert_no_processes() -> None:
    deadline = time.monotonic() + 5
    while processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes(), "something was left behind"


def test_every_reply_has_the_log_probs_of_its_draw_and_observations_have_none(echoed: Echoed) -> None:
    policy, _, completions = echoed
    optimizer = IVON(policy.model.named_parameters(), ess=1e6)
    finished = [c for c in completions if c.episode and c.episode.status == "done"]
    assert len(finished) > len(completions) / 4
    for completion in completions:
        assert completion.episode
        row = CreditedRow.of(completion, 0)
        assert row.loss_tokens == len(completion.logprobs) > 0
        with optimizer.at(completion.draw), torch.no_grad():
            scored = policy.logprobs(flatten([row], policy.device)).logprobs
        assert float((scored - torch.tensor(completion.logprobs)).abs().max()) < 1e-5
        said = [text for _, text in completion.episode.transcript]
        bounds = [0, *(bound for span in completion.own for bound in span)]
        pieces = [tuple(completion.tokens[a:b]) for a, b in pairwise(bounds)][1:]
        read = [tuple(policy.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in said[1::2]]
        assert pieces[1::2] == read[: len(pieces) // 2]
        assert all(piece[-1] in policy.stop_tokens for piece in pieces[:-1:2])
    for completion in finished:
        assert completion.episode
        assert len(completion.own) == 3
        assert completion.episode.metrics == {"made": 3.0}
        replies = [text for role, text in completion.episode.transcript if role == "assistant"]
        assert completion.episode.reward == sum(len(reply) % 3 == 0 for reply in replies)


def test_an_episode_is_a_function_of_its_address(echoed: Echoed, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = EnvironmentConfig(factory="worlds:Echo")
    policy, asked, together = echoed

    def written(completions: Sequence[Completion]) -> list[object]:  # log-probs round differently in other batches
        return [(c.tokens, c.own, c.episode and c.episode.transcript) for c in completions]

    assert written(play(policy, environment, asked[5:8])) == written(together[5:8])
    begun: list[int] = []
    begin = Environments.begin
    monkeypatch.setattr(Environments, "begin", lambda self, count: begun.append(count) or begin(self, count))
    monkeypatch.setattr("threepo.rollout.episodes.AT_ONCE", 17)
    played: list[set[Draw | None]] = []
    converse = LocalEngine.converse

    def recorded(self: LocalEngine, begun: Sequence[Request], *rest: Any) -> None:
        played.append({request.draw for request in begun})
        converse(self, begun, *rest)

    monkeypatch.setattr(LocalEngine, "converse", recorded)
    assert written(play(policy, environment, asked, rows=3)) == written(together)
    assert (max(begun), sum(begun)) == (17, len(asked))
    assert sum(map(len, played)) < len(played) + len(set().union(*played)), "a draw is played in one round or two"
    other = play(policy, environment, asked, seed=2)
    assert all(a.tokens != b.tokens for a, b in zip(other, together, strict=True))
    replies = {tuple(c.tokens[slice(*span)]) for c in together for span in c.own}
    assert len(replies) > 0.9 * sum(len(c.own) for c in together), "turns must not share random numbers"


@pytest.mark.parametrize("length", [3, 200])
def test_conversations_keep_their_place_in_the_cache(length: int) -> None:
    """As if each turn was a call of its own: with few and many new tokens, and rows that wait for a place."""
    policy, asked = talkative(), requests([*DRAWS, None], 4, 2)
    optimizer = IVON(policy.model.named_parameters(), ess=1e6)
    engine = LocalEngine(policy, LocalEngineConfig(max_batch_rows=12))
    engine.load(optimizer, [*DRAWS, None], 0)
    found: dict[str, list[list[Completion]]] = {"kept": [[] for _ in asked], "read again": [[] for _ in asked]}

    def follow_for(name: str) -> Follow:
        def follow(replies: Sequence[tuple[int, Completion]]) -> dict[int, Request]:
            longer = {}
            for index, reply in replies:
                found[name][index].append(reply)
                if reply.finish_reason == "stop" and (turn := len(found[name][index])) < 4:
                    told = tuple((7 * index + turn + k) % 250 for k in range(length + index))
                    prompt = (*reply.prompt_tokens, *reply.tokens, *told)
                    longer[index] = replace(asked[index], prompt_tokens=prompt, turn=turn)
            return longer

        return follow

    engine.converse(asked, SAMPLING, 1, Talk(follow_for("kept"), 4 * (length + 40), 0))
    follow, now = follow_for("read again"), dict(enumerate(asked))
    while now:
        now = dict(follow(list(zip(now, engine.generate(list(now.values()), SAMPLING, 1), strict=True))))
    assert sum(len(replies) for replies in found["kept"]) > 1.5 * len(asked)
    for kept, again in zip(*found.values(), strict=True):
        assert [(c.tokens, c.prompt_tokens, c.turn) for c in kept] == [
            (c.tokens, c.prompt_tokens, c.turn) for c in again
        ]
        for one, other in zip(kept, again, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_limits_end_an_episode_where_they_say(echoed: Echoed) -> None:
    policy, everything, played = echoed
    asked = [request for request in everything if request.draw is None]
    for c in play(policy, EnvironmentConfig(factory="worlds:Echo", max_turns=2), asked):
        assert c.episode
        assert len(c.own) <= 2
        assert c.episode.status == ("turns" if c.finish_reason == "stop" else "tokens")
        assert c.episode.transcript[-1][0] == "assistant"
    for c in play(policy, EnvironmentConfig(factory="worlds:Echo", max_tokens=20), asked):
        assert c.episode
        assert c.episode.status in ("tokens", "done")
        assert len(c.tokens) <= 20
    discounted = play(policy, EnvironmentConfig(factory="worlds:Echo", discount=0.5), asked)
    for c, whole in zip(discounted, [one for one in played if one.draw is None], strict=True):
        assert c.episode
        assert whole.episode
        answered = len(c.own) - (c.finish_reason == "length")
        paid = [len(text) % 3 == 0 for role, text in c.episode.transcript if role == "assistant"][:answered]
        assert c.episode.reward == sum(0.5**i * p for i, p in enumerate(paid))
        assert whole.episode.reward == sum(paid)
        unpaid = [0.0] * (len(c.own) - answered)
        assert c.episode.rewards == whole.episode.rewards == ((*paid, *unpaid) if paid else ())


def test_an_environment_hears_the_end_of_its_episode_and_may_pay() -> None:
    policy, asked = talkative(), requests([*DRAWS, None])
    plain = play(policy, EnvironmentConfig(factory="worlds:Echo", max_turns=3, max_tokens=40), asked)
    ended = play(policy, EnvironmentConfig(factory="worlds:Ends", max_turns=3, max_tokens=40), asked)
    assert {c.episode.status for c in plain if c.episode} >= {"done", "tokens"}
    for one, other in zip(plain, ended, strict=True):
        assert one.episode
        assert other.episode
        unheard = len(one.text) if one.finish_reason == "length" else 0
        metrics = {**one.episode.metrics, "unheard": unheard}
        assert one.episode.reward is not None
        *earlier, last = one.episode.rewards or (0.0,) * len(one.own)
        paid = replace(one.episode, reward=one.episode.reward + 10, metrics=metrics, rewards=(*earlier, last + 10))
        assert other == replace(one, episode=paid)
    limits = {"max_turns": 3, "max_tokens": 40, "max_failed_share": 1.0}
    settings = EnvironmentConfig(factory="worlds:Ends", settings={"fails": True}, **limits)
    for one, failed in zip(plain, play(policy, settings, asked), strict=True):
        assert one.episode
        assert failed.episode
        done = one.episode.status == "done"
        assert failed.episode.reason.startswith("end: KeyError: ") == failed.failed == done


def test_an_end_that_is_no_turn_pays_nothing() -> None:
    """None leaves the episode to a reward function, or to an error if there is none; 0.0 is as wrong as 1.0."""
    policy, asked = talkative(), requests([None])
    for c in play(policy, EnvironmentConfig(factory="worlds:Closes"), asked):
        assert c.episode
        assert c.episode.reward is None
    settings = EnvironmentConfig(factory="worlds:Closes", settings={"told": 0.0})
    with pytest.raises(UserError, match="end: TypeError: returned float"):
        play(policy, settings, asked)


def test_a_trainer_that_is_killed_leaves_no_process_behind() -> None:
    """Not even those in sessions of their own, whose episode has ended, or has not."""
    program = """
import time
from threepo.config import EnvironmentConfig
from threepo.rollout.environments import Environments
from threepo.types import Problem
environments = Environments(EnvironmentConfig(factory="worlds:Hostile", settings={"deed": "daemons", "when": "reset"}))
environments.begin(2)
failed = environments.call({0: ("reset", Problem("p0", ""), 1)})[0].failure
link = environments._children[1].link
link.send(("reset", Problem("p0", ""), 1))
print(failed, link.recv().failure, flush=True)
time.sleep(1000)
"""
    path = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=path) as trainer:
        assert trainer.stdout
        said, there = trainer.stdout.readline(), processes()
        trainer.kill()
    assert said.count("no such key") == 2
    assert there == 7, "the trainer, the first process, two of an episode that has ended, and three of another"
    assert_no_processes()


def test_what_the_first_object_of_a_class_starts_is_shared_by_all_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ends with the environments, also if who started it has gone by then. A zombie holds up nobody."""
    (tmp_path / "with_server.py").write_text(
        "import subprocess, time\n"
        "class Served:\n"
        "    server = None\n"
        "    def __init__(self):\n"
        "        if not Served.server:\n"
        "            command = ['sh', '-c', 'setsid sleep 1000 >&- 2>&- & echo $!; exec >&-; sleep 0.5']\n"
        "            started = subprocess.Popen(command, stdout=subprocess.PIPE)\n"
        "            Served.server = int(started.stdout.readline())\n"
        "            subprocess.Popen(['true'])\n"
        "            time.sleep(0.1)\n"
        "    def reset(self, problem):\n"
        "        return 'there' if open(f'/proc/{Served.server}/cmdline').read() else 'gone'\n"
        "    def step(self, reply): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    environments = Environments(EnvironmentConfig(factory="with_server:Served"))
    told = []
    for _ in range(3):
        environments.begin(1)
        told.append(environments.call({0: ("reset", Problem("p", ""), 1)})[0].value)
        time.sleep(0.5)  # what has started the server ends
    environments.close()
    assert told == ["there"] * 3
    assert capfd.readouterr().err == ""
    assert_no_processes()


def test_programs_that_an_environment_starts_are_as_without_threepo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hear Ctrl-C from the environment, and another Python does not import this one's packages."""
    (tmp_path / "with_programs.py").write_text(
        "import signal, subprocess\n"
        "class Starts:\n"
        "    def reset(self, problem):\n"
        "        sleeper = subprocess.Popen(['sleep', '1000'])\n"
        "        sleeper.send_signal(signal.SIGINT)\n"
        "        path = subprocess.run(['sh', '-c', 'echo $PYTHONPATH'], capture_output=True, text=True).stdout\n"
        "        return f'{sleeper.wait(10)} {path.strip()}'\n"
        "    def step(self, reply): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/the/users/own")
    with closing(Environments(EnvironmentConfig(factory="with_programs:Starts"))) as environments:
        environments.begin(1)
        assert environments.call({0: ("reset", Problem("p", ""), 1)})[0].value == "-2 /the/users/own"


CALCULATOR = EnvironmentConfig(factory="worlds:Calculator", max_tokens=1000, timeout_s=2.0)


@pytest.fixture(scope="module")
def calculators() -> Iterator[Environments]:
    """Made once, since the schemas of tools take seconds of imports."""
    with closing(Environments(CALCULATOR)) as environments:
        yield environments


def test_slow_calls_of_one_reply_do_not_fail_an_episode_together(calculators: Environments) -> None:
    calculators.begin(1)
    calculators.call({0: ("reset", Problem("p", ""), 1)})
    told = calculators.call({0: ("tools", [("wait", {"seconds": 1.2})] * 2 + [("nope", {})], "")})[0].value
    assert told[:2] == ["waited", "error: not run, as earlier calls of this reply took too long"]
    assert told[2].endswith("with one of the names add, wait")


@pytest.fixture(scope="module")
def hostile() -> dict[str, list[tuple[Completion, Completion]]]:
    """Episodes by what is done in one half of them, each with its equal in a good environment; all at the same time."""
    asked = [
        Request(Problem(id=f"{deed} {i}", prompt=f"{deed} {i}: "), (1, 2), None, k)
        for deed in DEEDS
        for i in range(2)
        for k in range(3)
    ]
    settings = EnvironmentConfig(factory="worlds:Hostile", timeout_s=1.0, memory_mib=128, workers=6)
    with pytest.MonkeyPatch.context() as context:
        context.setenv(*MARK.split("="))
        policy = talkative()
        good = play(policy, EnvironmentConfig(factory="worlds:Echo"), asked, rows=512)
        bad = play(policy, settings, asked, rows=512)
        assert_no_processes()
    found: dict[str, list[tuple[Completion, Completion]]] = {}
    for completion, fine in zip(bad, good, strict=True):
        found.setdefault(completion.problem.id[:-2], []).append((completion, fine))
    return found


@pytest.mark.parametrize("deed", DEEDS)
def test_a_bad_environment_fails_its_episode_alone(
    deed: str, hostile: dict[str, list[tuple[Completion, Completion]]]
) -> None:
    assert any(completion.failed for completion, _ in hostile[deed]), "no episode has come to its second step"
    for completion, fine in hostile[deed]:
        assert completion.episode
        if completion.failed:
            assert completion.problem.id.endswith("0")
            assert completion.episode.reason.startswith("step: ")
            assert REASONS.get(deed, "") in completion.episode.reason
            assert completion.tokens == fine.tokens[: len(completion.tokens)]
        elif completion.problem.id.endswith("1") or len(fine.own) == 1:
            assert completion == fine


def test_a_conversation_that_grows_ends_where_the_engine_ends() -> None:
    """An engine may take less than the model, as servers do. A first observation that is too long fails alone."""
    policy, asked = talkative(), requests([None], 4, 2)
    for longest in (policy.context, 60):
        found = play(policy, EnvironmentConfig(factory="worlds:Grows", max_tokens=10_000), asked, longest=longest)
        grown = [c for c in found if c.finish_reason == "stop"]
        assert grown
        for completion in grown:
            assert completion.episode
            assert completion.episode.status == "tokens"
            assert len(completion.prompt_tokens) + len(completion.tokens) <= longest
    settings = EnvironmentConfig(factory="worlds:Grows", settings={"first": 200})
    with pytest.raises(
        UserError, match=r"8 of 8 episodes have failed.*: reset: 0 tokens are left after a prompt of \d+, too few"
    ):
        play(policy, settings, asked, longest=30)


class Breaks:
    """A `ConversingEngine` that fails while an environment answers."""

    longest = 100

    def __init__(self, asked: threading.Event, answers: list[Future[Any]]) -> None:
        self._asked, self._answers = asked, answers

    def converse(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int, talk: Talk) -> None:
        said: dict[str, Any] = {"tokens": integers([1]), "logprobs": numbers([-1.0]), "text": "a"}
        reply = Completion(**vars(requests[0]), **said, finish_reason="stop", policy_step=0)
        with answering_threads(1) as threads:
            self._answers.append(threads.submit(lambda: [talk.follow([(0, reply)]) for _ in range(2)]))
            assert self._asked.wait(60)
            raise UserError("the server has died")

    def close(self) -> None:
        """There is nothing to free."""


class Telling(Environments):
    """Tells when an environment is asked to step for the second time, and remembers how steps ended."""

    def __init__(self, settings: EnvironmentConfig, asked: threading.Event, ended: list[str]) -> None:
        super().__init__(settings)
        self._asked, self._ended = asked, ended

    def _call(self, index: int, call: tuple[Any, ...]) -> Outcome:
        if self._ended:
            self._asked.set()
        outcome = super()._call(index, call)
        if call[0] == "step":
            self._ended.append(outcome.failure)
        return outcome


def test_an_engine_that_fails_does_not_wait_for_environments() -> None:
    policy = talkative()
    settings = EnvironmentConfig(factory="worlds:Hostile", settings={"deed": "hang"}, timeout_s=10.0)
    asked, answers, ended = threading.Event(), list[Future[Any]](), list[str]()
    environments = Telling(settings, asked, ended)
    engine = EpisodeEngine(Breaks(asked, answers), policy, settings, DATA, environments)  # type: ignore[arg-type]
    try:
        with pytest.raises(UserError, match="the server has died"):
            engine.generate(requests([None], 1, 1), SAMPLING, 1)
        answers[0].exception(timeout=60)
        assert ended == ["", "process ended"], "it was waited for until its time was up"
    finally:
        engine.close()


def test_a_reset_that_fails() -> None:
    """In one half of the episodes."""
    names = [f"{deed} {i}" for deed in ("raise", "hang", "die", "number", "long") for i in range(2)]
    asked = [Request(Problem(id=name, prompt=f"{name}: "), (1, 2), None, 0) for name in names]
    settings = EnvironmentConfig(factory="worlds:Hostile", settings={"when": "reset"}, timeout_s=1.0, workers=4)
    for completion in play(talkative(), settings, asked):
        assert completion.failed == completion.problem.id.endswith("0")
        if completion.failed:
            assert completion.episode
            assert completion.episode.reason.startswith("reset: ")
            assert not completion.tokens
    with pytest.raises(UserError, match="environment.max_failed_share = 0.4: 5 of 10 episodes have failed"):
        play(talkative(), replace(settings, max_failed_share=0.4), asked)


@pytest.mark.filterwarnings("error::threepo.errors.ThreepoWarning")
def test_the_first_failure_is_told_once() -> None:
    policy, asked = talkative(), requests([None], 4, 2)
    settings = EnvironmentConfig(factory="worlds:Hostile", settings={"deed": "raise", "when": "reset"})
    engine = EpisodeEngine(LocalEngine(policy, LocalEngineConfig()), policy, settings, DATA, Environments(settings))
    with closing(engine):
        engine.load(IVON(policy.model.named_parameters(), ess=1e6), [None], 0)
        with pytest.warns(ThreepoWarning, match="environment: 4 of 8 episodes have failed, one .* with: reset: "):
            engine.generate(asked, SAMPLING, 1)
        engine.load(IVON(policy.model.named_parameters(), ess=1e6), [None], 1)
        assert sum(one.failed for one in engine.generate(asked, SAMPLING, 1)) == 4, "without a second warning"


def test_failures_are_counted_over_all_that_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem whose episodes all fail may fill the first of several rounds."""
    monkeypatch.setattr("threepo.rollout.episodes.AT_ONCE", 2)
    settings = EnvironmentConfig(factory="worlds:Hostile", settings={"deed": "raise", "when": "reset"})
    asked = requests([None], 4, 2)
    failing = [request for request in asked if request.problem.id == "p2"]
    others = [request for request in asked if request.problem.id not in ("p0", "p2")]
    assert [one.failed for one in play(talkative(), settings, [*failing, *others])] == [True] * 2 + [False] * 4


def test_failures_are_counted_over_the_calls_of_a_step() -> None:
    """The last part of an evaluation, or the last round of a step, may have a single problem, which fails."""
    policy = talkative()
    settings = EnvironmentConfig(factory="worlds:Hostile", settings={"deed": "raise", "when": "reset"})
    optimizer = IVON(policy.model.named_parameters(), ess=1e6)
    asked = requests([None], 4, 2)
    broken = [request for request in asked if request.problem.id == "p2"]
    engine = EpisodeEngine(LocalEngine(policy, LocalEngineConfig()), policy, settings, DATA, Environments(settings))
    with closing(engine):
        engine.load(optimizer, [None], 0)
        engine.generate([request for request in asked if request.problem.id != "p2"], SAMPLING, 1)
        assert all(one.failed for one in engine.generate(broken, SAMPLING, 1)), "4 of 8, p0's among them"
        with pytest.raises(UserError, match="6 of 10 episodes have failed"):
            engine.generate(broken, SAMPLING, 1)
        engine.load(optimizer, [None], 1)
        with pytest.raises(UserError, match="2 of 2 episodes have failed"):
            engine.generate(broken, SAMPLING, 1)
    assert all(one.failed for one in play(policy, replace(settings, max_failed_share=1.0), broken))


def test_an_environment_that_answers_calls_pays_zero_where_none_is_made() -> None:
    settings = EnvironmentConfig(factory="worlds:Shop")
    inner = Scripted(chat_tokenizer(TOOLS), ["hi"])
    with closing(scripted(inner, settings)) as engine:
        [completion] = engine.generate([Request(Problem(id="p", prompt="go"), (), None, 0)], SAMPLING, 1)
    assert completion.episode
    assert completion.episode.reward == 0.0


def test_episodes_fit_an_engine_that_is_shorter_than_the_model() -> None:
    """They end where the engine ends, so it is not asked for room that it does not have."""
    policy, settings = talkative(), EnvironmentConfig(factory="worlds:Echo", max_tokens=10_000)
    inner = LocalEngine(policy, LocalEngineConfig())
    inner.longest, asked = 60, []
    inner.prepare = lambda draws, tokens: asked.append(tokens)  # type: ignore[method-assign]
    with closing(EpisodeEngine(inner, policy, settings, DATA, Environments(settings))) as engine:
        engine.prepare(1, 40)
        engine.prepare(1, 70)
    assert asked == [60, 70], "a prompt that is too long is the engine's to refuse"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factory": "nowhere:Echo"}, "no module 'nowhere'"),
        ({"factory": "worlds:Nothing"}, "has no function or class 'Nothing'"),
        ({"factory": "worlds:Echo", "settings": {"depth": 3}}, "raised TypeError"),
        ({"factory": "threepo.types:Problem", "settings": {"id": "a", "prompt": "b"}}, "neither `step` nor `tools`"),
        ({"factory": "worlds:Shop"}, "no chat template"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        play(talkative(), EnvironmentConfig(**settings), requests([None]))  # type: ignore[arg-type]
    assert not processes()


def test_what_environments_draw_is_the_same_in_every_process() -> None:
    policy, asked = talkative(), requests([None], 2, 2)
    settings = EnvironmentConfig(factory="worlds:Draws", max_turns=3)
    once = play(policy, settings, asked)
    assert play(policy, settings, asked) == once
    assert len({c.episode.begin for c in once if c.episode}) == len(once)
    assert not any(c.failed for c in once)
    assert any("half a pair: ?" in text for c in once if c.episode for _, text in c.episode.transcript)


def test_an_environment_may_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the class has multiplied before its process forks: threads of OpenMP would not live on in a fork."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    settings = EnvironmentConfig(factory="worlds:Threads", timeout_s=20.0, memory_mib=4096)
    for completion in play(talkative(), settings, requests([None], 2, 2)):
        assert not completion.failed, completion.episode
        assert completion.episode
        assert completion.episode.begin == (("user", "27000000.0"),)


TOOLS = CHATML.replace("{% for m", "{% if tools %}call with <tool_call>: {{ tools | tojson }}\n{% endif %}{% for m", 1)


def encoder(template: str, tools: bool = False) -> TurnEncoder:
    tokenizer = chat_tokenizer(template)
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    return TurnEncoder(tokenizer, frozenset([tokenizer.eos_token_id]), DATA, [schema] if tools else [])


def test_turns_of_a_chat_are_what_the_template_renders() -> None:
    turns = encoder(CHATML)
    tokenizer, problem = turns.tokenizer, Problem(id="p", prompt="say")
    tokens = list(turns.prompt(problem, None)[1])
    for reply, observation in (("hi", "again"), ("ho", "once more")):
        tokens += tokenizer(f"{reply}<|im_end|>", add_special_tokens=False)["input_ids"]
        tokens += turns.following(problem, tokens[-1], observation)
    said = [("user", "say"), ("assistant", "hi"), ("user", "again"), ("assistant", "ho"), ("user", "once more")]
    messages = [{"role": role, "content": text} for role, text in said]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokens) == whole


def test_a_prompt_template_is_for_the_problems_own_prompt() -> None:
    turns = replace(encoder(CHATML), settings=replace(DATA, prompt_template="Q: {prompt}"))
    problem = Problem(id="p", prompt="say")
    assert "user\nQ: say<" in turns.tokenizer.decode(turns.prompt(problem, None)[1])
    assert "user\nlook<" in turns.tokenizer.decode(turns.prompt(problem, "look")[1])


def test_turns_go_on_as_the_first_observation_began() -> None:
    """With data.chat_template = "never", messages make a chat of the whole episode, and a text makes none."""
    turns = replace(encoder(CHATML), settings=replace(DATA, chat_template="never"))
    chat = [{"role": "user", "content": "Which?"}]
    for prompt, observation, told in (
        ("say", chat, "<|im_start|>user\nnot 5<|im_end|>\n<|im_start|>assistant\n"),
        (tuple(chat), "say", "not 5"),
    ):
        read, _ = turns.prompt(Problem(id="p", prompt=prompt), observation)
        assert turns.tokenizer.decode(turns.following(read, turns.tokenizer.eos_token_id, "not 5")).endswith(told)
        assert ("im_start" in told) == ("im_start" in turns.tokenizer.decode(turns.following(read, 0, "not 5")))


def test_a_call_that_decoding_leaves_out_is_refused() -> None:
    """Some tokenizers have `<tool_call>` as a special token, which the text of a reply does not show."""
    tokenizer = chat_tokenizer(TOOLS)
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    for special in (False, True):
        tokenizer.add_tokens([AddedToken("<tool_call>", special=special)], special_tokens=special)
        if special:
            with pytest.raises(UserError, match="'<tool_call>' as a special token"):
                TurnEncoder(tokenizer, frozenset(), DATA, [schema])
        else:
            TurnEncoder(tokenizer, frozenset(), DATA, [schema])


def test_a_template_that_forgets_thoughts_is_refused_with_its_line() -> None:
    with pytest.raises(UserError, match="drops thoughts of earlier turns, .*keep_thoughts = true"):
        encoder(FORGETFUL).refuse_rewriting("user")
    encoder(CHATML).refuse_rewriting("user")


def test_a_policy_goes_on_reading_its_thoughts_if_it_keeps_them() -> None:
    """Each prompt is the one before, the reply as it was written, and the observation, whatever the template drops."""
    tokenizer, replies = chat_tokenizer(FORGETFUL), ["<think>hi</think>one", "<think>hi</think>two", "three"]
    inner = Scripted(tokenizer, replies)
    settings = EnvironmentConfig(factory="worlds:Echo", keep_thoughts=True)
    with closing(scripted(inner, settings)) as engine:
        [completion] = engine.generate([Request(Problem(id="p", prompt="go"), (), None, 0)], SAMPLING, 1)
    assert completion.episode
    assert completion.episode.status == "done"
    told = [text for role, text in completion.episode.transcript if role == "user"]
    prompt = "<|im_start|>user\ngo p: <|im_end|>\n<|im_start|>assistant\n"
    assert inner.prompts[0] == prompt
    for number in range(2):
        prompt += f"{replies[number]}<|im_end|>\n<|im_start|>user\n{told[number]}<|im_end|>\n<|im_start|>assistant\n"
        assert inner.prompts[number + 1] == prompt
    assert (
        tokenizer.decode(completion.prompt_tokens) + tokenizer.decode(completion.tokens) == f"{prompt}three<|im_end|>"
    )
    forgetting = replace(settings, keep_thoughts=False)
    with pytest.raises(UserError, match="drops thoughts of earlier turns"):
        scripted(inner, forgetting)


def test_tools_are_in_the_prompt_and_calls_are_read() -> None:
    turns = encoder(TOOLS, tools=True)
    prompt = turns.tokenizer.decode(turns.prompt(Problem(id="p", prompt="2 + 3?"), None)[1])
    assert '"name": "add"' in prompt
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    assert turns.calls(f"thinking {one}{one}") == [ToolCall("add", {"a": 2, "b": 3})] * 2
    assert turns.calls("<tool_call>{add 2 3}</tool_call>") == [ToolCall("", "{add 2 3}")]
    assert turns.calls("5") == []
    for levels, name in ((DEEPEST - 1, "add"), (DEEPEST, ""), (500, "")):  # what is sent must not end the run
        deep = "[" * (levels - 1) + "1" + "]" * (levels - 1)
        assert turns.calls(f'<tool_call>{{"name": "add", "arguments": {deep}}}</tool_call>')[0].name == name
    with pytest.raises(UserError, match="no format of calls that is known"):
        encoder(TOOLS + "{# <function= #}", tools=True)
    llama = encoder(CHATML + '{# {"name": ..., "parameters": ...} #}', tools=True)
    assert llama.calls('{"name": "add", "parameters": {"a": 1}}') == [ToolCall("add", {"a": 1})]
    assert llama.calls('it is {"name": "add"}') == []
    assert llama.calls('<think>{"name"}</think>\n{"name": "add", "parameters": {}}') == [ToolCall("add", {})]


CALL, OTHER = (f'<tool_call>{{"name": "add", "arguments": {{"a": {a}}}}}</tool_call>' for a in (2, 3))


@pytest.mark.parametrize(
    ("opening", "reply", "called"),
    [
        ("", f"<think>maybe {CALL}</think>5", []),
        ("", f"<think>maybe {CALL}", []),
        ("<think>\n", f"maybe {CALL}", []),
        ("<think>\n", f"maybe {CALL}</think>{OTHER}", [3]),
        ("", f"{CALL}</think>5", [2]),
        ("", f"{CALL}<think>or {CALL}?</think>{OTHER}", [2, 3]),
        ("", CALL.replace("2", '"a<think>b</think>c"') + OTHER, ["a<think>b</think>c", 3]),
        ("", CALL.replace("2", '"</think>"') + OTHER, ["</think>", 3]),
        ("", CALL.replace("2", '"<think>"') + OTHER, ["<think>", 3]),
    ],
)
def test_thoughts_call_no_tools(opening: str, reply: str, called: list[object]) -> None:
    turns = encoder(TOOLS, tools=True)
    assert turns.calls(reply, opening) == [ToolCall("add", {"a": a}) for a in called]
    assert turns.calls(reply.replace("add", "x"), opening) == [ToolCall("x", {"a": a}) for a in called]


def test_a_reply_without_its_calls_keeps_its_thoughts() -> None:
    reply = f"<think>use <tool_call> now</think>ok{CALL} and {OTHER}"
    assert TOOL_FORMATS["qwen"].without_calls(reply) == "<think>use <tool_call> now</think>ok and "
    llama = '<think>{"name"}</think>\n{"name": "add", "parameters": {}}'
    assert TOOL_FORMATS["llama"].without_calls(llama) == '<think>{"name"}</think>\n'
    assert TOOL_FORMATS["llama"].without_calls(reply) == reply


@pytest.mark.parametrize(
    "filler",
    ["\n", " ", "<think>", "</think>", "<tool_call>", "{", "}", "</think>{}", "<think>}\n", "<|python_tag|>\n"],
)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_long_replies_are_read_in_linear_time(name: str, filler: str) -> None:
    """As many as 32,768 tokens; a quadratic pattern took nine seconds."""
    begin = time.process_time()
    for text in (filler * 32_768, filler * 32_768 + "x", "<think>" + filler * 32_768 + "x"):
        TOOL_FORMATS[name].calls(text)
    assert time.process_time() - begin < 2


class Scripted:
    """A `ConversingEngine` whose policy says what is written for it, turn by turn."""

    longest = 4096

    def __init__(self, tokenizer: Any, replies: Sequence[str]) -> None:
        self._tokenizer, self._replies = tokenizer, replies
        self.prompts: list[str] = []

    def converse(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int, talk: Talk) -> None:
        now = dict(enumerate(requests))
        for text in self._replies:
            (request,) = now.values()
            self.prompts.append(self._tokenizer.decode(request.prompt_tokens))
            tokens = integers([*self._tokenizer(text)["input_ids"], self._tokenizer.eos_token_id])
            said: dict[str, Any] = {"tokens": tokens, "logprobs": numbers([-1.0] * len(tokens)), "text": text}
            now = dict(talk.follow([(0, Completion(**vars(request), **said, finish_reason="stop", policy_step=0))]))
        assert not now

    def close(self) -> None:
        """There is nothing to free."""


def scripted(inner: Scripted, settings: EnvironmentConfig, environments: Environments | None = None) -> EpisodeEngine:
    """An engine of episodes for these replies."""
    tokenizer = inner._tokenizer
    policy = SimpleNamespace(
        tokenizer=tokenizer, stop_tokens=[tokenizer.eos_token_id], check_vocabulary=lambda *_: None
    )
    return EpisodeEngine(inner, policy, settings, DATA, environments or Environments(settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "calls"),
    [
        (
            TOOLS,
            ['<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', "<tool_call>add 5</tool_call>"],
        ),
        (CHATML + '{# "parameters" #}', ['{"name": "add", "parameters": {"a": 2, "b": 3}}', '{"name": "no"}']),
    ],
    ids=["qwen", "llama"],
)
def test_a_policy_reads_what_the_tool_answers_to_its_call(
    template: str, calls: list[str], calculators: Environments
) -> None:
    """The second call cannot be read, which the policy is told; the third reply calls nothing and ends the episode."""
    tokenizer = chat_tokenizer(template)
    inner, problem = Scripted(tokenizer, [*calls, "It is 5."]), Problem(id="p", prompt="2 + 3?")
    engine = scripted(inner, CALCULATOR, calculators)
    [completion] = engine.generate([Request(problem, (), None, 0)], SAMPLING, 1)
    assert completion.episode
    roles, texts = zip(*completion.episode.transcript, strict=True)
    assert roles == ("assistant", "tool", "assistant", "tool", "assistant")
    assert texts[1] == "5"
    assert texts[3].startswith("error: write a call in the format")
    assert completion.episode.status == "done"
    said = [("user", "2 + 3?"), *completion.episode.transcript]
    for number, prompt in enumerate(inner.prompts):
        messages = [{"role": role, "content": text} for role, text in said[: 1 + 2 * number]]
        shown = {"tools": calculators.tools, "add_generation_prompt": True}
        assert prompt == tokenizer.apply_chat_template(messages, tokenize=False, **shown)
    mine = [tokenizer.decode(completion.tokens[first:end]) for first, end in completion.own]
    assert mine == [f"{text}<|im_end|>" for text in (*calls, "It is 5.")]
