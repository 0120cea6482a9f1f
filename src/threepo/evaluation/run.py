"""`threepo eval` as a function: a model on benchmarks or held-out problems, recorded in a folder."""

import contextlib
import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

from threepo.config import EvaluationConfig
from threepo.config.recipes import what_matters
from threepo.config.records import to_dict
from threepo.data.finite import problems_digest, warn_of_shared_problems
from threepo.data.rows import digest
from threepo.data.source import ProblemSet, open_heldout, open_training
from threepo.evaluation.benchmarks import open_benchmark, parse_names
from threepo.evaluation.examination import Examination, examine, with_grader
from threepo.evaluation.records import PARTS, EvaluationFolder, begin, completions_file, refuse_taken, set_name
from threepo.evaluation.scores import COLUMNS, average_scores, normalised, score, without_blanks
from threepo.files import atomic_file, finite, read_json, write_json
from threepo.models.policy import Policy
from threepo.posterior.gaussian import FixedWeights, Posterior, posterior_of
from threepo.posterior.shards import is_spread, whole
from threepo.progress import obey, polite_stop, progress
from threepo.ranks.agreement import agree_on_setup
from threepo.ranks.dealing import build_shared_engine, divide_grading, refuse_engine
from threepo.ranks.sharding import load_sharded
from threepo.ranks.world import ALONE, World, with_threads
from threepo.rewards.grading import Grader, load_grader, refuse_ignored
from threepo.rollout.engines import RolloutEngine
from threepo.run_folder import SUMMARY, completion_row, model_folder, write_parquet
from threepo.types import Problem, Purpose
from threepo.user_code import own_code

_OF_THE_COPY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Keys of a model's configuration that depend on where it was saved or loaded, not on what it computes."""
Parts = Mapping[Path, Examination]
"""Parts of examinations by their files."""


def evaluate(config: EvaluationConfig, folder: Path, step: int = 0, world: World = ALONE) -> dict[str, Any]:
    """Score a model on benchmarks or held-out problems, at the mean or over draws of its posterior.

    Everything is kept in `folder` (evaluation.records): an unfinished evaluation there is continued, a finished one is
    only read. Returns the contents of summary.json. `step` is part of the random address of every completion: an
    evaluation while training passes its training step.
    """
    agree_on_setup(config, world)
    settings = {**what_matters(to_dict(config)), "step": step}
    refuse_engine(config.engine, world)
    with contextlib.ExitStack() as opened:
        opened.enter_context(with_threads(config.run.threads))
        world.on_first(lambda: refuse_taken(folder, settings, {}))  # before minutes go into loading a model
        world.only_first(lambda: opened.enter_context(EvaluationFolder(folder)), others=None)
        with world.together():
            config, sets = _open_sets(config)
        model = replace(config.model, path=str(model_folder(Path(config.model.path))))  # one checkpoint for all
        policy = load_sharded(model, config.parallel, world, config.run.seed)
        posterior = posterior_of(policy.model, model.path, config.noise) if config.eval.draws else None
        exams = [examine(source, divide_grading(grader, world), policy, config) for source, grader in sets]
        chosen_on = selection(config, policy, world, exams) if config.eval.best_draws else None
        asked = [*exams, chosen_on] if chosen_on else exams
        fingerprint = {"weights": weights_digest(policy, posterior)}
        for exam in asked:
            fingerprint[f"problems of {exam.label}"] = problems_digest(exam.problems, exam.prompts)
        world.agree(fingerprint, "give all ranks the same model and problems")
        fingerprint |= own_code(config)
        origin = world.on_first(lambda: begin(folder, settings, fingerprint))
        if not world.on_first((folder / SUMMARY).is_file):
            weights = FixedWeights(policy.model, posterior)
            evaluation = _Evaluation(folder, config, policy, weights, step, world, asked, opened)
            scores = evaluation.vote(exams, chosen_on) if chosen_on else evaluation.scores(exams)
            summary = finite({"model": model.path} | scores) | origin
            world.on_first(lambda: write_json(folder / SUMMARY, summary))
        # Also the parts of a process that was killed before this.
        world.on_first(lambda: shutil.rmtree(folder / PARTS, ignore_errors=True))
        found: dict[str, Any] = world.on_first(lambda: read_json(folder / SUMMARY))
        return found


