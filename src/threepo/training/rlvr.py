"""Reinforcement learning from verifiable rewards: the loop.

    threepo train RECIPE [section.key=value ...]
    threepo train --resume RUN

Every step is a function of the recipe and of what the last step left (weights and optimizer state), so a run that
was stopped at any moment goes on from its last checkpoint as if nothing had happened.
"""

from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from threepo.config import DataConfig, IVONConfig, TrainConfig
from threepo.data.finite import FiniteProblems, content, problems_digest, warn_of_shared
from threepo.data.source import ProblemSource, open_heldout, open_training
from threepo.errors import UserError
from threepo.evaluation.examination import Examination, examine, fit_context, with_grader
from threepo.methods import method as lattice
from threepo.posterior.ivon import IVON
from threepo.posterior.statistics import posterior_metrics
from threepo.rewards.grading import Grader, graded
from threepo.rollout.engines import RolloutEngine, build_engine
from threepo.run_folder import PROBLEMS, RunFolder, completion_row, refuse_changed
from threepo.training.alarms import watch
from threepo.training.checkpoint import TrainState
from threepo.training.ess import next_ess, refuse_unmeasured
from threepo.training.metrics import Clock, Metrics, rollout_metrics, update_metrics
from threepo.training.run import TrainingRun, build_or_restore, open_folder, refuse_early
from threepo.training.schedule import due
from threepo.training.update import UpdateRecord, update_policy
from threepo.types import Group


@dataclass
class Run(TrainingRun[TrainConfig]):
    """The parts of a run of reinforcement learning."""

    engine: RolloutEngine
    source: ProblemSource
    grader: Grader
    examination: Examination | None


SHOWN = {"reward": "reward/mean", "entropy": "policy/entropy", "zero-adv": "groups/zero_advantage_share"}
"""Metrics on the progress bar, by their short names there."""


def train(run: Run) -> None:
    """Train from `run.state` to the end; raises `Interrupted`, with a checkpoint saved, if asked to stop."""
    steps = run.config.run.steps
    if run.state.step == 0 and run.examination:
        run.folder.log({"step": -1, **evaluate(run, 0)})
    with run.ending_steps(run.config.method.name, steps, SHOWN) as end_step:
        for step in range(run.state.step, steps):
            clock = Clock()
            set_rates(run, step)
            try:
                groups = rollout(run, step, clock)
            except UserError:  # from a reward function or a problem: keep what was learnt until here
                run.save()
                raise
            record = learn(run, groups, step, clock)
            metrics = rollout_metrics(run.config.method, groups) | update_metrics(record) | optimizer_metrics(run)
            run.state = advance(run, step, groups, record, metrics)
            if run.examination and due(step + 1, run.config.eval.every, steps):
                metrics |= evaluate(run, step + 1)
                clock.lap("time/eval")
            run.folder.write_completions(step, completion_rows(step, groups, record))
            clock.lap("time/log")
            tokens = sum(len(c.tokens) for group in groups for c in group.completions)
            metrics |= clock.times | {
                "time/step": sum(clock.times[name] for name in ("time/rollout", "time/reward", "time/update")),
                "time/tokens_per_second": tokens / clock.times["time/rollout"],
            }
            end_step(metrics)


def set_rates(run: Run, step: int) -> None:
    """Set the learning rate and effective sample size of a step; the noise of its rollouts follows from the latter."""
    run.set_learning_rate(step, run.config.run.steps)
    if isinstance(run.config.optimizer, IVONConfig):
        for group in run.optimizer.param_groups:
            group["ess"] = run.config.optimizer.ess * run.state.ess.factor


def rollout(run: Run, step: int, clock: Clock) -> list[Group]:
    """Generate and grade the step's completions, under the draws that the method names."""
    config, method, seed = run.config, run.config.method, run.config.run.seed
    sampling = replace(config.sampling, temperature=0.0) if method.greedy else config.sampling
    problems = run.source.batch(step, config.data.prompts_per_step)
    prompts = [(p, run.policy.encode_prompt(p, config.data, sampling.max_new_tokens)) for p in problems]
    draws = lattice.rollout_draws(method, seed, step)
    run.engine.load(run.optimizer, draws, step)
    completions = run.engine.generate(lattice.requests(method, prompts, draws), sampling, seed)
    clock.lap("time/rollout")
    completions = graded(run.grader, completions)
    clock.lap("time/reward")
    return lattice.group_by_prompt(completions)


