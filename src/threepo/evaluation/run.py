"""`threepo eval` as a function: a model on benchmarks or held-out problems, recorded in a folder."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from threepo.config import EvaluationConfig
from threepo.data.finite import problems_digest
from threepo.data.rows import digest
from threepo.data.source import ProblemSet, open_heldout
from threepo.evaluation.benchmarks import choices, open_benchmark
from threepo.evaluation.examination import Examination, examine, with_grader
from threepo.evaluation.randopt import Search, search_for
from threepo.evaluation.records import PARTS, EvaluationFolder, Portion, begin, joined, refuse_taken, what_matters
from threepo.evaluation.scores import average_scores, score
from threepo.files import finite, read_json, write_json
from threepo.models.policy import Policy
from threepo.posterior.gaussian import FixedWeights, Posterior, posterior_of
from threepo.posterior.shards import is_spread, whole
from threepo.progress import obey, polite_stop, progress
from threepo.ranks.agreement import agree_on_setup
from threepo.ranks.dealing import build_ranked, dealt_grader, refuse_engine
from threepo.ranks.group import ALONE, Ranks
from threepo.ranks.sharding import load_sharded
from threepo.rewards.grading import Grader, load_grader
from threepo.rollout.engines import RolloutEngine
from threepo.run_folder import SUMMARY, completion_row, model_folder, write_parquet

_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Keys of a model's configuration that change where it is saved or loaded, but not what it computes."""