def _open_sets(config: EvaluationConfig) -> tuple[EvaluationConfig, list[tuple[ProblemSet, Grader]]]:
    """The sets of problems with their graders, and the settings under which they are evaluated.

    Benchmarks are evaluated whole; those with the same verifier share a grader.
    """
    if not config.benchmarks.names:
        return config, [with_grader(open_heldout(config.data), config.reward, config.data)]
    chosen = parse_names(config.benchmarks.names)
    sets = [open_benchmark(name, copy, config.benchmarks, config.data) for name, copy in chosen.items()]
    known: dict[Any, list[Problem]] = defaultdict(list)
    for source in sets:
        known[source.verifier] += source.problems.known()
    refuse_ignored(config.reward, known)
    graders = {verifier: load_grader(config.reward, verifier, problems) for verifier, problems in known.items()}
    whole_sets = replace(config.eval, problems=sum(map(len, known.values())))
    return replace(config, eval=whole_sets), [(source, graders[source.verifier]) for source in sets]


@dataclass(frozen=True)
class _Evaluation:
    """State that the parts of an evaluation share."""

    folder: Path
    config: EvaluationConfig
    policy: Policy
    weights: FixedWeights
    step: int
    world: World
    exams: Sequence[Examination]
    """All examinations for which the engine needs memory."""
    opened: contextlib.ExitStack
    """Closes the engine."""

    @cached_property
    def engine(self) -> RolloutEngine:
        """The engine, built when the first missing part needs it."""
        config = self.config
        built = build_shared_engine(config.engine, self.policy, self.world, config.environment, config.data)
        engine: RolloutEngine = self.opened.enter_context(contextlib.closing(built))
        for exam in self.exams:
            exam.prepare(engine)
        return engine

    def vote(self, exams: Sequence[Examination], chosen_on: Examination) -> dict[str, Any]:
        """The contents of summary.json for RandOpt: the choice of draws, and the scores of the chosen ones."""
        every, most = range(self.config.eval.draws), self.config.eval.best_draws
        together = [every[first : first + most] for first in every[::most]]  # memory never holds more draws
        parts = self.parts([replace(chosen_on, numbers=numbers, samples=len(numbers)) for numbers in together])
        self.complete(parts, "choosing draws")
        choice = self.world.on_first(lambda: best_draws(self.join(chosen_on.label, parts), most))
        found = {"source": chosen_on.problem_set.source, "problems": len(chosen_on.problems), **choice}
        best = [replace(exam, numbers=choice["best"]) for exam in exams]
        return {"selection": found, **self.scores(best, "the best draws")}

    def scores(self, exams: Sequence[Examination], title: str = "eval") -> dict[str, Any]:
        """The scores of all sets, whose missing completions are made first; the progress bar shows `title`."""
        parts = self.parts(exams)
        self.complete(parts, title)
        return self.world.on_first(lambda: self._scored(exams, parts))

    def parts(self, exams: Sequence[Examination]) -> Parts:
        """The parts of examinations, whose files are numbered within each set.

        Each has up to `eval.part_size` completions, generated, graded and saved together; problems stay whole.
        """
        parts: dict[Path, Examination] = {}
        numbers: dict[Path, Iterator[int]] = defaultdict(count)
        for exam in exams:
            place, indices = self.folder / PARTS / set_name(exam.label), range(len(exam.problems))
            size = max(1, self.config.eval.part_size // exam.samples)
            for start in indices[::size]:
                parts[place / f"{next(numbers[place]):05d}.parquet"] = exam.select(indices[start : start + size])
        return parts

    def missing(self, parts: Parts) -> list[Path]:
        """The files of the parts that have yet to be made."""
        made = {part.label for part in parts.values() if completions_file(self.folder, part.label).is_file()}
        return [file for file, part in parts.items() if part.label not in made and not file.is_file()]

    def join(self, label: str, parts: Parts) -> list[dict[str, Any]]:
        """All completions of a set, put into one file if they are not yet: the columns that scores depend on."""
        file = completions_file(self.folder, label)
        if not file.is_file():
            tables = [pyarrow.parquet.read_table(made) for made, part in parts.items() if part.label == label]
            with atomic_file(file) as temporary:
                # A column that is empty throughout a part has no type there; it takes the type from the other parts.
                table = pyarrow.concat_tables(tables, promote_options="default")
                pyarrow.parquet.write_table(table, temporary, compression="zstd")
        return pyarrow.parquet.read_table(file, columns=list(COLUMNS)).to_pylist()  # type: ignore[no-any-return]

    def complete(self, parts: Parts, title: str) -> None:
        """Make the missing parts; raises `Interrupted` between two of them after a signal."""
        world, folder = self.world, self.folder
        to_make = {file: parts[file] for file in world.on_first(lambda: self.missing(parts))}
        if not to_make:
            return
        total = sum(len(part.problems) for part in parts.values())
        done = total - sum(len(part.problems) for part in to_make.values())
        engine, loaded, seen = self.engine, None, defaultdict[str, list[bool]](list)
        with polite_stop() as stop, progress(title, total, done, folder, world.console(), "problem") as reporter:
            for file, part in to_make.items():
                if part.numbers != loaded:
                    part.load(engine, self.weights, self.step)
                    loaded = part.numbers
                rows = [completion_row(self.step, c) for c in part.complete(engine, self.step)]
                world.on_first(partial(write_parquet, file, rows))
                done += len(part.problems)
                seen[part.label] += [row["correct"] for row in rows]
                reporter.update(done, {f"{part.label} pass@1 so far": fmean(seen[part.label])})
                stopping = max(world.gather(stop.signal_number))
                obey(stopping, done, total, folder, "problem", "the same command continues it, in")

    def _scored(self, exams: Sequence[Examination], parts: Parts) -> dict[str, Any]:
        scores, results, reward = [], {}, self.config.reward
        for exam in exams:
            source = exam.problem_set
            graders = [source.verifier if name == "task" else name for name in reward.names]
            votes = normalised if "math" in graders else without_blanks
            # Programs have no answers, so none of them can be the most frequent one.
            found = score(self.join(exam.label, parts), exam.samples, votes=None if "code" in graders else votes)
            asked = {problem.id for problem in exam.problems}
            first = source.problems.first(self.config.eval.problems)
            results[exam.label] = asdict(found) | {
                "source": source.source,
                "prompt": source.template,
                "first_prompt": self.policy.tokenizer.decode(exam.prompts[0]),
                "left_out": [problem.id for problem in first if problem.id not in asked],
            }
            scores.append(found)
        return {"average": average_scores(scores), "benchmarks": results}


# RandOpt (arXiv 2603.12228; docs/evaluation.md): draws are compared on training problems, and the best ones vote.


def selection(config: EvaluationConfig, policy: Policy, world: World, exams: Iterable[Examination]) -> Examination:
    """The questions that the draws are compared on, from data.train; warns of problems of `exams` among them."""
    with world.together():
        source, grader = with_grader(open_training(config.data), config.reward, config.data)
    settings = replace(config, eval=replace(config.eval, problems=config.eval.selection_problems))
    source = replace(source, label=f"{source.source}.selection")
    exam = examine(source, divide_grading(grader, world), policy, settings)
    for heldout in exams:
        what = f"{heldout.label}, with draws that are chosen on {source.source}"
        warn_of_shared_problems(what, exam.problems, heldout.problems, bool(config.environment.factory))
    return exam


def best_draws(rows: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Scores of all draws by number, and the best `count`, best first and of equals the lower number first."""
    by_draw: dict[int, list[bool]] = {}
    for row in rows:
        by_draw.setdefault(row["draw_index"] - Purpose.EVALUATION, []).append(row["correct"])
    scores = {number: fmean(by_draw[number]) for number in sorted(by_draw)}
    return {"scores": scores, "best": sorted(scores, key=lambda number: -scores[number])[:count]}


# Digests


def weights_digest(policy: Policy, posterior: Posterior | None) -> str:
    """A digest of all weights, of the model's configuration, and of the posterior if draws are made."""
    shape = {key: value for key, value in policy.model.config.to_dict().items() if key not in _OF_THE_COPY}
    parts = [json.dumps(shape, sort_keys=True, default=str), *_tensors(policy.model.state_dict())]
    if posterior is not None:
        parts += [repr(posterior.groups), repr((posterior.step, posterior.seed)), *_tensors(posterior.hessian)]
    return digest(parts)


def _tensors(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """A line with the digest of each tensor. Hashing releases the GIL, so threads hash several at the same time.

    Sharded tensors are gathered one after another, on all ranks in the same order.
    """

    def line(name: str) -> str:
        tensor = whole(tensors[name].detach()).cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        return f"{name} {tensor.dtype} {list(tensor.shape)} {hashlib.blake2b(data, digest_size=16).hexdigest()}"

    if any(map(is_spread, tensors.values())):
        return list(map(line, sorted(tensors)))
    with ThreadPoolExecutor() as pool:
        return list(pool.map(line, sorted(tensors)))
