"""`threepo probe` as a function: would noise on the weights solve what the mean policy never solves?

On problems that the mean (nearly) never solves, it measures for every place and size of noise how often the draws solve
them, how far they are from the mean, and how many of their rollouts Seq-MIS would keep (docs/probe.md, method.md 8).
Every measurement is a file in the folder, so a probe that was stopped continues from there.
"""

import contextlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from threepo.config import IVONConfig, NoiseConfig, TrainConfig
from threepo.config.method import C3PO
from threepo.config.recipes import Table, load
from threepo.config.records import first_difference, to_dict
from threepo.data.rows import digest
from threepo.data.source import open_training
from threepo.data.tasks import TASKS
from threepo.errors import UserError
from threepo.evaluation.examination import Questions, fitting_prompts, with_grader
from threepo.evaluation.records import refuse_other, set_name
from threepo.evaluation.run import weights_digest
from threepo.files import finite, read_json, write_json
from threepo.lab.probe_config import LAYERS, POSTERIOR, ProbeConfig
from threepo.lab.probe_findings import MEAN, TEMPERATURE, findings, recipe, write_recipe
from threepo.lab.statistics import Outcomes, predictable_draws
from threepo.models.adapters import adapter_folder
from threepo.models.policy import Policy, load_policy
from threepo.posterior.gaussian import FixedWeights, Posterior
from threepo.posterior.noise_sizes import fits_any, layer_kind, trained_names
from threepo.progress import obey, polite_stop, progress
from threepo.ranks.dealing import build_shared_engine
from threepo.ranks.world import ALONE, with_threads
from threepo.rollout.engines import RolloutEngine
from threepo.run_folder import POSTERIOR_FILE, SUMMARY, LockedFolder, model_folder
from threepo.training.scoring import score_rows
from threepo.types import Completion, CreditedRow, Draw, Problem, Purpose, integers, numbers
from threepo.user_code import own_code

PROBE, PARTS, LOCK = "probe.json", "parts", "probe.lock"
SCORED = 1024
"""Completions of each noise, evenly spread, that are scored at other weights."""
FRESH = 8
"""More draws of the same noise, at which completions are scored as C3PO does at its gradient draw."""
MOST_KL = 2.0
"""Nats a token: larger sizes at the same place are left out, because so much noise destroys the policy."""
SEARCH = 0
"""The step in the random addresses of the search for problems; measurements use their numbers, from 1."""


@dataclass(frozen=True)
class Condition:
    """One thing to measure: weights with noise of a size at a place, or the mean at a temperature."""

    place: str
    """`mean`, `temperature`, `posterior`, or a key of [noise] `where`."""
    size: float
    """A temperature; an ess; or sigma over RMS."""

    @property
    def is_noisy(self) -> bool:
        """True if it has draws: neither the mean nor a temperature."""
        return self.place not in (MEAN, TEMPERATURE)


class ProbeFolder(LockedFolder):
    """A probe's folder, locked while it is made."""

    files = (PROBE, LOCK)
    results = (PARTS, SUMMARY)


