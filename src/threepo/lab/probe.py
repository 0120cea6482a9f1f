"""`threepo probe` as a function: would noise on the weights solve what the mean policy never solves?

On problems that the mean (nearly) never solves, it measures for every place and size of noise how often the draws solve
them, how far they are from the mean, and what Seq-MIS would keep of their rollouts (docs/probe.md, method.md 8). Every
measurement is a file in the folder, so that a probe that was stopped goes on from there.
"""

import contextlib
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from threepo.config import IVONConfig, NoiseConfig, SamplingConfig, TrainConfig
from threepo.config.method import C3PO
from threepo.config.records import first_difference, to_dict
from threepo.data.source import open_training
from threepo.data.tasks import TASKS
from threepo.errors import UserError
from threepo.evaluation.examination import fit_context, with_grader
from threepo.evaluation.run import weights_digest
from threepo.files import finite, read_json, write_json
from threepo.lab.probe_config import LAYERS, POSTERIOR, ProbeConfig
from threepo.lab.probe_findings import MEAN, TEMPERATURE, findings
from threepo.lab.probe_statistics import Outcomes, shares_of
from threepo.models.adapters import adapter_folder
from threepo.models.packing import flatten, pack
from threepo.models.policy import Policy, load_policy
from threepo.posterior.gaussian import FILE_NAME, FixedWeights, Posterior
from threepo.posterior.noise import address_key
from threepo.posterior.noise_sizes import fits_any, layer_kind, trained_names
from threepo.progress import obey, polite_stop, progress
from threepo.rewards.grading import Grader, graded
from threepo.rollout.engines import RolloutEngine, build_engine
from threepo.run_folder import SUMMARY, LockedFolder, model_folder
from threepo.types import Completion, Draw, Problem, Purpose, Request, TrainingRow

PROBE, PARTS, LOCK = "probe.json", "parts", "probe.lock"
SCORED = 1024
"""Completions of each noise, evenly spread, whose log-probs at other weights are computed."""
FRESH = 8
"""Other draws of the same noise at which these are scored: a gradient draw of C3PO is one of them."""
MOST_KL = 2.0
"""Nats a token: larger sizes at the same place are left out, because so much noise destroys the policy."""
SEARCH = 0
"""The step in the addresses of the search for problems; measurements have their numbers, from 1."""


@dataclass(frozen=True)
class Condition:
    """One thing to measure: weights with noise of a size at a place, or the mean at a temperature."""

    place: str
    """`mean`, `temperature`, `posterior`, or a key of [noise] `where`."""
    size: float
    """A temperature; an ess; or sigma over RMS."""

    def noise(self) -> NoiseConfig:
        """The condition's noise as the table [noise] of a recipe."""
        return NoiseConfig(unit="rms", size=self.size, where={self.place: 1.0})


class ProbeFolder(LockedFolder):
    """A probe's folder, locked while it is made."""

    files = (PROBE, LOCK)
    results = (PARTS, SUMMARY)


