"""A certificate of weights: does a rollout engine compute with the weights that training pushed? (docs/certificate.md)

    certificate = Certificate(model)
    certificate.rehearse(engine, push)  # once, instead of the first push
    ...
    push()
    certificate.check(engine)  # after every push

For any trainer with a PyTorch model, and any engine that tells log-probs. It compares the engine's log-probs of a fixed
prompt with those of the model (rollout/weight_check.py). Wrong weights raise `WrongWeights`.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from threepo.errors import UserError
from threepo.rollout.foreign_engines import Engine, completions_server, sglang_server, vllm_engine
from threepo.rollout.weight_check import (
    GUESS,
    KNOWN_AFTER,
    MARGIN,
    TOLERANCE,
    UNUSUAL,
    Judge,
    Logprobs,
    Others,
    Rounding,
    all_logprobs,
    fixed_prompt,
)
from threepo.types import Arm, Draw, Purpose

__all__ = ["Certificate", "Engine", "Result", "WrongWeights", "completions_server", "sglang_server", "vllm_engine"]

LENGTH = 160
"""Tokens of the fixed prompt: more than one block of vLLM's prefix cache, which has 128 tokens on a CPU."""
SIZE = 0.1
"""Noise of a rehearsal, in units of a tensor's root mean square: 25 times as coarse as bfloat16."""
CLEAR, FACTORS = 20.0, (1.0, 4.0, 16.0)
"""Noise is made larger by these factors until it moves log-probs so many times as far as rounding."""
SHARE = 0.1
"""Rounding may move log-probs by this share of what noise has moved them by, since noise makes it larger."""
CAUSES = (
    "Push all tensors again and reset the prefix cache; if it stays, the push loses or changes tensors, this version "
    "of the engine reloads the model wrongly, or it computes more coarsely than the tolerance allows"
)
COARSE, COARSE_AFTER = 3.0, 12.0
"""So many times the measured rounding is allowed on average, for a prompt and for one token, if that is more."""
REMEMBERED = 100
"""Earlier checks whose weights are remembered, besides the first."""
Push = Callable[[], Any]


@dataclass(frozen=True)
class Result:
    """The outcome of a check. Differences of log-probs are in nats."""

    engine: str
    ok: bool
    mean: float
    """Mean difference over the prompt."""
    largest: float
    following: float | None
    """Mean difference over the most probable tokens after the prompt; None: not compared."""
    tokens: int
    dtype: str
    reason: str = ""
    """The fault, in one line."""
    arrived: tuple[str, ...] = ()
    """Kinds of tensors that a rehearsal has shown to arrive."""
    unseen: tuple[str, ...] = ()
    """Kinds of tensors that a rehearsal could not tell apart from rounding."""

    def __str__(self) -> str:
        if not self.ok:
            return self.reason
        words = f"{self.engine} computes with the model's weights. {self.off}"
        if self.arrived or self.unseen:
            words += f"; a push has reached {len(self.arrived)} kinds of tensors"
        return words + (f", and cannot be seen in {', '.join(self.unseen)}" if self.unseen else "")

    @property
    def off(self) -> str:
        """The size of the differences, in words."""
        off = f"off by {self.mean:.2g} on average and {self.largest:.2g} at most"
        return f"Log-probs of a fixed prompt ({self.tokens} tokens, {self.dtype}) are {off}"

    def json(self) -> str:
        """The fields as one line of JSON; a number that is not finite is null."""
        finite = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in asdict(self).items()}
        return json.dumps(finite)


class WrongWeights(UserError):
    """The engine computes with other weights than the model's; `result` has the numbers."""

    exit_status = 1

    def __init__(self, found: Result, reason: str) -> None:
        super().__init__(reason)
        self.result = replace(found, ok=False, reason=reason)


class _Alone(NamedTuple):
    """Noise in one kind of tensor alone."""

    names: list[str]
    factor: float
    expected: torch.Tensor
    """Log-probs of the prompt with this noise."""


