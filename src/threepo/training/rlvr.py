"""Reinforcement learning from verifiable rewards: the loop.

    threepo train RECIPE [section.key=value ...]
    threepo train --resume RUN

A step loads draws of the weights into the engine, which writes completions of the step's problems; these are graded and
get advantages (`begin_rollouts`); then the policy is updated (`learn`). With [overlap], the first part is done some
steps before the second.

Every step is a function of the recipe and of what the last step left (weights and optimizer state), so a run that
was stopped at any moment goes on from its last checkpoint as if nothing had happened.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from threepo.config import SamplingConfig, TrainConfig
from threepo.config.engine import VLLMEngineConfig
from threepo.data.finite import FiniteProblems, problems_digest, warn_of_shared_problems
from threepo.data.source import ProblemSet, ProblemSource, open_heldout, open_training
from threepo.evaluation.examination import Examination, examine, fit_context, with_grader
from threepo.methods import method as lattice
from threepo.methods.arms import Bandit, outcomes
from threepo.posterior.gaussian import Posterior
from threepo.ranks.agreement import batch_facts, code_of
from threepo.ranks.dealing import build_shared_engine, divide_grading, refuse_engine
from threepo.ranks.world import ALONE, World
from threepo.rewards.grading import Grader, attach_verdicts
from threepo.rollout.engines import RolloutEngine
from threepo.run_folder import JOURNAL, PROBLEMS, ROLLOUTS_FILE, RunFolder, refuse_changed
from threepo.training.alarms import watch
from threepo.training.checkpoint import Files, TrainState
from threepo.training.completion_log import CompletionLog
from threepo.training.metrics import (
    Clock,
    Metrics,
    dynamic_metrics,
    flops,
    overlap_metrics,
    rollout_metrics,
    time_metrics,
)
from threepo.training.overlap import Ahead, check_ahead, load_rollouts, save_rollouts
from threepo.training.reference import Reference, open_reference
from threepo.training.rollouts import Rollouts, until_full
from threepo.training.run import TrainingRun, build_or_restore, open_folder, refuse_early
from threepo.training.schedules import next_state, step_sampling
from threepo.training.stream import BegunBatch, Stream, lines_to_repeat, refuse_gap
from threepo.training.update import update_policy
from threepo.training.update_record import UpdateRecord
from threepo.types import Completion, Group, Problem, Verdict
from threepo.user_code import own_names


@dataclass
class RLRun(TrainingRun[TrainConfig]):
    """The parts of a run of reinforcement learning."""

    engine: RolloutEngine
    source: ProblemSource
    grader: Grader
    examination: Examination | None
    reference: Reference | None
    ahead: Ahead | Stream
    bandit: Bandit
    """Chooses the place and size of each draw's noise; without arms, all draws have the noise of [noise]. It owns the
    tally of what they have earned, of which the train state has a copy to save."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.completion_log = CompletionLog(self.folder, self.world)

    def save(self, prune: bool = True) -> None:
        """See `TrainingRun.save`: a resumed run does not make the completions of steps before its checkpoint again."""
        self.completion_log.wait()
        super().save(prune)

    def tell(self, row: Mapping[str, Any]) -> None:
        """See `TrainingRun.tell`: callbacks may read the completions of the row's step."""
        if self.has_callbacks:
            self.completion_log.settle()
        super().tell(row)

    def more_files(self) -> Callable[[Path], None] | None:
        """See `TrainingRun.more_files`: rollouts that were made ahead."""
        waiting = self.ahead.wait()
        return (lambda folder: save_rollouts(waiting, folder / ROLLOUTS_FILE)) if waiting else None

    def more_tensors(self) -> Files:
        """The tensors of the reference, if it changes."""
        return self.reference.saved() if self.reference else {}

    def evaluate(self) -> None:
        """Score the held-out problems if due: before the first step (row -1), every so many steps and at the end."""
        if examination := self.examination:
            every, steps, done = self.config.eval.every, self.config.run.steps, self.state.step

            def measure() -> Metrics:
                self.ahead.wait()  # the engine is needed
                metrics, right = examination.measure(self.engine, self.optimizer, done)
                self.world.on_first(lambda: self.folder.write_evaluation(done, right))
                return metrics

            self.add_evaluation(every, steps, "eval/pass_at_1", measure)