@dataclass(frozen=True)
class Probe:
    """State that all measurements of a probe share. Legend: P problems, D draws, R rows, K tokens of a completion."""

    config: TrainConfig
    settings: ProbeConfig
    policy: Policy
    learned: Posterior | None
    """The posterior that training can start from."""
    engine: RolloutEngine

    def search(self, candidates: Questions) -> dict[str, Any]:
        """Measure how often the mean policy solves each candidate, for choosing among them and nothing else."""
        looks = 0 if self.settings.exact else self.settings.looks
        _, outcomes = self.ask(candidates, FixedWeights(self.policy.model), [None], looks, SEARCH)
        return {"rates": outcomes.rates[:, 0].tolist()}

    def measure(self, questions: Questions, condition: Condition, step: int) -> dict[str, Any]:
        """Measure a condition and return the contents of its file; `step` gives it separate draws and rollouts."""
        count, each = self.settings.draws, self.settings.rollouts
        if self.settings.exact:  # only as many rollouts as are scored
            each = min(each, -(-SCORED // (count * len(questions.problems))))
        if condition.place == TEMPERATURE:
            questions = replace(questions, sampling=replace(questions.sampling, temperature=condition.size))
        if condition.is_noisy:
            source = FixedWeights(self.policy.model, self.posterior(condition))
            draws = questions.draws(step, range(count + FRESH))
        else:  # the mean gets the completions of all draws together
            source, draws = FixedWeights(self.policy.model), [None]
            count, each = 1, count * each
        completions, outcomes = self.ask(questions, source, draws[:count], each, step)
        measured: dict[str, Any] = {
            **asdict(condition),
            "rates": outcomes.rates.tolist(),
            "rollouts": outcomes.rollouts,
            "rollouts_right": float(np.mean(list(map(is_right, completions)))),
        }
        if condition.is_noisy:
            measured |= self.distances(source, completions, draws[count:])
        return measured

    def posterior(self, condition: Condition) -> Posterior:
        """The noise of a condition around the model's weights, of the structure that the recipe sets."""
        noise, named = self.config.noise, self.policy.model.named_parameters()
        if condition.place != POSTERIOR:
            where = {condition.place: 1.0}
            return Posterior.around(named, replace(noise, unit="rms", size=condition.size, where=where))
        if self.learned:
            structure = noise.group_structure
            groups = (  # as the recipe will train, whatever the size with which the posterior was learned
                replace(group, ess=condition.size, noise_scale=1.0, noise_structure=structure)
                for group in self.learned.groups
            )
            return replace(self.learned, groups=tuple(groups))
        ivon = self.config.optimizer if isinstance(self.config.optimizer, IVONConfig) else IVONConfig()
        sigma = 1 / math.sqrt(condition.size * (ivon.hess_init + ivon.weight_decay))
        return Posterior.around(named, replace(noise, unit="absolute", size=sigma, where=NoiseConfig().where))

    def ask(
        self, questions: Questions, source: FixedWeights, draws: Sequence[Draw | None], each: int, step: int
    ) -> tuple[list[Completion], Outcomes]:
        """`each` graded completions of every problem by every draw, and the share of each problem that a draw solves.

        The shares are counted, or they are the probability of the only answer. The engine holds some draws at a time.
        """
        completions: list[Completion] = []
        for begin in range(0, len(draws) if each else 0, self.settings.draws_together):
            some = draws[begin : begin + self.settings.draws_together]
            self.engine.load(source, some, step)
            completions += questions.ask(self.engine, some, each * len(some), first=begin * each)
        if self.settings.exact:
            return completions, Outcomes(self._chances(questions, source, draws), 0)
        right = Counter((c.problem.id, c.draw) for c in completions if is_right(c))
        rates = np.array([[right[problem.id, draw] / each for draw in draws] for problem in questions.problems])
        return completions, Outcomes(rates, each)

    def _chances(self, questions: Questions, source: FixedWeights, draws: Sequence[Draw | None]) -> np.ndarray:
        """The probability [P, D] that a draw answers a problem with its reference answer and nothing else."""
        rows = list(map(self._answer, questions.problems, questions.prompts))
        chances = np.empty((len(rows), len(draws)))
        for i, draw in enumerate(draws):
            logprobs = self._logprobs(source, rows, draw, questions.sampling.temperature)
            chances[:, i] = np.exp([row.sum() for row in logprobs])
        return chances

    def _answer(self, problem: Problem, prompt: tuple[int, ...]) -> Completion:
        """The problem's answer as if it had been generated."""
        tokenizer = self.policy.tokenizer
        tokens = (*tokenizer(problem.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
        return Completion(
            problem,
            prompt,
            None,
            0,
            tokens=integers(tokens),
            logprobs=numbers(()),
            text="",
            finish_reason="stop",
            policy_step=0,
        )

    def distances(
        self, source: FixedWeights, completions: Sequence[Completion], fresh: Sequence[Draw | None]
    ) -> dict[str, float]:
        """KL per token of the draws to the mean, and what Seq-MIS keeps of their rollouts at a fresh draw."""
        rows = [row for row in completions if row.logprobs][:: max(1, len(completions) // SCORED)]
        temperature = self.config.sampling.temperature
        behaviour: list[np.ndarray] = [np.asarray(row.logprobs) for row in rows]
        at_mean = self._logprobs(source, rows, None, temperature)
        differences = [mean - own for mean, own in zip(at_mean, behaviour, strict=True)]
        kl = math.fsum((np.exp(d) - 1 - d).sum() for d in differences) / sum(map(len, behaviour))
        log_rho: list[float] = []
        for i, draw in enumerate(fresh[: len(rows)]):
            at_fresh = self._logprobs(source, rows[i::FRESH], draw, temperature)
            log_rho += [float((new - own).sum()) for new, own in zip(at_fresh, behaviour[i::FRESH], strict=True)]
        low, high = math.log(C3PO.correction.low), math.log(C3PO.correction.high)
        return {"kl": kl, "kept_share": float(np.mean([low <= rho <= high for rho in log_rho]))}

    def _logprobs(
        self, source: FixedWeights, rows: Sequence[Completion], draw: Draw | None, temperature: float
    ) -> list[np.ndarray]:
        """Log-probs [K] of each row's tokens at a draw, by the trainer's forward pass."""
        credited = [CreditedRow.of(row, i) for i, row in enumerate(rows)]
        with source.at(draw):
            scores = score_rows(credited, self.policy, temperature, self.config.batching.tokens, ALONE)
        return [scores[i].logprobs.double().numpy() for i in range(len(rows))]


def is_right(completion: Completion) -> bool:
    """True if a graded completion is right."""
    return completion.verdict is not None and completion.verdict.correct


def prior(config: TrainConfig) -> Posterior | None:
    """The learned posterior that training can start from: the optimizer loads it, or it is next to the model."""
    loaded = getattr(config.optimizer, "load_hessian", "")
    folder = model_folder(Path(loaded or config.model.path))
    if config.model.lora.rank and not loaded and not adapter_folder(config.model.path):
        return None  # one around the weights that are frozen now
    found = Posterior.from_pretrained(folder) if loaded or (folder / POSTERIOR_FILE).is_file() else None
    return found if found and found.hessian else None


def conditions(config: TrainConfig, settings: ProbeConfig, policy: Policy) -> list[Condition]:
    """Conditions to measure, in order; the sizes of a place ascend in KL to the mean."""
    found = [Condition(MEAN, config.sampling.temperature)]
    found += [Condition(TEMPERATURE, t) for t in settings.temperatures if t != config.sampling.temperature]
    trained = trained_names(dict(policy.model.named_parameters()))
    for place in settings.places:
        if place == POSTERIOR:
            found += [Condition(place, ess) for ess in reversed(settings.ess)]
            continue
        places = [where for where in (layers(policy) if place == LAYERS else [place]) if fits_any(where, trained)]
        known = bool(places) or place in ProbeConfig().places
        settings.check("places", known, f"this model trains nothing that {place!r} fits; leave it out, or correct it")
        found += [Condition(where, size) for where in places for size in settings.sizes]
    fix = "this model trains none of these places; name others, such as all"
    settings.check("places", any(condition.is_noisy for condition in found), fix)
    return found


def layers(policy: Policy) -> list[str]:
    """Patterns of names: the first, the middle and the last block, and parameters outside, such as the last norm."""
    blocks = policy.model.config.get_text_config().num_hidden_layers
    names = [name for name, _ in policy.model.named_parameters() if ".layers." not in name]
    outside = [name for name in names if layer_kind(name) not in ("embedding", "head")]
    return [f"*.layers.{i}.*" for i in sorted({0, blocks // 2, blocks - 1})] + outside


def default_folder(config: TrainConfig, settings: ProbeConfig) -> Path:
    """runs/probe-MODEL-DATA-DIGEST: equal settings have equal folders, different settings have different ones."""
    text = json.dumps([to_dict(config), to_dict(settings)], sort_keys=True)
    parts = [Path(config.model.path).name, set_name(Path(config.data.train).stem), digest([text])[:8]]
    return Path("runs") / f"probe-{'-'.join(parts)}"


def run_probe(
    config: TrainConfig, settings: ProbeConfig, folder: Path, training: Table | None = None, write: Path | None = None
) -> dict[str, Any]:
    """Measure everything; returns the contents of summary.json.

    Measurements that are in `folder` are not repeated. `write`: the file for the recipe that follows, made of the
    tables `training`; none is written where noise does not help.
    """
    refuse_unanswerable(config, settings)
    refuse_other(folder, PROBE)
    config.parallel.only_if(False, "a probe does not read it; set it to false, or remove it", "offload")
    training_set, grader = with_grader(open_training(config.data), config.reward, config.data)
    with ProbeFolder(folder), with_threads(config.run.threads):
        policy = load_policy(replace(config.model, path=str(model_folder(Path(config.model.path)))), config.run.seed)
        longest = config.sampling.max_new_tokens
        problems, prompts = fitting_prompts(training_set, policy, config.data, longest, settings.candidates)
        candidates = Questions(problems, prompts, grader, config.sampling, config.run.seed, Purpose.PROBE)
        learned = prior(config)
        digests = {"weights": weights_digest(policy, learned), "code": own_code(config)}
        asked = {"train": to_dict(config), "probe": to_dict(settings), **digests}
        if (folder / PROBE).is_file() and (other := first_difference(read_json(folder / PROBE), asked)):
            raise UserError(f"--output {folder}: holds another probe ({other}); choose another folder")
        write_json(folder / PROBE, asked)
        with contextlib.closing(
            build_shared_engine(config.engine, policy, ALONE, config.environment, config.data)
        ) as engine:
            engine.prepare(min(settings.draws_together, settings.draws), candidates.longest)
            summary = _measure_all(Probe(config, settings, policy, learned, engine), candidates, folder)
    write_json(folder / SUMMARY, finite(summary))
    if write and summary["draws"]:
        table = recipe(summary, config, training or {}, str(learned.folder) if learned else "")
        write_recipe(write, table, summary["verdict"])
        load(TrainConfig, str(write))  # it must be one
    return summary


def refuse_unanswerable(config: TrainConfig, settings: ProbeConfig) -> None:
    """Raise `UserError` for too few rollouts, and for exact chances of a task with several right completions."""
    group, rates = config.method.rollouts_per_prompt, np.zeros((1, settings.draws))
    if not predictable_draws(Outcomes(rates, 0 if settings.exact else settings.rollouts), group):
        few = f"--draws {settings.draws} --rollouts {settings.rollouts}: too few for groups of {group}"
        raise UserError(f"{few}; set --rollouts {group}")
    name = config.data.train
    if settings.exact and not (config.reward.function == "task" and name in TASKS and TASKS[name].only_answer):
        known = ", ".join(task.name for task in TASKS.values() if task.only_answer)
        raise UserError(f"--exact: {name} may have other right completions than its answer; tasks with none: {known}")


def _measure_all(probe: Probe, candidates: Questions, folder: Path) -> dict[str, Any]:
    """Make all measurements, one after another; returns the contents of summary.json."""
    config, settings = probe.config, probe.settings
    planned = conditions(config, settings, probe.policy)
    total = len(planned) + 2
    with polite_stop() as stop, progress("probe", total, 0, folder, unit="measurement") as reporter:

        def made(number: int, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            """A measurement, read from its file or made and written there."""
            file = folder / PARTS / f"{number:03d}.json"
            if not file.is_file():
                write_json(file, make())
            measured = read_json(file)
            reporter.update(number + 1, {"kl": measured.get("kl", 0.0)})
            obey(stop.signal_number, number + 1, total, folder, "measurement", "the same command continues it, in")
            return measured

        rates = made(0, partial(probe.search, candidates))["rates"]
        hard = [i for i, rate in enumerate(rates) if rate <= settings.solved_at_most]
        if not hard:
            shutil.rmtree(folder / PARTS)  # so that the corrected command can use the same folder
            raise UserError(
                f"probe.solved_at_most = {settings.solved_at_most:g}: the mean policy solves each of the first "
                f"{len(rates)} problems more often (the least solved: {min(rates):.3g}), so there is nothing to "
                f"rescue; raise it, or choose harder problems"
            )
        questions = candidates.select(hard[: settings.problems])
        measured: list[dict[str, Any]] = []
        for number, condition in enumerate(planned, start=1):
            last = measured[-1] if measured else {}
            if last.get("place") != condition.place or last.get("kl", 0.0) <= MOST_KL:
                measured.append(made(number, partial(probe.measure, questions, condition, number)))
        summary = findings(config, settings, measured)
        if chosen := summary["chosen"]:
            condition = Condition(chosen["place"], chosen["size"])
            again = made(total - 1, partial(probe.measure, questions, condition, total))
            summary = findings(config, settings, measured, again)
        reporter.update(total, {})
    measured_on = [problem.id for problem in questions.problems]
    counts = {"candidates": len(rates), "hard": len(hard), "measured_on": measured_on}
    return {"model": config.model.path, "data": config.data.train, "problems": counts, **summary}