class Certificate:
    """Tells whether an engine computes with a model's weights, as they are when it is asked.

    Args:
        model: a causal LM of transformers, whole on this device; it is not changed.
        dtype: to which weights are cast to be compared. None: the engine's; if it does not tell, the model's, but
            bfloat16 for float32.
        tolerance: largest mean difference in log-prob (nats). None: 1e-3 in float32; in other dtypes 0.1, or three
            times the rounding that the model itself shows, computed once in the dtype and once in float32, if that is
            more; then also at most six times this rounding as a root mean square.
    """

    def __init__(self, model: Any, *, dtype: torch.dtype | None = None, tolerance: float | None = None) -> None:
        if tolerance is not None and not tolerance > 0:
            raise UserError(f"tolerance = {tolerance:g}: must be above 0")
        self.model = model
        self._dtype, self._tolerance = dtype, tolerance
        self._measures, self._rounded = False, 0.0
        """Whether the size of rounding is measured, not learned from an engine; and how large it is."""
        self._tokens: tuple[int, ...] = ()
        self._rounding: Rounding
        """Rounding of the log-probs of the model as it is, without noise."""
        self._checks = 0
        self._others: dict[str, torch.Tensor] = {}
        """Log-probs under weights that the engine may wrongly hold: of the first check and of the latest."""

    def check(self, engine: Engine) -> Result:
        """Compare the engine's log-probs with the model's; `WrongWeights` if they differ by more than rounding."""
        self._begin(engine)
        self._checks += 1
        expected, after = self._logprobs(self._weights())
        found, told, ours = self._ask(engine, expected, after)
        if self._measures:
            if _distance(torch.as_tensor(told.prompt), expected) > MARGIN * self._rounded:  # it may grow in training
                self._rounded = self._rounding_of(self._weights(), expected)
            self._rounding = Rounding(self._rounded**2, KNOWN_AFTER)
        self._judge(found, told, ours, f"the model at check {self._checks}", self._rounding, self._others, 0.0)
        self._others[f"the weights of check {self._checks}"] = expected
        if len(self._others) > REMEMBERED:
            del self._others[list(self._others)[1]]
        return found

    def rehearse(self, engine: Engine, push: Push) -> Result:
        """Prove that a push arrives: push the model, the model with noise, and the model again, with a check of each.

        Meanwhile the model holds the noise, addressed like all of threepo's; then it is what it was, bit for bit, also
        after an error. If the noise does not arrive, it is pushed once more in each kind of tensor alone, and
        `WrongWeights` names those that were lost. Tensors that do not require gradients have noise only if none does.
        """
        if any(".experts" in name for name, _ in self.model.named_parameters()):
            why = "with noise, rounding makes a mixture of experts choose other experts, which looks like wrong weights"
            raise UserError(f"rehearsal: {why}; use check alone, CertificateCallback(trainer, rehearse=False) in TRL")
        push()
        self.check(engine)
        frozen = [p.detach() for p in self.model.parameters() if not p.requires_grad]  # a push may merge adapters
        kept = [p.to("cpu", copy=True) for p in frozen]
        try:
            arrived, unseen = self._push_noise(engine, push)
        finally:
            for p, value in zip(frozen, kept, strict=True):
                p.copy_(value)
            push()
        return replace(self.check(engine), arrived=arrived, unseen=unseen)

    def _push_noise(self, engine: Engine, push: Push) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Push the model with noise, and raise `WrongWeights` unless the engine follows.

        Returns the kinds of tensors of which the log-probs have shown that they arrive, and the others.
        """
        mean = self._others[f"the weights of check {self._checks}"]
        alone = self._audible(mean)
        source, draw = self._noise({kind: own.factor for kind, own in alone.items()}), self._draw()
        noisy, still = self._cast(source.weights(draw)), self._cast(source.named())
        expected, after = self._logprobs(noisy)
        measured = self._rounding_of(noisy, expected) if self._measures else 0.0
        rounding = Rounding((measured or self._rounding.size) ** 2, KNOWN_AFTER if measured else 0)
        without = {}  # by the kind of tensor that has no noise, where all others have it
        for kind, own in alone.items():
            without[kind], _ = self._logprobs(noisy | {name: still[name] for name in own.names})
        del noisy, still
        others = {"the weights without the noise": mean}
        others |= {f"the weights with noise everywhere but in {kind}": x for kind, x in without.items()}
        moved, wrong = (expected - mean).abs().mean().item(), None
        with source.perturbed(draw):
            push()
            found, told, ours = self._ask(engine, expected, after)
            try:
                self._judge(found, told, ours, "the model with the rehearsal's noise", rounding, others, moved)
            except WrongWeights as error:
                wrong = error
        large = not self._measures and found.mean > UNUSUAL * self._rounding.size  # or rounding has grown
        if (wrong or large) and (lost := self._lost(engine, push, alone, mean)):
            wrong = WrongWeights(found, f"{engine.name} does not follow a push: {lost}. {found.off}. {CAUSES}")
        if wrong:
            raise wrong
        self._others["the weights with the rehearsal's noise"] = expected
        seen = tuple(kind for kind, x in without.items() if _distance(x, expected) > MARGIN * rounding.size)
        return seen, tuple(kind for kind in alone if kind not in seen)

    def _begin(self, engine: Engine) -> None:
        """Choose dtype, tolerance and prompt by the first engine that is asked."""
        if self._tokens:
            return
        own = next(self.model.parameters()).dtype
        likely = torch.bfloat16 if own == torch.float32 else own  # engines do so
        self._dtype = self._dtype or engine.dtype or likely
        self._measures = self._tolerance is None and self._dtype != torch.float32
        self._tolerance = self._tolerance or TOLERANCE.get(self._dtype, TOLERANCE[torch.bfloat16])
        self._rounding = Rounding((self._tolerance / GUESS) ** 2)
        config = self.model.config.get_text_config()
        rooms = getattr(config, "max_position_embeddings", None), engine.longest
        self._tokens = fixed_prompt(self.model.get_input_embeddings().weight.shape[0], *rooms, length=LENGTH)

    def _cast(self, named: Any) -> dict[str, torch.Tensor]:
        return {name: p.to(self._dtype) if p.is_floating_point() else p for name, p in named}

    def _weights(self) -> dict[str, torch.Tensor]:
        return self._cast((name, p.detach()) for name, p in self.model.named_parameters())

    def _rounding_of(self, weights: Mapping[str, torch.Tensor], logprobs: torch.Tensor) -> float:
        """The distance between two ways to round, if each moves log-probs as far as the model's dtype does."""
        exact, _ = self._logprobs({name: x.float() if x.is_floating_point() else x for name, x in weights.items()})
        return math.sqrt(2) * _distance(exact, logprobs)

    def _logprobs(self, weights: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the prompt, and of every token that may follow it, by the model under these weights."""
        parameters = dict(self.model.named_parameters())
        for name, p in parameters.items():
            if type(p) is not torch.nn.Parameter or hasattr(p, "ds_id") or "_flat_param" in name:
                what = f"Certificate: {name} is sharded or quantised, and the model is needed whole"
                raise UserError(f"{what}; save it, and run `threepo certify URL --model PATH`")
        device = next(iter(parameters.values())).device
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()  # dropout would be a difference
        wrapped = vars(self.model).pop("forward", None)  # accelerate puts autocast around it
        try:
            with torch.autocast(device.type, enabled=False):
                return all_logprobs(self.model, weights, self._tokens, device)
        finally:
            if wrapped:
                self.model.forward = wrapped
            for module, training in modes:
                module.training = training

    def _ask(self, engine: Engine, expected: torch.Tensor, after: torch.Tensor) -> tuple[Result, Logprobs, Logprobs]:
        """The differences that an engine shows, which are still to be judged; its log-probs; and the model's.

        Generation comes first: to read a prompt's log-probs, an engine computes anew what its cache had.
        """
        following = engine.following(self._tokens) if engine.following else {}
        prompt = engine.prompt(self._tokens)
        if len(prompt) != len(expected):
            needed = f"those of all tokens but the first are needed, {len(expected)}"
            raise UserError(f"{engine.name}: tells {len(prompt)} log-probs of {len(self._tokens)} tokens; {needed}")
        if max(following, default=0) >= len(after):
            why = f"has a token {max(following)}, and the model has a vocabulary of {len(after)}"
            raise UserError(f"{engine.name}: {why}: it serves another model")
        told, ours = Logprobs(prompt, list(following.values())), Logprobs(expected, after[list(following)])
        apart, apart_after = ((torch.as_tensor(x) - torch.as_tensor(y)).abs() for x, y in zip(told, ours, strict=True))
        found = Result(
            engine=engine.name,
            ok=True,
            mean=apart.mean().item(),
            largest=apart.max().item(),
            following=apart_after.mean().item() if following else None,
            tokens=len(self._tokens),
            dtype=str(self._dtype).removeprefix("torch."),
        )
        return found, told, ours

    def _judge(
        self, found: Result, told: Logprobs, ours: Logprobs, what: str, rounding: Rounding, others: Others, moved: float
    ) -> None:
        """Raise `WrongWeights` if the log-probs are not those of `what`; otherwise `rounding` learns from them.

        `moved`: how far noise has moved them on average.
        """
        assert self._tolerance
        usual = rounding.size if self._measures else 0.0
        tolerance = max(self._tolerance, SHARE * moved, COARSE * usual)
        allowed = [(tolerance, rounding)]
        if found.following is not None:  # errors at one position hang together
            allowed.append((max(tolerance, COARSE_AFTER * usual), Rounding(0.0)))
        if not torch.as_tensor(ours.prompt).isfinite().all():  # float16 may overflow: nothing can be said of the engine
            raise UserError(f"the log-probs of the model at {what} are not finite; load it in float32 or bfloat16")
        judge = Judge(found.engine, "tolerance", CAUSES, "rounding explains")
        try:
            square, *_ = judge.compare(what, told, ours, others, *allowed)
        except UserError as error:
            raise WrongWeights(found, str(error)) from None
        rounding.learn(square)

    def _draw(self, kind: str = "", factor: float = 1.0) -> Draw:
        return Draw(0, self._checks, 0, Purpose.PROBE, arm=Arm(kind, factor) if kind else None)

    def _noise(self, factors: Mapping[str, float]) -> Any:
        """The model as a source of draws, with noise of `SIZE` times the factor of a kind; a zero counts as 1."""
        from threepo.posterior.gaussian import FixedWeights, Posterior
        from threepo.posterior.noise_sizes import by_size, root_mean_square, trained_names
        from threepo.posterior.perturbation import NoiseGroup

        parameters = dict(self.model.named_parameters())
        kinds = _kinds(trained_names(parameters))
        factor_of = {name: factors.get(kind, 1.0) for kind, names in kinds.items() for name in names}
        sizes = {name: SIZE * x * (root_mean_square(parameters[name]) or 1.0) for name, x in factor_of.items()}
        groups = [NoiseGroup(1.0, 0.0, x, 1.0, tuple(names), "isotropic") for x, names in by_size(sizes).items()]
        return FixedWeights(self.model, Posterior({}, tuple(groups), 0, 0))

    def _audible(self, mean: torch.Tensor) -> dict[str, _Alone]:
        """Find noise for each kind of tensor that, alone, moves log-probs clearly more than rounding, if any does."""
        source, alone, clear = self._noise({}), {}, CLEAR * self._rounding.size
        for kind, names in _kinds(source.posterior.noisy_names).items():
            for factor in FACTORS:
                expected, _ = self._logprobs(self._cast(source.weights(self._draw(kind, factor))))
                if _distance(expected, mean) > clear:
                    break
            alone[kind] = _Alone(names, factor, expected)
        return alone

    def _lost(self, engine: Engine, push: Push, alone: Mapping[str, _Alone], mean: torch.Tensor) -> str:
        """Push noise in one kind of tensor at a time, and say which did not arrive."""
        missing, changed = [], []
        source, rounding = self._noise({}), self._rounding.size
        audible = {kind: a for kind, a in alone.items() if _distance(a.expected, mean) > MARGIN * rounding}
        for kind, (_, factor, expected) in audible.items():
            with source.perturbed(self._draw(kind, factor)):
                push()
                found = torch.tensor(engine.prompt(self._tokens))
            right, none = _distance(found, expected), _distance(found, mean)
            if none < right / 2:
                missing.append(kind)
            elif not right <= max(UNUSUAL * rounding, SHARE * _distance(expected, mean)):
                changed.append(kind)
        words = {"does not arrive in": missing, "arrives in part or changed in, or behind,": changed}
        every = "any kind of tensor" if len(missing) == len(audible) else ""
        return "; ".join(f"noise {what} {every or ', '.join(found)}" for what, found in words.items() if found)


def _kinds(names: Any) -> dict[str, list[str]]:
    """Names by what they have in common in all layers."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    return kinds


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).square().mean().sqrt().item()