def train(run: RLRun) -> None:
    """Train from `run.state` to the end; raises `Interrupted`, with a checkpoint saved, if asked to stop."""
    config, steps = run.config, run.config.run.steps
    begin: Any = begin_batch if config.overlap.stream else begin_rollouts
    with stopped_in_order(run), run.ending_steps(config.method.name, steps, shown_metrics(config)) as end_step:
        for step in range(run.state.step, steps):
            clock = Clock()
            run.set_rates(step, steps)
            # Not saved if rollouts made ahead have failed: only older weights could make the same again.
            with run.saved_on_failure():
                rollouts = run.ahead.take(step, partial(begin, run), run.state.schedules.ahead)
            clock.lap("time/wait")
            record = learn(run, rollouts, step)
            clock.lap("time/update")
            earnings = run.bandit.count(outcomes(rollouts.generated))
            metrics = earnings | step_metrics(run, rollouts, record)
            run.state = TrainState(
                step=step + 1,
                streaks=watch(config, run.state.streaks, rollouts.completions, record),
                schedules=next_state(config, run.state.schedules, step + 1, metrics),
                drawn=rollouts.drawn,
                tally=run.bandit.tally,
            )
            run.completion_log.begin(step, rollouts.completions, record)
            sample = sample_rollout(run, rollouts, step)
            if sample and config.run.trackers:  # they show rollouts of this step
                run.completion_log.wait()
            clock.lap("time/log")
            end_step(metrics | time_metrics(clock, rollouts), sample)


@contextmanager
def stopped_in_order(run: RLRun) -> Iterator[None]:
    """However the loop ends, finish the log; after an error, let no thread use an engine that is about to be closed."""
    try:
        yield
    except Exception:
        run.ahead.stop()
        raise
    finally:
        run.completion_log.settle()


Write = Callable[[Sequence[Problem]], list[Completion]]
"""Lets the engine write completions of problems, problem by problem."""


def load_draws(run: RLRun, step: int) -> tuple[SamplingConfig, Write, Metrics]:
    """Load the current weights, under the draws that the method names for a step, into the engine.

    Returns how completions are sampled, what writes them, which may run while the policy is updated, and the bytes of
    weights that went to other processes, as a metric.
    """
    config, method, seed = run.config, run.config.method, run.config.run.seed
    now, sampling = run.state.step, step_sampling(config, run.state.schedules)
    draws = lattice.rollout_draws(method, seed, step, run.bandit.choose(seed, step))
    size = run.engine.load(run.optimizer, draws, step)
    pushed: Metrics = {} if size is None else {"compute/pushed_bytes": size}

    def write(problems: Sequence[Problem]) -> list[Completion]:
        prompts = [(p, run.policy.encode_prompt(p, config.data, sampling.max_new_tokens)) for p in problems]
        requests = lattice.requests(prompts, draws, method.rollouts_per_prompt)
        return [replace(c, policy_step=now) for c in run.engine.generate(requests, sampling, seed)]

    return sampling, write, pushed


def begin_rollouts(run: RLRun, step: int) -> Callable[[], Rollouts]:
    """Load the draws of a step; returns what makes its rollouts."""
    config, waiting, clock = run.config, run.ahead.wait(), Clock()
    drawn = waiting[-1].drawn if waiting else run.state.drawn
    sampling, write, pushed = load_draws(run, step)

    def answer(problems: Sequence[Problem]) -> list[Group]:
        completions = write(problems)
        clock.lap("time/rollout")
        completions = attach_verdicts(run.grader, completions)
        clock.lap("time/reward")
        return lattice.credit(config.method, completions)

    def make() -> Rollouts:
        if sampling.dynamic_rounds:
            rollouts = until_full(config, run.source, drawn, answer)
        else:
            rollouts = Rollouts(answer(run.source.batch(step, config.data.prompts_per_step)))
        return replace(rollouts, sampling=sampling, costs={**clock.times, **pushed})

    return make


