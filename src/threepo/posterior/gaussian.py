"""A learned posterior as an artifact: `posterior.safetensors` next to a Hugging Face model.

The model's weights are the mean. The file holds the Hessian of every trained parameter by name and in the parameter's
shape, so it does not depend on how training was sharded. Its metadata have the numbers that turn a Hessian into a
standard deviation. And metrics of a posterior: whether the Hessian has changed, and how large sigma is (method.md 1.6).
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from threepo.errors import UserError
from threepo.files import atomic_file
from threepo.posterior import kernels
from threepo.posterior.groups import sigma_scalars
from threepo.posterior.ivon import IVON
from threepo.posterior.layout import like_parameter, sampled, whole
from threepo.posterior.noise import noise_key
from threepo.posterior.operations import Perturb
from threepo.posterior.policy_optimizer import Weights, WeightSource, named_in_groups
from threepo.run_folder import model_folder
from threepo.types import Draw

FILE_NAME = "posterior.safetensors"
_FORMAT = "threepo-posterior-1"


@dataclass(frozen=True)
class GroupSettings:
    """What one parameter group's Hessians mean: sigma = noise_scale / sqrt(ess * (hessian + weight_decay))."""

    ess: float
    weight_decay: float
    noise_scale: float
    hess_init: float
    parameters: tuple[str, ...]
    noise_shape: Literal["learned", "isotropic"] = "learned"
    """`isotropic`: sigma is made of hess_init instead of the Hessian."""


