"""A stream learns from groups as they finish, and a journal repeats it bit for bit."""

import json
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_overlap import C3PO, completions

from runs import forked, outcome, train_config
from threepo import api
from threepo.cli import main
from threepo.config import TrainConfig
from threepo.config.recipes import load_resumed
from threepo.data.finite import epoch_batch
from threepo.errors import UserError
from threepo.ranks.world import ALONE, World
from threepo.run_folder import RunFolder, read_metrics
from threepo.training.rollouts import Rollouts
from threepo.training.stream import BegunBatch, Line, Stream, read_journal
from threepo.types import Completion, Group, Problem, Verdict

pytestmark = pytest.mark.filterwarnings("ignore::threepo.errors.ThreepoWarning")
"""What a policy has learned depends on what arrived when, and so does whether an alarm warns of it."""
SLOW = """
import random, time
def reward(completions, **_):
    time.sleep(random.lognormvariate(-4.5, 1.5))
    return [float(bool(c) and c[0] < 'P') for c in completions]
"""
"""Takes 10 milliseconds in half of all cases, and sometimes half a second; by the system's random numbers."""
LATE = """
import itertools, threading
from slow import reward as by_chance
calls, six_others = itertools.count(), threading.Semaphore(0)
def reward(completions, **_):
    late = next(calls) == 0
    assert not late or all(six_others.acquire(timeout=60) for _ in range(6))
    rewards = by_chance(completions)
    six_others.release()
    return rewards
"""
"""The first group is late: it begins when six others are over, so its batch is learned from with groups of the next."""


@pytest.fixture
def slow(tmp_path: Path, learnable: list[str]) -> list[str]:
    """Settings of a run whose groups arrive by chance."""
    Path("slow.py").write_text(SLOW)
    stream = ["overlap.stream=true", "overlap.lag=2", "run.steps=8", "run.checkpoint_every=5"]
    return [*learnable, *C3PO, "reward.function=slow:reward", *stream]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def first(kept: Path, slow: list[str]) -> Path:
    """Such a run, which is made once."""
    return kept if kept.exists() else api.train(train_config(kept, *slow))


def test_groups_are_learned_from_as_they_finish(tmp_path: Path, slow: list[str]) -> None:
    run = tmp_path / "run"
    Path("late.py").write_text(LATE)
    api.train(train_config(run, *slow, "reward.function=late:reward"))
    journal = read_journal(run / "journal.jsonl")
    assert [line.step for line in journal] == list(range(8))
    written_at = {number: line.step for line in journal for number in line.begun}
    assert sorted(written_at) == list(range(len(written_at)))
    used = [name for line in journal for name in (*line.taken, *line.dropped)]
    assert len(set(used)) == len(used)
    mixed = 0
    for line, metrics in zip(journal, (row for row in read_metrics(run) if row["step"] >= 0), strict=True):
        assert len({problem for _, problem in line.taken}) == len(line.taken) == 4
        assert all(line.step - written_at[number] <= 2 for number, _ in line.taken)
        assert all(line.step - written_at[number] > 2 for number, _ in line.dropped)
        mixed += len({number for number, _ in line.taken}) > 1
        rows = completions(run, line.step)
        assert [(row["policy_step"], row["problem_id"]) for row in rows[::8]] == [
            (written_at[number], problem) for number, problem in (*sorted(line.taken), *line.dropped)
        ]
        assert {row["draw_step"] for row in rows} == {number for number, _ in (*line.taken, *line.dropped)}
        assert metrics["overlap/dropped"] == len(line.dropped)
    assert mixed, "no step has mixed batches"


@pytest.mark.parametrize("preset", ["c3po", "m3po", "auto"])
def test_a_run_is_repeated_by_its_journal(preset: str, tmp_path: Path, slow: list[str]) -> None:
    """Whatever takes how long then."""
    settings = [setting for setting in slow if not setting.startswith(("method.", "optimizer."))]
    rates = ["optimizer.lr=1e-2"] if preset == "auto" else ["optimizer.lr=1e3", "optimizer.ess=1e6"]
    settings += [f"method.preset={preset}", "method.correction.kind=seq_mis", "eval.every=4", *rates]
    api.train(train_config(tmp_path / "first", *settings))
    journal = tmp_path / "first" / "journal.jsonl"
    api.train(train_config(tmp_path / "second", *settings, f"overlap.journal={journal}"))
    assert outcome(tmp_path / "second") == outcome(tmp_path / "first")
    assert (tmp_path / "second" / "journal.jsonl").read_text() == journal.read_text()