def evaluate(config: EvaluationConfig, folder: Path, step: int = 0, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Score a model on benchmarks or held-out problems, at the mean or over draws of its posterior.

    Everything is kept in `folder` (evaluation.records): an unfinished evaluation there is continued, a finished one is
    only read. Returns what summary.json holds. `step` is part of the random address of every completion: an evaluation
    while training has that of its step.
    """
    agree_on_setup(config, ranks)
    settings = {**what_matters(config), "step": step}
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    refuse_engine(config.engine, ranks)
    with contextlib.ExitStack() as opened:
        with ranks.together():
            if ranks.first:
                refuse_taken(folder, settings, {})  # before minutes go into loading a model
                opened.enter_context(EvaluationFolder(folder))
        with ranks.together():
            if config.benchmarks.names:
                sets = _benchmarks(config)
            else:
                sets = [with_grader(open_heldout(config.data), config.reward, config.data)]
        if config.benchmarks.names:  # they have templates, and are evaluated whole
            most = max(len(source.problems.known()) for source, _ in sets)
            data, evaluation = replace(config.data, prompt_template=""), replace(config.eval, problems=most)
            config = replace(config, data=data, eval=evaluation)
        model = replace(config.model, path=str(model_folder(Path(config.model.path))))  # one checkpoint for all
        policy = load_sharded(model, config.parallel, ranks, config.run.seed)
        posterior = posterior_of(policy.model, model.path, config.noise) if config.eval.draws else None
        exams = {source.label: examine(source, dealt_grader(grader, ranks), policy, config) for source, grader in sets}
        search = search_for(config, policy, ranks, exams) if config.eval.best_draws else None
        examined = exams | ({search.label: search.exam} if search else {})
        fingerprint = {"weights": weights_digest(policy, posterior)} | {
            f"problems of {label}": problems_digest(exam.problems, exam.prompts) for label, exam in examined.items()
        }
        ranks.agree(fingerprint, "give all ranks the same model and problems")
        with ranks.together():
            origin = begin(folder, settings, fingerprint) if ranks.first else {}
        if not ranks.gather((folder / SUMMARY).is_file())[0]:
            engine = cache(lambda: opened.enter_context(_engine(config, policy, examined.values(), ranks)))
            work = _Work(folder, config, policy, FixedWeights(policy.model, posterior), step, ranks, engine)
            summary = {"model": config.model.path} | (_searched(work, exams, search) if search else work.scores(exams))
            with ranks.together():
                if ranks.first:
                    write_json(folder / SUMMARY, finite(summary) | origin)
        if ranks.first:
            # Also those that a process left which was killed before this.
            shutil.rmtree(folder / PARTS, ignore_errors=True)
        return ranks.gather(read_json(folder / SUMMARY) if ranks.first else {})[0]


@contextlib.contextmanager
def _engine(
    config: EvaluationConfig, policy: Policy, exams: Iterable[Examination], ranks: Ranks
) -> Iterator[RolloutEngine]:
    """An engine, into which all of the evaluation fits."""
    with contextlib.closing(build_ranked(config.engine, policy, ranks)) as engine:
        for exam in exams:
            exam.prepare(engine)
        yield engine


def _searched(work: "_Work", exams: Mapping[str, Examination], search: Search) -> dict[str, Any]:
    """Contents of summary.json for RandOpt: the vote of the chosen draws, the choice, and the mean for comparison."""
    work.complete(search.portions(), "choosing draws")
    with work.ranks.together():
        found = [search.choice(work.folder)] if work.ranks.first else []
    choice = work.ranks.gather(found)[0][0]
    at_mean = {label: replace(exam, numbers=()) for label, exam in exams.items()}
    of_best = {label: replace(exam, numbers=choice.best) for label, exam in exams.items()}
    selection = {"source": search.exam.problem_set.source, "problems": len(search.exam.problems), **asdict(choice)}
    mean = work.scores(at_mean, ".mean", "the mean")
    return {"selection": selection, "mean": mean, **work.scores(of_best, title="the best draws")}


@dataclass(frozen=True)
class _Work:
    """State that the parts of an evaluation share."""

    folder: Path
    config: EvaluationConfig
    policy: Policy
    source: FixedWeights
    step: int
    ranks: Ranks
    engine: Callable[[], RolloutEngine]
    """Made when it is called first."""

    def scores(self, exams: Mapping[str, Examination], suffix: str = "", title: str = "eval") -> dict[str, Any]:
        """The scores of all sets; their completions are made as far as they are missing.

        `suffix` of the sets' names in the folder; `title` of the progress bar.
        """
        portions = {label: Portion(label + suffix, exam) for label, exam in exams.items()}
        self.complete(list(portions.values()), title)
        with self.ranks.together():
            return self._scored(portions) if self.ranks.first else {}

    def _scored(self, portions: Mapping[str, Portion]) -> dict[str, Any]:
        scores, results = [], {}
        for label, portion in portions.items():
            exam = portion.exam
            rows = joined(self.folder, portion.label, len(exam.parts()))
            reward = self.config.reward
            graders = [exam.problem_set.verifier if name == "task" else name for name in reward.names]
            # Programs have no answers, so none of them can be the most frequent one.
            scores.append(score(rows, self.config.eval.samples, votes="code" not in graders))
            kept, first = {p.id for p in exam.problems}, exam.problem_set.problems.first(exam.settings.problems)
            by_draw = scores[-1].pass_at_1_by_draw.values()
            results[label] = asdict(scores[-1]) | {
                "pass_at_1_by_draw": dict(zip(sorted(exam.numbers), by_draw, strict=True)),
                "source": exam.problem_set.source,
                "prompt": exam.problem_set.template,
                "first_prompt": self.policy.tokenizer.decode(exam.prompts[0]),
                "left_out": [problem.id for problem in first if problem.id not in kept],
            }
        return {"average": average_scores(scores), "benchmarks": results}

    def complete(self, portions: Sequence[Portion], title: str) -> None:
        """Make the parts that are missing; raises `Interrupted` between two of them after a signal."""
        ranks, folder = self.ranks, self.folder
        found = [(i, *part) for i, portion in enumerate(portions) for part in portion.missing(folder)]
        missing = ranks.gather(found)[0]
        total = sum(len(portion.exam.problems) for portion in portions)
        done = total - sum(part.stop - part.start for _, _, part in missing)
        if not missing:
            return
        engine, loaded = self.engine(), None
        console = Console(stderr=True, quiet=not ranks.first)
        with polite_stop() as stop, progress(title, total, done, folder, console, "problem") as reporter:
            for i, file, part in missing:
                label, exam = portions[i].label, portions[i].exam
                if exam.numbers != loaded:
                    engine.load(self.source, exam.draws(self.step), self.step)
                    loaded = exam.numbers
                rows = [completion_row(self.step, c) for c in exam.complete(engine, self.step, part)]
                with ranks.together():
                    if ranks.first:
                        write_parquet(file, rows)
                done += part.stop - part.start
                reporter.update(done, {f"{label} pass@1": sum(row["correct"] for row in rows) / len(rows)})
                stopping = max(ranks.gather(stop.signal_number))
                obey(stopping, done, total, folder, "problem", "the same command continues it, in")


def _benchmarks(config: EvaluationConfig) -> list[tuple[ProblemSet, Grader]]:
    """The benchmarks that are named; those with the same verifier share a grader."""
    sets = [open_benchmark(choice, config.benchmarks, config.data) for choice in choices(config.benchmarks)]
    graders = {}
    for verifier in dict.fromkeys(source.verifier for source in sets):
        problems = [p for source in sets if source.verifier == verifier for p in source.problems.known()]
        graders[verifier] = load_grader(config.reward, verifier, problems)
    return [(source, graders[source.verifier]) for source in sets]


def weights_digest(policy: Policy, posterior: Posterior | None) -> str:
    """A digest of every weight, of the model's configuration, and of the posterior if draws are made."""
    shape = {key: value for key, value in policy.model.config.to_dict().items() if key not in _NOT_THE_MODEL}
    parts = [json.dumps(shape, sort_keys=True, default=str), *_tensors(policy.model.state_dict())]
    if posterior is not None:
        parts += [repr(posterior.groups), repr((posterior.step, posterior.seed)), *_tensors(posterior.hessian)]
    return digest(parts)


def _tensors(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """A line per tensor; hashing releases the GIL, so threads hash several at the same time.

    Tensors that are spread over ranks are gathered one after another, on all ranks in the same order.
    """

    def line(name: str) -> str:
        tensor = whole(tensors[name].detach()).cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        return f"{name} {tensor.dtype} {list(tensor.shape)} {hashlib.blake2b(data, digest_size=16).hexdigest()}"

    if any(map(is_spread, tensors.values())):
        return list(map(line, sorted(tensors)))
    with ThreadPoolExecutor() as pool:
        return list(pool.map(line, sorted(tensors)))