@dataclass(frozen=True)
class Posterior:
    """A diagonal Gaussian around a model's weights.

    posterior = threepo.Posterior.from_pretrained("runs/my_run/checkpoints/step-100")
    model.load_state_dict(posterior.draw(0), strict=False)    # tied heads are not in the file
    """

    hessian: dict[str, torch.Tensor]
    """float32, by parameter name, in the parameter's shape."""
    groups: tuple[GroupSettings, ...]
    step: int
    """Optimizer steps that formed it; also the `step` of the draws that `draw` makes."""
    seed: int
    folder: Path | None = None
    """Where it was read from; the mean is in the model's files there."""

    def __repr__(self) -> str:
        elements = sum(hessian.numel() for hessian in self.hessian.values())
        folder = f", from {str(self.folder)!r}" if self.folder else ""
        return f"Posterior({len(self.hessian)} parameters, {elements:,} elements, step {self.step}{folder})"

    @classmethod
    def of(cls, optimizer: IVON, *, gather: bool = True) -> "Posterior":
        """The posterior that an optimizer holds now. Tensors are shared with it; sharded ones are gathered, so every
        rank must call, or stay as they are."""
        named = named_in_groups(optimizer.param_groups)
        groups = tuple(
            GroupSettings(
                parameters=tuple(name for name, p, own in named if own is group and p.requires_grad),
                **{name: group[name] for name in ("ess", "weight_decay", "noise_scale", "hess_init", "noise_shape")},
            )
            for group in optimizer.param_groups
        )
        held = {name: optimizer.state[p]["hessian"] for name, p, _ in optimizer.trainable()}
        hessian = {name: whole(value) for name, value in held.items()} if gather else held
        return cls(hessian, groups, optimizer.param_groups[0]["step"], optimizer.seed)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Posterior":
        """Read `posterior.safetensors` from a checkpoint, or from the newest one of a run folder.

        `UserError` if there is none or it is damaged.
        """
        folder = model_folder(Path(folder))
        path = folder / FILE_NAME
        if not path.is_file():
            raise UserError(
                f"{folder}: holds no {FILE_NAME}; only models trained with optimizer.kind = 'ivon' have one"
            )
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                hessian = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - not a dict
            if (found := metadata.get("format", _FORMAT)) != _FORMAT:
                raise UserError(f"{path}: format {found!r} is not {_FORMAT!r}; it was written by another version")
            entries = json.loads(metadata["groups"])
            groups = tuple(GroupSettings(**{**group, "parameters": tuple(group["parameters"])}) for group in entries)
            if missing := hessian.keys() - {name for group in groups for name in group.parameters}:
                raise KeyError(f"{min(missing)} is in no group")
            return cls(hessian, groups, int(metadata["step"]), int(metadata["seed"]), folder)
        except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise UserError(f"{path}: damaged ({error!r}); copy it again from where it was made") from error

    def save(self, folder: Path) -> None:
        """Write `posterior.safetensors` into `folder`."""
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.hessian.items()}
        with atomic_file(folder / FILE_NAME) as file:
            save_file(tensors, file, metadata=self.metadata())

    def metadata(self) -> dict[str, str]:
        """What the file says besides the Hessian."""
        groups = json.dumps([asdict(group) for group in self.groups])
        return {"format": _FORMAT, "groups": groups, "step": str(self.step), "seed": str(self.seed)}

    def address(self, index: int) -> Draw:
        """The address of the `index`-th draw of this posterior; indices below 0 do not exist."""
        return Draw(self.seed, self.step, index)

    def mean(self) -> dict[str, torch.Tensor]:
        """The model's weights by name, from the safetensors files next to `posterior.safetensors`."""
        if self.folder is None:
            raise UserError("posterior: was not read from a folder, so it has no mean; use perturb_ on the model")
        files = sorted(file for file in self.folder.glob("*.safetensors") if file.name.startswith("model"))
        if not files:
            raise UserError(f"{self.folder}: holds {FILE_NAME} but no model*.safetensors, so there is no mean")
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def draw(self, index: int) -> dict[str, torch.Tensor]:
        """The weights of the `index`-th draw by name, in the dtype of the saved model: a state dict for it."""
        weights = self.mean()
        self.perturb_(weights.items(), self.address(index))
        return weights

    def perturb_(self, parameters: Iterable[tuple[str, torch.Tensor]], draw: Draw) -> None:
        """Replace means, given by name, by the weights of `draw`, in place."""
        means = dict(parameters)
        for _ in self.weights(means, draw, into=means):
            pass

    @torch.no_grad()
    def weights(
        self, means: Weights, draw: Draw, into: Weights | None = None, *, gather: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and weights of a model with these means under `draw`; otherwise see WeightSource.weights.

        `UserError` if this is the posterior of another model.
        """
        for name, h in self.hessian.items():
            found = "is missing in the model" if name not in means else f"has shape {list(means[name].shape)} in it"
            if name not in means or h.shape != means[name].shape:
                raise UserError(f"posterior of {name} {list(h.shape)}: {found}; it belongs to another model")
        scalars = {name: sigma_scalars(vars(group)) for group in self.groups for name in group.parameters}
        for name, held in means.items():
            mean = whole(held) if gather else held
            if name not in self.hessian or not scalars[name].noise_scale:  # was frozen in training, or had no noise
                yield name, mean
                continue
            out = into[name] if into else torch.empty_like(mean)
            h = like_parameter(self.hessian[name].to(mean.device), mean)
            kernels.run([Perturb(out, mean, h, noise_key(draw, name), scalars[name])])
            yield name, out

    def load_into(self, optimizer: IVON) -> None:
        """Start an optimizer from this Hessian; its own ess, weight decay and learning rate stay (method.md 1.5)."""
        for name, p, _ in optimizer.trainable():
            h = self.hessian.get(name)
            if h is None or h.shape != p.shape:
                found = "is missing" if h is None else f"has shape {list(h.shape)}, not {list(p.shape)}"
                raise UserError(f"optimizer.load_hessian: the Hessian of {name} {found}; it belongs to another model")
            optimizer.state[p]["hessian"].copy_(like_parameter(h, p))


@dataclass(frozen=True)
class FixedWeights:
    """A loaded model, with its posterior if it has one, as a source of weights for a rollout engine."""

    model: torch.nn.Module
    posterior: Posterior | None = None

    def weights(
        self, draw: Draw | None, into: Weights | None = None, *, gather: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of the model's weights under `draw`; without a posterior only the mean exists."""
        means = {name: p.detach() for name, p in self.model.named_parameters()}
        if draw is None:
            yield from ((name, whole(mean) if gather else mean) for name, mean in means.items())
        elif self.posterior is None:
            raise UserError(f"the model has no {FILE_NAME}, so no draws can be made of it; set eval.draws = 0")
        else:
            yield from self.posterior.weights(means, draw, into, gather=gather)


def distribution(source: WeightSource) -> tuple[dict[str, torch.Tensor], Posterior | None]:
    """The means of a source by name, as draws are made of them, and the posterior around them; sharded as they are."""
    if isinstance(source, IVON):
        named = named_in_groups(source.param_groups)
        means = {name: source.state[p].get("mean", p.detach()) for name, p, _ in named}
        return means, Posterior.of(source, gather=False)
    return dict(source.weights(None)), source.posterior if isinstance(source, FixedWeights) else None


SAMPLE = 4096
"""Elements read per parameter, about: evenly spaced, the same ones every time."""

_KINDS = (("embed", "embedding"), ("lm_head", "head"), ("norm", "norm"), ("attn", "attention"), ("mlp", "mlp"))


def layer_kind(name: str) -> str:
    """Which kind of layer a parameter belongs to, by the names that Hugging Face decoders share."""
    return next((kind for part, kind in _KINDS if part in name), "other")


@torch.no_grad()
def posterior_metrics(optimizer: IVON) -> dict[str, float]:
    """Quantiles of h / h0, its share outside [0.9, 1.1], ess, and sigma over RMS weight, whole and per layer kind.

    All come from an even subsample of every parameter, weighted by the parameter's size. With sharded parameters every
    rank must call it, and all get the same numbers, which do not depend on the sharding.
    """
    ratios, weights = [], []
    squares: dict[str, list[float]] = {}  # kind -> [sum of sigma^2, sum of weight^2]
    entries = [entry for entry in optimizer.trainable() if entry[1].numel()]
    hessians = sampled(((p, optimizer.state[p]["hessian"]) for _, p, _ in entries), _stride)
    means = sampled(((p, p) for _, p, _ in entries), _stride)
    for (name, p, group), h, m in zip(entries, hessians, means, strict=True):
        ratios.append(h / group["hess_init"])
        weights.append(torch.full_like(h, p.numel() / len(h)))
        sigma = sigma_scalars(group).sigma(h)
        total = squares.setdefault(layer_kind(name), [0.0, 0.0])
        total[0] += float(sigma.square().mean()) * p.numel()
        total[1] += float(m.square().mean()) * p.numel()
    ratio, weight = torch.cat(ratios), torch.cat(weights).double()
    outside = ((ratio < 0.9) | (ratio > 1.1)).double()
    ordered, index = ratio.sort()
    cumulative, levels = weight[index].cumsum(0), (5, 50, 95)
    sums = torch.tensor(levels, dtype=torch.float64) / 100 * cumulative[-1]
    quantiles = ordered[torch.searchsorted(cumulative, sums).clamp(max=len(ordered) - 1)].tolist()
    metrics = {f"posterior/hessian_p{level:02d}": q for level, q in zip(levels, quantiles, strict=True)}
    metrics["posterior/hessian_outside_share"] = float((outside * weight).sum() / weight.sum())
    metrics["posterior/ess"] = float(optimizer.param_groups[0]["ess"])
    everything = [sum(column) for column in zip(*squares.values(), strict=True)]
    metrics["posterior/sigma_to_rms"] = _root_ratio(*everything)
    return metrics | {f"posterior/sigma_to_rms/{kind}": _root_ratio(*totals) for kind, totals in squares.items()}


@torch.no_grad()
def sigma_growth(optimizer: IVON) -> dict[str, float]:
    """Median over the weights of each layer kind of sigma, divided by what it is while the Hessian is hess_init.

    A collective like posterior_metrics.
    """
    ratios: dict[str, list[torch.Tensor]] = {}
    entries = [entry for entry in optimizer.trainable() if entry[1].numel()]
    hessians = sampled(((p, optimizer.state[p]["hessian"]) for _, p, _ in entries), _stride)
    for (name, _, group), h in zip(entries, hessians, strict=True):
        ratio = ((group["hess_init"] + group["weight_decay"]) / (h + group["weight_decay"])).sqrt()
        ratios.setdefault(layer_kind(name), []).append(ratio)
    return {kind: float(torch.cat(found).median()) for kind, found in ratios.items()}


def _stride(p: torch.Tensor) -> int:
    """About SAMPLE elements of all columns: a stride that shares a factor with the row's length would miss some."""
    stride = max(1, p.numel() // SAMPLE)
    while p.ndim > 1 and math.gcd(stride, p.shape[-1]) > 1:
        stride -= 1
    return stride


def _root_ratio(sigma_square: float, weight_square: float) -> float:
    return math.sqrt(sigma_square / weight_square) if weight_square > 0 else math.inf