def test_a_run_that_is_killed_again_and_again_is_repeated_by_its_journal(tmp_path: Path, slow: list[str]) -> None:
    """SIGKILL at any moment: of a step, of a write, of rollouts and rewards."""
    steps, killed, wait = 25, tmp_path / "killed", random.Random(20261127)
    settings = [*slow, f"run.steps={steps}"]
    RunFolder.create(killed, train_config(killed, *settings)).close()
    for _ in range(3):
        process, before = forked("train", "--resume", str(killed)), len(read_metrics(killed))
        deadline = time.monotonic() + 120
        while len(read_metrics(killed)) <= before and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(wait.uniform(0, 0.3))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert len(read_metrics(killed)) < steps, "the last kill came after the end: make the run longer"
    assert main(["train", "--resume", str(killed)]) == 0
    journal = killed / "journal.jsonl"
    assert [line.step for line in read_journal(journal)] == list(range(steps))
    api.train(train_config(tmp_path / "again", *settings, f"overlap.journal={journal}"))
    assert outcome(tmp_path / "again") == outcome(killed)


def test_a_journal_cut_in_the_middle_is_repeated_as_far_as_it_goes(
    tmp_path: Path, slow: list[str], first: Path
) -> None:
    lines = (first / "journal.jsonl").read_text().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(lines[:5]) + lines[5][:9])
    second = api.train(train_config(tmp_path / "second", *slow, f"overlap.journal={cut}"))
    assert outcome(first)["metrics"][:5] == outcome(second)["metrics"][:5]
    again = read_journal(second / "journal.jsonl")
    assert again[:5] == read_journal(first / "journal.jsonl")[:5]
    assert [line.step for line in again] == list(range(8))


def test_a_run_is_not_resumed_without_its_journal(tmp_path: Path, first: Path) -> None:
    """It would learn from the groups of the lost lines again."""
    run = tmp_path / "run"
    shutil.copytree(first, run)
    lines = (run / "journal.jsonl").read_text().splitlines(keepends=True)

    def longer() -> TrainConfig:
        return load_resumed(TrainConfig, run, {"run": {"steps": 10}})

    for kept, missing in ((lines[:3], 3), (lines[:2] + lines[3:], 2), ([], 0)):
        (run / "journal.jsonl").write_text("".join(kept))
        with pytest.raises(UserError, match=f"journal.jsonl: has no line of step {missing}, which the run has taken"):
            api.train(longer(), run)
    (run / "journal.jsonl").write_text("".join(lines))
    api.train(longer(), run)
    assert [line.step for line in read_journal(run / "journal.jsonl")] == list(range(10))


def test_a_run_that_ends_before_its_journal_can_be_extended(tmp_path: Path, slow: list[str], first: Path) -> None:
    short = ["run.steps=5", f"overlap.journal={first / 'journal.jsonl'}"]
    api.train(train_config(tmp_path / "second", *slow, *short))
    assert main(["train", "--resume", str(tmp_path / "second"), "run.steps=8"]) == 0
    assert outcome(tmp_path / "second")["metrics"] == outcome(first)["metrics"]


def test_a_damaged_journal_is_refused_before_there_is_a_folder(tmp_path: Path, slow: list[str]) -> None:
    (tmp_path / "other.jsonl").write_text("not json\n{}\n")
    with pytest.raises(UserError, match="other.jsonl"):
        api.train(train_config(tmp_path / "run", *slow, f"overlap.journal={tmp_path / 'other.jsonl'}"))
    assert not (tmp_path / "run").exists()


def test_held_groups_are_of_the_current_weights(tmp_path: Path, slow: list[str]) -> None:
    """Where the divergence is always too large, a batch is begun when the last one is used up."""
    fast = "reward.function=first_character:reward"  # no group is late
    api.train(train_config(tmp_path / "run", *slow, fast, "overlap.most_kl=1e-9"))
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"] >= 0]
    assert [row["overlap/age"] for row in rows[2:]] == [0] * 6


FAILING = """
def reward(completions, **_):
    calls.append(1)
    assert len(calls) < 15, "the judge is down"
    return [0.0] * 8
calls = []
"""