def begin_batch(run: RLRun, number: int) -> BegunBatch:
    """Load the draws of a batch of the stream, which has those and the problems of the step of that number."""
    method, size, each = run.config.method, run.config.data.prompts_per_step, run.config.method.rollouts_per_prompt
    sampling, write, pushed = load_draws(run, number)

    def generate() -> list[list[Completion]]:
        completions = write(run.source.batch(number, size))
        return [completions[first : first + each] for first in range(0, len(completions), each)]

    def grade(group: Sequence[Completion]) -> list[Verdict]:
        return [completion.verdict for completion in attach_verdicts(run.grader, group) if completion.verdict]

    def finish(group: Sequence[Completion], verdicts: Sequence[Verdict], seconds: Mapping[str, float]) -> Rollouts:
        graded = [replace(c, verdict=verdict) for c, verdict in zip(group, verdicts, strict=True)]
        costs = {**seconds, **{name: total / size for name, total in pushed.items()}}
        return Rollouts(lattice.credit(method, graded), sampling=sampling, costs=costs, number=number)

    return BegunBatch(run.state.step, generate, grade, finish)


def learn(run: RLRun, rollouts: Rollouts, step: int) -> UpdateRecord:
    """Update the policy from the step's rollouts."""
    config = run.config
    if run.reference:
        run.reference.begin(step)
    fresh, mixed, seed = not config.overlap.lag, config.overlap.stream, config.run.seed
    batch = lattice.training_batch(config.method, rollouts.sampling, rollouts.groups, seed, step, fresh, mixed)
    run.check.agree(run.state, partial(batch_facts, batch), run.reference.weights if run.reference else None)
    record = update_policy(
        run.policy, run.optimizer, batch, config.objective, config.batching.tokens, run.world, run.reference
    )
    run.check.note()
    return record


def step_metrics(run: RLRun, rollouts: Rollouts, record: UpdateRecord) -> Metrics:
    """The numbers of a step, except its times and what the arms have earned."""
    config, policy = run.config, run.policy
    weights = sum(p.numel() for p in policy.architecture.parameters())
    return {
        **rollout_metrics(config.method, rollouts.generated),
        **dynamic_metrics(rollouts),
        **overlap_metrics(config.overlap, rollouts, run.state.step),
        **record.metrics(),
        **run.optimizer_metrics(record.finite),
        "compute/flops": flops(config.method, weights, rollouts, policy.has_adapters),
        "sampling/temperature": rollouts.sampling.temperature,
    }


SHOWN = {
    "reward": "reward/mean",
    "held-out": "eval/pass_at_1",
    "update": "update/rms",
    "noise": "posterior/sigma_to_rms",
    "at-mean": "arms/share/mean",
    "kept": "correction/kept_share",
    "tok/s": "time/tokens_per_second",
    "entropy": "policy/entropy",
    "zero-adv": "groups/zero_advantage_share",
}
"""Metrics on the progress bar, by their short names, the most important first."""


def shown_metrics(config: TrainConfig) -> dict[str, str]:
    """The metrics that mean something in this run, of `SHOWN`."""
    # With arms, sigma is only the unit of their sizes; without a correction, everything is kept.
    hidden = {"noise": config.arms.active, "kept": config.method.correction.kind == "none"}
    return {short: name for short, name in SHOWN.items() if not hidden.get(short)}


def sample_rollout(run: RLRun, rollouts: Rollouts, step: int) -> str:
    """The step's first prompt, as the policy reads it, and its first completion, if `run.show_every` asks for them."""
    every = run.config.run.show_every
    if not every or (step + 1) % every:
        return ""
    completion = rollouts.completions[0]
    assert completion.verdict
    prompt = run.policy.tokenizer.decode(completion.prompt_tokens)
    title = f"reward {completion.verdict.reward:g}, {completion.verdict.status}, {len(completion.logprobs)} tokens"
    text = completion.conversation
    return f"--- step {step + 1}: a prompt\n{prompt}\n--- its completion: {title}\n{text}\n---"


