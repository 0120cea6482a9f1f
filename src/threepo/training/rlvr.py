"""Reinforcement learning from verifiable rewards: the loop.

    threepo train RECIPE [section.key=value ...]
    threepo train --resume RUN

Every step is a function of the recipe and of what the last step left (weights and optimizer state), so a run that
was stopped at any moment goes on from its last checkpoint as if nothing had happened.
"""

import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from threepo.config import IVONConfig, TrainConfig
from threepo.data.finite import FiniteProblems, content, warn_of_shared
from threepo.data.source import ProblemSource, open_training
from threepo.errors import ThreepoWarning, UserError
from threepo.evaluation.examination import Examination, examine, fit_context
from threepo.evaluation.problems import heldout_set, with_grader
from threepo.interrupt import polite_stop
from threepo.methods import method as lattice
from threepo.models.policy import Policy
from threepo.posterior.ivon import IVON
from threepo.posterior.policy_optimizer import PolicyOptimizer
from threepo.posterior.statistics import posterior_metrics
from threepo.progress import progress
from threepo.rewards.grading import Grader, graded
from threepo.rollout.engine import RolloutEngine
from threepo.rollout.engines import build_engine
from threepo.run_folder import RunFolder, completion_row, refuse_in_use, refuse_taken
from threepo.training.build import build_or_restore
from threepo.training.checkpoint import TrainState, checkpoint
from threepo.training.clock import Clock, due
from threepo.training.ess import next_ess
from threepo.training.metrics import Metrics, corrects_nothing, rollout_metrics, update_metrics
from threepo.training.problem_record import problem_record, refuse_changed
from threepo.training.schedule import factor
from threepo.training.trackers import TensorBoard
from threepo.training.update import UpdateRecord, update_policy
from threepo.types import Group


@dataclass
class Run:
    """The parts of a training run; `state` is the only one that changes."""

    config: TrainConfig
    folder: RunFolder
    policy: Policy
    optimizer: PolicyOptimizer
    engine: RolloutEngine
    source: ProblemSource
    grader: Grader
    examination: Examination | None
    tensorboard: TensorBoard | None
    state: TrainState = field(default_factory=TrainState)


SHOWN = {"reward": "reward/mean", "entropy": "policy/entropy", "zero-adv": "groups/zero_advantage_share"}
"""Metrics on the progress bar, by their short names there."""


def train(run: Run) -> None:
    """Train from `run.state` to the end; raises `Interrupted`, with a checkpoint saved, if asked to stop."""
    steps = run.config.run.steps
    if run.state.step == 0 and run.examination:
        run.folder.log({"step": -1, **evaluate(run, 0)})
    with polite_stop() as stop, progress(run.config.method.name, steps, run.state.step, run.folder.path) as reporter:
        for step in range(run.state.step, steps):
            clock = Clock()
            set_rates(run, step)
            try:
                groups = rollout(run, step, clock)
            except UserError:  # a reward function, or a problem: what was learnt until here is not lost with it
                save(run)
                raise
            record = learn(run, groups, step, clock)
            metrics = rollout_metrics(run.config.method, groups) | update_metrics(record) | optimizer_metrics(run)
            run.state = advance(run, step, record, metrics)
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
            run.folder.log({"step": step, **metrics})
            if run.tensorboard:
                run.tensorboard.log(step, metrics)
            stopping = stop.signal_number > 0  # once: a signal after this is for the next step, which saves
            if stopping or due(step + 1, run.config.run.checkpoint_every, steps):
                save(run)
            reporter.update(step + 1, {short: metrics[name] for short, name in SHOWN.items() if name in metrics})
            if stopping:
                stop.obey(step + 1, steps, run.folder.path)


def set_rates(run: Run, step: int) -> None:
    """Learning rate and effective sample size of a step; the rollouts' noise goes by the latter too."""
    config = run.config
    for group in run.optimizer.param_groups:
        group["lr"] = config.optimizer.lr * factor(step, config.run.steps, config.schedule)
        if isinstance(config.optimizer, IVONConfig):
            group["ess"] = config.optimizer.ess * run.state.ess.factor


def save(run: Run) -> None:
    """A checkpoint of the run's state; nothing before the first step, which there would be nothing to keep of."""
    if run.state.step:
        checkpoint(run.folder, run.policy, run.optimizer, run.state, run.config.run.keep_checkpoints)


def rollout(run: Run, step: int, clock: Clock) -> list[Group]:
    """Generate and grade the step's completions, under the draws that the method asks for."""
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
    """Scores of the present weights on the held-out problems."""
    assert run.examination is not None
    return run.examination.metrics(run.engine, run.optimizer, step)


def optimizer_metrics(run: Run) -> Metrics:
    """What the optimizer and its posterior have to say."""
    metrics = run.optimizer.step_metrics() | {"optimizer/lr": run.optimizer.param_groups[0]["lr"]}
    return metrics | posterior_metrics(run.optimizer) if isinstance(run.optimizer, IVON) else metrics


def advance(run: Run, step: int, record: UpdateRecord, metrics: Metrics) -> TrainState:
    """The state after a step; warns when the correction has not acted for long (it may be wired to nothing)."""
    quiet, correction = run.state.quiet_steps, record.correction
    if record.rows:
        quiet = quiet + 1 if corrects_nothing(record) else 0
    if correction and quiet and quiet == correction.warn_after:
        warnings.warn(
            f"the {correction.kind} correction has masked or truncated nothing for {quiet} steps: the draws may be "
            f"too close together to matter (lower optimizer.ess), or the log-probs of the rollouts are wrong",
            ThreepoWarning,
            stacklevel=2,
        )
    base = run.config.optimizer.ess if isinstance(run.config.optimizer, IVONConfig) else 1.0
    return TrainState(
        step=step + 1,
        optimizer_steps=run.optimizer.param_groups[0].get("step", 0),
        skipped_steps=run.optimizer.skipped_steps,
        quiet_steps=quiet,
        ess=next_ess(run.config.ess_schedule, base, run.state.ess, step + 1, run.config.run.steps, metrics),
    )


def completion_rows(step: int, groups: list[Group], record: UpdateRecord) -> list[dict[str, Any]]:
    """Every completion of the step with what the update saw of it; the update knows nothing of dropped rows."""
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
    """A new run; or that in `folder`, as its newest checkpoint left it. Later rows are forgotten.

    All that can be refused is refused before a new run has a folder.
    """
    if not folder:
        refuse_in_use(Path(config.run.folder))
        refuse_taken(Path(config.run.folder), config)  # before minutes go into loading a model
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    data, longest = config.data, config.sampling.max_new_tokens
    training, grader = with_grader(open_training(data), config.reward, data)
    heldout = with_grader(heldout_set(data), config.reward, data) if config.eval.every else None
    if config.run.tensorboard:
        TensorBoard.require()
    policy, optimizer, state = build_or_restore(
        config.model, config.optimizer, config.run.seed, folder.path if folder else None
    )
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
        refuse_changed(folder.path, problems)
    engine = build_engine(config.engine, policy)
    engine.prepare(max(config.method.draws, 1), max(longest_prompt, *map(len, first)) + longest)
    if examination:
        examination.prepare(engine)
    if folder:
        folder.forget_after(state.step or -1)
    else:
        folder = RunFolder.create(Path(config.run.folder), config, problems)
    tensorboard = TensorBoard(folder.path / "tensorboard", state.step) if config.run.tensorboard else None
    return Run(config, folder, policy, optimizer, engine, source, grader, examination, tensorboard, state)