def test_what_cannot_work_is_said(tmp_path: Path, slow: list[str]) -> None:
    Path("failing_judge.py").write_text(FAILING)
    with pytest.raises(UserError, match="the judge is down"):
        api.train(
            train_config(tmp_path / "failed", *slow, "reward.function=failing_judge:reward", "run.checkpoint_every=1")
        )
    with pytest.raises(UserError, match="overlap.journal = 'nowhere': there is no such file"):
        api.train(train_config(tmp_path / "a", *slow, "overlap.journal=nowhere"))
    Path("other.jsonl").write_text(json.dumps(asdict(Line(0, [0], [(3, "sorting/0")]))) + "\n")
    with pytest.raises(UserError, match="step 0 learned from 1 groups that this run does not have, such as batch 3"):
        api.train(train_config(tmp_path / "b", *slow, "overlap.journal=other.jsonl"))
    for more, words in (
        (["overlap.lag=0"], "nothing overlaps"),
        (["overlap.stream=false", "overlap.journal=x"], "only a stream has a journal"),
        (["sampling.dynamic_rounds=2"], "needs whole batches"),
        (["method.log_evolution=true"], "method.log_evolution = true: compares the draws of a whole batch"),
        (["method.draws=1"], "the one fresh draw of a step belongs to a batch"),
    ):
        with pytest.raises(UserError, match=words):
            train_config(tmp_path / "c", *slow, *more)


def test_an_engine_does_not_wait_for_rewards(tmp_path: Path) -> None:
    """The groups of a batch are graded at the same time, and the first batch's only when the second is written."""
    together, second = threading.Barrier(4), threading.Event()
    batches = Clockless(100, 4, 0)

    def begin(number: int) -> Any:
        begun: Any = batches.begin(number)
        if number == 1:
            begun.generate = lambda made=begun.generate: (second.set(), made())[1]
        if number == 0:
            begun.grade = lambda _: [second.wait(60) or pytest.fail("the engine waits"), together.wait(60)][:0]
        return begun

    stream = Stream(1, 2, 4, tmp_path / "journal.jsonl", ALONE)
    assert len(stream.take(0, begin, 1).groups) == 4
    batches.step = 1
    assert len(stream.take(1, begin, 1).groups) == 4


def test_episodes_stream(tmp_path: Path, slow: list[str]) -> None:
    """An episode's reward comes from its environment; the journal repeats it."""
    episodes = ["reward.function=environment", "environment.factory=worlds:Ends", "sampling.max_new_tokens=4"]
    settings = [*slow, *episodes, "run.steps=4", "data.prompts_per_step=2"]
    api.train(train_config(tmp_path / "first", *settings))
    journal = f"overlap.journal={tmp_path / 'first' / 'journal.jsonl'}"
    api.train(train_config(tmp_path / "second", *settings, journal))
    assert outcome(tmp_path / "second") == outcome(tmp_path / "first")


class Clockless:
    """Batches whose groups are there at once, except some; problems come again after `problems` others."""

    def __init__(self, problems: int, size: int, seed: int) -> None:
        self.problems, self.size, self.random, self.seed = problems, size, random.Random(seed), seed
        self.step = 0

    def begin(self, number: int) -> BegunBatch:
        step, ids = self.step, epoch_batch(self.problems, self.size, self.seed, number)

        def grade(group: Sequence[Completion]) -> list[Verdict]:
            time.sleep(self.random.choice([0.0, 0.0, 0.0, 0.0, 0.02]))
            return []

        def finish(group: Sequence[Completion], verdicts: Sequence[Verdict], seconds: Mapping[str, float]) -> Rollouts:
            return Rollouts([Group(tuple(group), (0.0,))], number=number)

        return BegunBatch(step, lambda: [[completion(f"p{i}", step)] for i in ids], grade, finish)


def completion(problem: str, step: int) -> Completion:
    return Completion(Problem(problem, ""), (1,), None, 0, (1,), (0.0,), "", "stop", step)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(0, 3), st.integers(1, 3), st.integers(1, 8), st.integers(0, 10**6), st.booleans())