def learn(run: Run, groups: list[Group], step: int, clock: Clock) -> UpdateRecord:
    """Update the policy from the step's groups."""
    config = run.config
    batch = lattice.training_batch(config.method, config.sampling, groups, config.run.seed, step)
    record = update_policy(run.policy, run.optimizer, batch, config.objective, config.batching.tokens)
    clock.lap("time/update")
    return record


def evaluate(run: Run, step: int) -> Metrics:
    """Scores of the current weights on the held-out problems."""
    assert run.examination is not None
    return run.examination.metrics(run.engine, run.optimizer, step)


def optimizer_metrics(run: Run) -> Metrics:
    """Metrics of the optimizer and its posterior."""
    metrics = run.optimizer.step_metrics() | {"optimizer/lr": run.optimizer.param_groups[0]["lr"]}
    return metrics | posterior_metrics(run.optimizer) if isinstance(run.optimizer, IVON) else metrics


def advance(run: Run, step: int, groups: list[Group], record: UpdateRecord, metrics: Metrics) -> TrainState:
    """The state after a step; warns of what has gone wrong for several steps."""
    config = run.config
    base = config.optimizer.ess if isinstance(config.optimizer, IVONConfig) else 1.0
    return TrainState(
        step=step + 1,
        optimizer_steps=run.optimizer.param_groups[0].get("step", 0),
        skipped_steps=run.optimizer.skipped_steps,
        streaks=watch(config, run.state.streaks, step, groups, record),
        ess=next_ess(config.ess_schedule, base, run.state.ess, step + 1, config.run.steps, metrics),
    )


def completion_rows(step: int, groups: list[Group], record: UpdateRecord) -> list[dict[str, Any]]:
    """Every completion of the step with what the update saw of it: nothing where `zero_variance` dropped its group."""
    seen = {row.index: row for row in record.rows}
    rows = []
    for index, completion in enumerate(c for group in groups for c in group.completions):
        row = seen.get(index)
        rows.append(
            completion_row(step, completion)
            | {
                "gradient_logprob_sum": row.logprob_sum if row else None,
                "rho": row.rho if row and record.correction else None,
                "correction_weight": row.weight if row else None,
            }
        )
    return rows


def assemble(config: TrainConfig, folder: RunFolder | None = None) -> Run:
    """A new run; or that in `folder`, as its newest checkpoint left it. Later rows are deleted.

    All that can be refused is refused before a new run has a folder.
    """
    refuse_early(config, folder)
    refuse_unmeasured(config)
    data, longest = config.data, config.sampling.max_new_tokens
    training, grader = with_grader(open_training(data), config.reward, data)
    heldout = with_grader(open_heldout(data), config.reward, data) if config.eval.every else None
    policy, optimizer, state = build_or_restore(config, folder)
    source, longest_prompt = fit_context(training.problems, policy, data, longest)
    # Refuse now, not in the loop.
    first = [policy.encode_prompt(p, data, longest) for p in source.batch(state.step, data.prompts_per_step)]
    examination = None
    if heldout:
        examination = examine(*heldout, policy, config)
        if isinstance(source, FiniteProblems):
            warn_of_shared("data.eval", map(content, source.problems), list(map(content, examination.problems)))
    problems = problem_record(data, source, examination)
    if folder:
        refuse_changed(folder.path, PROBLEMS, problems)
    with ExitStack() as on_failure:
        engine = on_failure.enter_context(closing(build_engine(config.engine, policy)))
        engine.prepare(max(config.method.draws, 1), max(longest_prompt, *map(len, first)) + longest)
        if examination:
            examination.prepare(engine)
        folder, tensorboard = open_folder(config, folder, state.step, problems)
        on_failure.pop_all()
    return Run(config, folder, tensorboard, policy, optimizer, state, engine, source, grader, examination)


def problem_record(
    data: DataConfig, training: ProblemSource, examination: Examination | None
) -> dict[str, dict[str, Any]]:
    """Source, number and digest of the problems to train on, and of those to evaluate on, for problems.json.

    Endless problems are functions of the recipe, so one example shows whether the code that generates them has changed.
    """
    parts = {"train": (data.train, training.known())}
    if examination:
        parts["eval"] = (data.eval or data.train, examination.problems)
    return {
        part: {
            "source": source,
            "problems": len(problems),
            "digest": problems_digest(problems, [problem.prompt for problem in problems]),
        }
        for part, (source, problems) in parts.items()
    }