@dataclass
class Probe:
    """State that all measurements of a probe share."""

    config: TrainConfig
    settings: ProbeConfig
    policy: Policy
    engine: RolloutEngine
    grader: Grader
    problems: Sequence[Problem]
    prompts: Sequence[tuple[int, ...]]

    def search(self) -> dict[str, Any]:
        """Measures how often the mean policy solves each candidate: for choosing among them, and for nothing else."""
        source, sampling = FixedWeights(self.policy.model), self.config.sampling
        looks = self.settings.looks
        completions = [] if self.settings.exact else self.complete(source, [None], looks, sampling, SEARCH)
        return {"rates": self.outcomes(source, completions, [None], looks, sampling.temperature).rates[:, 0].tolist()}

    def measure(self, condition: Condition, step: int) -> dict[str, Any]:
        """Measures a condition, and returns what its file holds; `step` gives it draws and rollouts of its own."""
        plain = condition.place in (MEAN, TEMPERATURE)
        count, each = self._shape(plain)
        sampling = self.config.sampling
        if condition.place == TEMPERATURE:
            sampling = replace(sampling, temperature=condition.size)
        source = FixedWeights(self.policy.model, None if plain else self.posterior(condition))
        draws = [None] if plain else [Draw(self.config.run.seed, step, i, Purpose.PROBE) for i in range(count + FRESH)]
        completions = self.complete(source, draws[:count], each, sampling, step)
        found = self.outcomes(source, completions, draws[:count], each, sampling.temperature)
        tokens = sum(len(c.tokens) for c in completions)
        measured: dict[str, Any] = {
            **asdict(condition),
            "rates": found.rates.tolist(),
            "rollouts": found.rollouts,
            "rollouts_right": float(np.mean([c.verdict is not None and c.verdict.correct for c in completions])),
            "entropy": -math.fsum(x for c in completions for x in c.logprobs) / tokens,
            "degenerate_share": float(np.mean(list(map(degenerate, completions)))),
            "length": tokens / len(completions),
        }
        return measured if plain else measured | self.distances(source, completions, draws[count:])

    def _shape(self, plain: bool) -> tuple[int, int]:
        """Draws, and completions of each on a problem; the mean gets those of all draws together.

        Exact chances leave only what is scored to be rolled out.
        """
        draws, rollouts = self.settings.draws, self.settings.rollouts
        if self.settings.exact:
            rollouts = min(rollouts, -(-SCORED // (draws * len(self.problems))))
        return (1, draws * rollouts) if plain else (draws, rollouts)

    def posterior(self, condition: Condition) -> Posterior:
        """The noise of a condition around the model's weights, of the structure that the recipe sets."""
        noise, named = self.config.noise, self.policy.model.named_parameters()
        if condition.place != POSTERIOR:
            own = condition.noise()
            return Posterior.around(named, replace(noise, unit=own.unit, size=own.size, where=own.where))
        if learned := prior(self.config):
            groups = (replace(group, ess=condition.size, noise_structure=noise.structure) for group in learned.groups)
            return replace(learned, groups=tuple(groups))
        ivon = self.config.optimizer if isinstance(self.config.optimizer, IVONConfig) else IVONConfig()
        sigma = 1 / math.sqrt(condition.size * (ivon.hess_init + ivon.weight_decay))
        return Posterior.around(named, replace(noise, unit="absolute", size=sigma, where=NoiseConfig().where))

    def complete(
        self, source: FixedWeights, draws: Sequence[Draw | None], each: int, sampling: SamplingConfig, step: int
    ) -> list[Completion]:
        """`each` graded completions of every problem by every draw."""
        completions: list[Completion] = []
        together = self.settings.draws_together
        for begin in range(0, len(draws), together):
            some = draws[begin : begin + together]
            self.engine.load(source, some, step)
            requests = [
                Request(problem, tokens, draw, (begin + d) * each + i)
                for problem, tokens in zip(self.problems, self.prompts, strict=True)
                for d, draw in enumerate(some)
                for i in range(each)
            ]
            # A seed of its own: training on the same problems must not sample the same completions.
            seed = address_key("threepo-probe", self.config.run.seed)[0] >> 1
            completions += graded(self.grader, self.engine.generate(requests, sampling, seed))
        return completions

    def outcomes(
        self,
        source: FixedWeights,
        completions: Sequence[Completion],
        draws: Sequence[Draw | None],
        each: int,
        temperature: float,
    ) -> Outcomes:
        """Shares of each problem that each draw solved: counted, or by the probability of the only answer."""
        if self.settings.exact:
            rows = [self._answer(i) for i in range(len(self.problems))]
            by_draw = [self._scores(source, rows, [draw] * len(rows), temperature) for draw in draws]
            return Outcomes(np.exp([[float(x.sum()) for x in column] for column in by_draw]).T, 0)
        problem_of = {problem.id: p for p, problem in enumerate(self.problems)}
        draw_of = {draw: d for d, draw in enumerate(draws)}
        right = np.zeros((len(self.problems), len(draws)))
        for c in completions:
            right[problem_of[c.problem.id], draw_of[c.draw]] += bool(c.verdict and c.verdict.correct)
        return Outcomes(right / each, each)

    def _answer(self, index: int) -> Completion:
        """The problem's answer at once, as if it had been generated."""
        problem, tokenizer = self.problems[index], self.policy.tokenizer
        tokens = (*tokenizer(problem.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
        request = Request(problem, self.prompts[index], None, 0)
        return Completion(**vars(request), tokens=tokens, logprobs=(), text="", finish_reason="stop", policy_step=0)

    def distances(
        self, source: FixedWeights, completions: Sequence[Completion], fresh: Sequence[Draw | None]
    ) -> dict[str, Any]:
        """KL per token of the draws to the mean, and what Seq-MIS keeps of their rollouts at a fresh draw."""
        rows = completions[:: max(1, len(completions) // SCORED)]
        temperature = self.config.sampling.temperature
        behaviour = [np.array(row.logprobs) for row in rows]
        at_mean = self._scores(source, rows, [None] * len(rows), temperature)
        at_fresh = self._scores(source, rows, [fresh[i % FRESH] for i in range(len(rows))], temperature)
        differences = [mean - own for mean, own in zip(at_mean, behaviour, strict=True)]
        kls = np.array([float((np.exp(d) - 1 - d).sum()) for d in differences])
        tokens = np.array([len(own) for own in behaviour])
        log_rho = np.array([float((f - own).sum()) for f, own in zip(at_fresh, behaviour, strict=True)])
        bounds = C3PO.correction
        kept = (log_rho >= math.log(bounds.low)) & (log_rho <= math.log(bounds.high))
        # Rows of one draw have errors in common, so the draws are what the standard errors count.
        of = [[i for i, row in enumerate(rows) if row.draw == draw] for draw in dict.fromkeys(r.draw for r in rows)]
        kl = float(kls.sum() / tokens.sum())
        residuals = np.array([(kls[mine] - kl * tokens[mine]).sum() for mine in of])
        by_length = np.array_split(np.argsort(tokens, kind="stable"), 4)
        return {
            "kl": kl,
            "kl_error": float(np.sqrt((residuals**2).sum()) / tokens.sum()),
            "kept_share": float(kept.mean()),
            "kept_share_error": float(np.std([kept[i::FRESH].mean() for i in range(FRESH)], ddof=1) / math.sqrt(FRESH)),
            "kept_share_by_length": [[float(tokens[part].mean()), float(kept[part].mean())] for part in by_length],
        }

    @torch.no_grad()
    def _scores(
        self, source: FixedWeights, rows: Sequence[Completion], draws: Sequence[Draw | None], temperature: float
    ) -> list[np.ndarray]:
        """The log-probs of each row's tokens at its draw, by the trainer's forward pass."""
        device, padding = self.policy.device, not self.policy.scorer.packed_rows
        found: dict[int, np.ndarray] = {}
        for draw in dict.fromkeys(draws):
            mine = [TrainingRow(row, i, 0.0) for i, row in enumerate(rows) if draws[i] == draw]
            with source.at(draw):
                for bundle in pack(mine, self.config.batching.tokens, device, padding=padding):
                    logprobs = self.policy.logprobs(flatten(bundle, device), temperature).logprobs
                    by_row = torch.split(logprobs.double().cpu(), [len(row.completion.tokens) for row in bundle])
                    found |= {row.index: own.numpy() for row, own in zip(bundle, by_row, strict=True)}
        return [found[i] for i in range(len(rows))]


def degenerate(completion: Completion) -> bool:
    """Whether a completion was cut, or has no answer."""
    return completion.finish_reason == "length" or bool(completion.verdict and completion.verdict.status == "no_answer")


def prior(config: TrainConfig) -> Posterior | None:
    """The learned posterior that training can start from: what the optimizer loads, or what lies next to the model."""
    loaded = getattr(config.optimizer, "load_hessian", "")
    folder = model_folder(Path(loaded or config.model.path))
    if config.model.lora.rank and not loaded and not adapter_folder(config.model.path):
        return None  # one around the weights that are frozen now
    found = Posterior.from_pretrained(folder) if loaded or (folder / FILE_NAME).is_file() else None
    return found if found and found.hessian else None


def conditions(config: TrainConfig, settings: ProbeConfig, policy: Policy) -> list[Condition]:
    """Conditions to measure, in this order; the sizes of a place ascend in KL to the mean."""
    found = [Condition(MEAN, config.sampling.temperature)]
    found += [Condition(TEMPERATURE, t) for t in settings.temperatures if t != config.sampling.temperature]
    for place in settings.places:
        if place == POSTERIOR:
            found += [Condition(place, ess) for ess in reversed(settings.ess)]
            continue
        places = layers(policy) if place == LAYERS else [place]
        if policy.has_adapters:  # most of the rest is frozen
            trained = trained_names(dict(policy.model.named_parameters()))
            places = [where for where in places if fits_any(where, trained)]
        found += [Condition(where, size) for where in places for size in settings.sizes]
    return found


def layers(policy: Policy) -> list[str]:
    """Patterns of names: the first, the middle and the last block, and what lies outside, as the last norm does."""
    blocks = policy.model.config.get_text_config().num_hidden_layers
    names = [name for name, _ in policy.model.named_parameters() if ".layers." not in name]
    outside = [name for name in names if layer_kind(name) not in ("embedding", "head")]
    return [f"*.layers.{i}.*" for i in sorted({0, blocks // 2, blocks - 1})] + outside


def probe(config: TrainConfig, settings: ProbeConfig, folder: Path) -> dict[str, Any]:
    """Measure everything; returns what summary.json holds. What is in `folder` already is read, not made again."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    recorded = {"train": to_dict(config), "probe": to_dict(settings)}
    if (folder / PROBE).is_file() and (other := first_difference(read_json(folder / PROBE)["config"], recorded)):
        raise UserError(f"--output {folder}: holds a probe under other settings ({other}); choose another folder")
    group, draws = config.method.rollouts_per_prompt, np.zeros((1, settings.draws))
    if not shares_of(Outcomes(draws, 0 if settings.exact else settings.rollouts), group):
        few = f"--draws {settings.draws} --rollouts {settings.rollouts}: too few for groups of {group}"
        raise UserError(f"{few}; set --rollouts {group}")
    training, grader = with_grader(open_training(config.data), config.reward, config.data)
    name = config.data.train
    if settings.exact and not (config.reward.function == "task" and name in TASKS and TASKS[name].only_answer):
        known = ", ".join(task.name for task in TASKS.values() if task.only_answer)
        raise UserError(f"--exact: {name} may have other right completions than its answer; tasks with none: {known}")
    with ProbeFolder(folder):
        policy = load_policy(replace(config.model, path=str(model_folder(Path(config.model.path)))), config.run.seed)
        longest = config.sampling.max_new_tokens
        source, _ = fit_context(training.problems, policy, config.data, longest)
        problems = source.first(settings.candidates)
        prompts = [policy.encode_prompt(problem, config.data, longest) for problem in problems]
        digest = weights_digest(policy, prior(config))
        if (folder / PROBE).is_file() and read_json(folder / PROBE)["weights"] != digest:
            raise UserError(f"--output {folder}: holds a probe of other weights; choose another folder")
        write_json(folder / PROBE, {"config": recorded, "weights": digest})
        with contextlib.closing(build_engine(config.engine, policy)) as engine:
            engine.prepare(min(settings.draws_together, settings.draws), max(map(len, prompts)) + longest)
            return _measured(Probe(config, settings, policy, engine, grader, problems, prompts), folder)


def _measured(probe: Probe, folder: Path) -> dict[str, Any]:
    """All measurements, one after another, and what follows from them."""
    config, settings = probe.config, probe.settings
    everything = conditions(config, settings, probe.policy)
    total = len(everything) + 2
    with polite_stop() as stop, progress("probe", total, 0, folder, unit="measurement") as reporter:

        def kept(number: int, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            file = folder / PARTS / f"{number:03d}.json"
            if not file.is_file():
                write_json(file, make())
            found = read_json(file)
            reporter.update(number + 1, {"kl": found.get("kl", 0.0)})
            obey(stop.signal_number, number + 1, total, folder, "measurement", "the same command continues it, in")
            return found

        rates = kept(0, probe.search)["rates"]
        hard = [i for i, rate in enumerate(rates) if rate <= settings.solved_at_most]
        if not hard:
            shutil.rmtree(folder / PARTS)  # so that the corrected command can use the same folder
            raise UserError(
                f"probe.solved_at_most = {settings.solved_at_most:g}: the mean policy solves each of the first "
                f"{len(rates)} problems more often (the least solved: {min(rates):.3g}), so there is nothing to "
                f"rescue; raise it, or choose harder problems"
            )
        taken = hard[: settings.problems]
        probe.problems, probe.prompts = [probe.problems[i] for i in taken], [probe.prompts[i] for i in taken]
        found: list[dict[str, Any]] = []
        for number, condition in enumerate(everything, start=1):
            last = found[-1] if found else {}
            if last.get("place") == condition.place and last.get("kl", 0.0) > MOST_KL:
                continue
            found.append(kept(number, partial(probe.measure, condition, number)))
        summary = findings(config, settings, found)
        if chosen := summary["chosen"]:
            condition = Condition(chosen["place"], chosen["size"])
            again = kept(total - 1, partial(probe.measure, condition, total))
            summary = findings(config, settings, found, again)
        reporter.update(total, {})
    counts = {"candidates": len(rates), "hard": len(hard), "measured_on": [p.id for p in probe.problems]}
    summary = {"model": config.model.path, "data": config.data.train, "problems": counts, **summary}
    write_json(folder / SUMMARY, finite(summary))
    return summary