def test_a_step_always_gets_its_groups(size: int, more: int, lag: int, steps: int, seed: int, held: bool) -> None:
    """However few problems there are; each group once, none too old, and no problem twice in a step."""
    with tempfile.TemporaryDirectory() as folder:
        path, batches = Path(folder) / "journal.jsonl", Clockless(size + more, size, seed)
        stream = Stream(lag, steps, size, path, ALONE)
        for batches.step in range(steps):
            found = stream.take(batches.step, batches.begin, 0 if held and batches.step % 3 else lag)
            assert len(found.groups) == size
            problems = [group.problem.id for group in found.generated]
            assert len(set(problems)) == len(problems)
            assert all(batches.step - group.completions[0].policy_step <= lag for group in found.groups)
            assert all(batches.step - group.completions[0].policy_step > lag for group in found.discarded)
        assert stream.wait() == []
        lines = read_journal(path)
        names = [name for line in lines for name in (*line.taken, *line.dropped)]
        assert len(set(names)) == len(names)
        again, copy = Clockless(size + more, size, seed), Path(folder) / "again.jsonl"
        stream = Stream(lag, steps, size, copy, ALONE, lines)
        for again.step, line in enumerate(lines):
            found = stream.take(again.step, again.begin, lag)
            assert [group.problem.id for group in found.groups] == [problem for _, problem in sorted(line.taken)]
        assert copy.read_text() == path.read_text()


def test_a_step_that_failed_begins_its_batches_again(tmp_path: Path) -> None:
    """A checkpoint that is saved then has none of them; nothing is learned from twice."""
    batches, path = Clockless(100, 4, 0), tmp_path / "journal.jsonl"
    stream = Stream(2, 9, 4, path, ALONE)
    stream.take(0, batches.begin, 2)
    stream.wait()  # an engine that still generates would begin nothing
    batches.step, begun = 1, []

    def begin(number: int) -> Any:
        begun.append(number)
        raise UserError("the server is down")

    with pytest.raises(UserError, match="down"):
        stream.take(1, begin, 2)
    waiting = stream.wait()
    assert all(rollouts.number < begun[0] for rollouts in waiting)
    with open(path, "a") as file:
        file.write('{"step": 1, "beg')
    stream = Stream(2, 9, 4, path, ALONE, read_journal(path), waiting)
    for batches.step in range(1, 9):
        stream.take(batches.step, batches.begin, 2)
    names = [name for line in read_journal(path) for name in (*line.taken, *line.dropped)]
    assert len(set(names)) == len(names) >= 36
    assert [line.step for line in read_journal(path)] == list(range(9))


def test_a_reward_that_the_credit_rule_is_not_defined_for_ends_the_run(tmp_path: Path) -> None:
    batches, path = Clockless(100, 4, 0), tmp_path / "journal.jsonl"
    stream, begun = Stream(2, 9, 4, path, ALONE), list[int]()

    def begin(number: int) -> Any:
        batch = batches.begin(number)

        def finish(*graded: Any) -> Rollouts:
            if not begun:
                begun.append(number)
                raise UserError("a reward below 0")
            return batch.finish(*graded)

        return replace(batch, finish=finish)

    for wait in (lambda: stream.take(0, begin, 2), stream.wait):  # the second, as the state is saved after an error
        with pytest.raises(UserError, match="below 0"):
            wait()


def test_an_engine_that_fails_between_two_looks_ends_the_run(tmp_path: Path) -> None:
    """On several ranks the others are asked in between, which takes milliseconds."""
    begun, failed = list[int](), threading.Event()

    class Slow(World):
        @contextmanager
        def together(self) -> Iterator[None]:
            with super().together():
                yield
            if begun:
                failed.set()
                time.sleep(0.1)

    def generate() -> Any:
        failed.wait()
        raise UserError("the engine is down")

    def begin(number: int) -> Any:
        begun.append(number)
        return replace(Clockless(100, 4, 0).begin(number), generate=generate)

    stream = Stream(2, 9, 4, tmp_path / "journal.jsonl", Slow())
    for wait in (lambda: stream.take(0, begin, 2), stream.wait):
        with pytest.raises(UserError, match="down"):
            wait()
    assert begun == [0]


def test_a_repeated_step_that_failed_saves_no_batch_that_it_will_begin_again(tmp_path: Path) -> None:
    batches, path = Clockless(100, 4, 0), tmp_path / "journal.jsonl"
    names = [(number, f"p{i}") for number in range(2) for i in epoch_batch(100, 4, 0, number)]
    lines = [Line(0, [0], names[:4]), Line(1, [1, 2], names[4:])]
    stream = Stream(3, 9, 4, path, ALONE, lines)
    stream.take(0, batches.begin, 3)

    def begin(number: int) -> Any:
        if number == 2:
            raise UserError("the server is down")
        return batches.begin(number)

    batches.step = 1
    with pytest.raises(UserError, match="down"):
        stream.take(1, begin, 3)
    assert not stream.wait(), "a resumed run begins batch 1 anew"