def assemble(config: TrainConfig, folder: RunFolder | None = None, world: World = ALONE) -> RLRun:
    """A new run, or the run in `folder` as its newest checkpoint left it; later rows of its log are deleted.

    Every mistake that can be found is refused before a new run has a folder.
    """
    refuse_early(config, folder, world)
    journal = world.on_first(lambda: lines_to_repeat(config.overlap, folder)) if config.overlap.stream else []
    refuse_engine(config.engine, world)
    (training, grader), heldout = open_problems(config, world)
    if not folder:
        note_unused(config, world)
    check_ahead(config, training.verifier)

    policy, optimizer, state = build_or_restore(config, folder, world)
    if config.overlap.stream:
        refuse_gap(journal, state.step)
    bandit = Bandit(config.arms, config.method, lambda: Posterior.of(optimizer, gather=False).noisy_names)
    state = replace(state, tally=bandit.begin(state.tally if state.step else None))
    reference = open_reference(config, policy, folder, world)

    longest = config.sampling.max_new_tokens
    source, longest_prompt = fit_context(training.problems, policy, config.data, longest)
    for problem in source.batch(state.step, config.data.prompts_per_step):  # refuses now, and not in the loop
        longest_prompt = max(longest_prompt, len(policy.encode_prompt(problem, config.data, longest)))
    examination = examine(heldout[0], divide_grading(heldout[1], world), policy, config) if heldout else None
    problems = record_problems(config, folder, source, examination, world)
    waiting = load_rollouts(config, folder, state, source)

    rolling = world.beside() if config.overlap.lag else world
    with ExitStack() as on_failure:
        engine = build_shared_engine(config.engine, policy, rolling, config.environment, config.data)
        on_failure.enter_context(closing(engine))
        engine.prepare(max(config.method.draws, 1), longest_prompt + longest)
        if examination:
            examination.prepare(engine)
        folder = open_folder(config, folder, state.step, world, problems)
        on_failure.pop_all()

    lag, steps, size = config.overlap.lag, config.run.steps, config.data.prompts_per_step
    if config.overlap.stream:  # each rank grades groups of its own
        ahead: Ahead | Stream = Stream(lag, steps, size, folder.path / JOURNAL, world, journal, waiting)
    else:
        grader, ahead = divide_grading(grader, rolling), Ahead(lag, steps, waiting)
    return RLRun(
        config=config,
        folder=folder,
        policy=policy,
        optimizer=optimizer,
        state=state,
        world=world,
        engine=engine,
        source=source,
        grader=grader,
        examination=examination,
        reference=reference,
        ahead=ahead,
        bandit=bandit,
    )


Graded = tuple[ProblemSet, Grader]
"""A set of problems with its grader."""


def open_problems(config: TrainConfig, world: World) -> tuple[Graded, Graded | None]:
    """The problems to train on, and the held-out ones if they are scored while training."""
    data = config.data
    with world.together():
        sets = [open_training(data), *([open_heldout(data)] if config.eval.every else [])]
        training, *heldout = (with_grader(problems, config.reward, data, sets) for problems in sets)
    return training, heldout[0] if heldout else None


def note_unused(config: TrainConfig, world: World) -> None:
    """Say that held-out problems, or replicas of vLLM, are not used, if so."""
    draws = max(config.method.draws, config.eval.draws if config.eval.every else 0, 1)
    if isinstance(config.engine, VLLMEngineConfig) and world.is_alone and config.engine.vllm.replicas > draws:
        what = f"engine.vllm.replicas = {config.engine.vllm.replicas}: only {draws} of them have a draw to serve"
        print(f"threepo: {what}; lower it, or start as many ranks (docs/scaling.md)", file=sys.stderr)
    if config.data.eval and not config.eval.every:
        what = f"data.eval = {config.data.eval!r} is not used in training, as eval.every = 0"
        fix = f"set eval.every to score the run as it trains, or score it afterwards: threepo eval {config.run.folder}"
        print(f"threepo: {what}; {fix}", file=sys.stderr)


def record_problems(
    config: TrainConfig,
    resumed: RunFolder | None,
    source: ProblemSource,
    examination: Examination | None,
    world: World,
) -> dict[str, Any]:
    """The contents of problems.json, by part of the data; `UserError` if ranks, or the run so far, have others."""
    # Endless problems are functions of the recipe, so one example shows whether the code that makes them has changed.
    parts = {"train": (config.data.train, source.known())}
    if examination:
        parts["eval"] = (config.data.eval or config.data.train, examination.problems)
        if isinstance(source, FiniteProblems):
            played = bool(config.environment.factory)
            warn_of_shared_problems("data.eval", source.problems, examination.problems, played)
    record: dict[str, Any] = {}
    for part, (name, problems) in parts.items():
        digest = problems_digest(problems, [problem.prompt for problem in problems])
        record[part] = {"source": name, "problems": len(problems), "digest": digest}
    known = {f"the problems of data.{part}": entry for part, entry in record.items()}
    code = code_of(name for name, _ in own_names(config))
    world.agree(known | code, "give all ranks the same data and code")
    if resumed:
        refuse_changed(resumed.path, PROBLEMS, record)
    return record
