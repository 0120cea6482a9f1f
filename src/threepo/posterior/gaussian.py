"""A learned posterior as an artifact: `posterior.safetensors` next to a Hugging Face model.

The model's weights are the mean. The file holds the Hessian of every trained parameter by name and in the parameter's
shape, so it does not depend on how training was sharded. Its metadata have the numbers that turn a Hessian into a
standard deviation.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from threepo.config import NoiseConfig
from threepo.errors import UserError
from threepo.files import atomic_file, write_json
from threepo.posterior.ivon import IVON
from threepo.posterior.noise_sizes import by_size, fits_any, layer_kind, noise_sizes
from threepo.posterior.perturbation import NoiseGroup, NoisyParameter, Perturbable, weights_under
from threepo.posterior.policy_optimizer import Weights, WeightSource, model_name
from threepo.posterior.shards import like_parameter, whole
from threepo.run_folder import POSTERIOR_FILE, model_folder
from threepo.types import Arm, Draw

_FORMAT = "threepo-posterior-2"
_HESSIAN = "hessian/"
"""Before the parameter's name: programs that read all safetensors files of a folder must not take it for a weight."""


@dataclass(frozen=True)
class Posterior:
    """A diagonal Gaussian around a model's weights.

        posterior = threepo.Posterior.from_pretrained("runs/my_run/checkpoints/step-000100")
        posterior.perturb_(model.named_parameters(), posterior.address(0))  # the model is now a sample

    Examples:
        >>> optimizer = threepo.IVON([("weight", torch.nn.Parameter(torch.ones(3)))])
        >>> threepo.Posterior.of(optimizer)
        Posterior(1 parameters, 3 elements, step 0)
    """

    hessian: dict[str, torch.Tensor]
    """float32, by parameter name, in the parameter's shape."""
    groups: tuple[NoiseGroup, ...]
    step: int
    """Optimizer steps that formed it; also the `step` of the draws that `draw` makes."""
    seed: int
    folder: Path | None = None
    """The folder that it was read from, whose model files hold the mean."""
    has_arms: bool = False
    """True if the run chose arms (method.md 3.11): its noise is the unit of their sizes, and nothing to draw from."""

    def __repr__(self) -> str:
        elements = sum(hessian.numel() for hessian in self.hessian.values())
        learned = f"{len(self.hessian)} parameters, {elements:,} elements"
        fixed = f"fixed noise on {len(self.noisy_names)} parameters"
        folder = f", from {str(self.folder)!r}" if self.folder else ""
        return f"Posterior({learned if self.hessian else fixed}, step {self.step}{folder})"

    @property
    def noisy_names(self) -> list[str]:
        """Names of the parameters that have noise."""
        return [name for group in self.groups if group.noise_scale for name in group.parameters]

    @property
    def is_point(self) -> bool:
        """True if there is neither noise nor a Hessian, as in an AdamW without [noise]."""
        return not self.hessian and not any(group.noise_scale for group in self.groups)

    @classmethod
    def of(cls, optimizer: Any, *, gather: bool = True) -> "Posterior":
        """The posterior that an optimizer holds now. Tensors are shared with it; sharded ones are gathered, so every
        rank must call, or stay as they are."""
        groups, first = optimizer.noise_groups(), optimizer.param_groups[0]
        entries = optimizer.trainable() if isinstance(optimizer, IVON) else []
        held = {name: optimizer.state[p]["hessian"] for name, p, _ in entries}
        hessian = {name: whole(value) for name, value in held.items()} if gather else held
        return cls(hessian, groups, first["step"], first["seed"])

    @classmethod
    def around(cls, named: Iterable[tuple[str, torch.Tensor]], noise: NoiseConfig) -> "Posterior":
        """Noise of a given size around any model's weights; `UserError` if [noise] only scales a learned posterior."""
        lacks = f"the model has no {POSTERIOR_FILE}, so no sigma to scale"
        noise.check("unit", noise.unit != "posterior", f"{lacks}; set noise.unit = 'absolute' or 'rms', and noise.size")
        groups = tuple(
            NoiseGroup(1.0, 0.0, sigma, 1.0, tuple(names), "isotropic", noise.group_structure)
            for sigma, names in by_size(noise_sizes(named, noise)).items()
        )
        return cls({}, groups, step=0, seed=0)

    def scaled(self, noise: NoiseConfig) -> "Posterior":
        """This posterior with its sigma times the factors of [noise], whose unit is "posterior".

        `UserError` for another structure than the posterior's own.
        """
        if structure := noise.group_structure:
            setting = "structure" if noise.structure else structure.partition("=")[0]
            own = all(group.noise_structure == structure for group in self.groups)
            noise.check(setting, own, "the posterior has a structure of its own; remove it")
        asked = replace(noise, where={key: factor for key, factor in noise.where.items() if factor})
        factors = noise_sizes(((name, torch.empty(0)) for name in self.noisy_names), asked) if self.noisy_names else {}
        groups = [
            replace(group, noise_scale=group.noise_scale * factor, parameters=tuple(names))
            for group in self.groups
            for factor, names in by_size({name: factors.get(name, 0.0) for name in group.parameters}).items()
        ]
        return replace(self, groups=tuple(groups))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Posterior":
        """Read `posterior.safetensors` from a checkpoint, or from the newest one of a run folder.

        `UserError` if there is none or it is damaged.
        """
        folder = model_folder(Path(folder))
        path = folder / POSTERIOR_FILE
        if not path.is_file():
            fix = "check the path; only models trained with noise have one"
            raise UserError(f"{folder}: holds no {POSTERIOR_FILE}; {fix} (`threepo eval noise.unit=rms` needs none)")
        with _opened(path) as (file, metadata):
            read = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - not a dict
            hessian = {name.removeprefix(_HESSIAN): value for name, value in read.items()}
            step, seed = int(metadata["step"]), int(metadata["seed"])
            return cls(hessian, _groups(metadata), step, seed, folder, "arms" in metadata)

    def save(self, folder: str | Path) -> None:
        """Write `posterior.safetensors` into `folder`."""
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.tensors().items()}
        with atomic_file(Path(folder) / POSTERIOR_FILE) as file:
            save_file(tensors, file, metadata=self.metadata())
        index_weights(Path(folder))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the file by their names there."""
        return {_HESSIAN + name: value for name, value in self.hessian.items()}

    def metadata(self) -> dict[str, str]:
        """Metadata of the file: everything except the Hessian."""
        groups = json.dumps([asdict(group) for group in self.groups])
        arms = {"arms": "chosen"} if self.has_arms else {}
        return {"format": _FORMAT, "groups": groups, "step": str(self.step), "seed": str(self.seed), **arms}

    def refuse_arms(self) -> None:
        """Raise `UserError` if the run chose arms."""
        if self.has_arms:
            fix = "name one (--arm 'norm 0.3'), or use the mean; an evaluation takes noise.unit = 'rms' and noise.size"
            what = "was trained with arms of many places and sizes, so it has no posterior"
            raise UserError(f"{self.folder or 'posterior'}: {what}; {fix}")

    def address(self, index: int, arm: Arm | None = None) -> Draw:
        """The address of the `index`-th draw of this posterior; indices below 0 do not exist.

        `arm`: place and size of its noise, which a run that chose arms needs: `threepo.Arm("attention", 0.65)`. The
        size is a factor of the noise that the run has. `UserError` if it is missing there, or fits no parameter.
        """
        if arm is None:
            self.refuse_arms()
        elif not fits_any(arm.place, self.noisy_names):
            kinds = ", ".join(dict.fromkeys(map(layer_kind, self.noisy_names)))
            has = f"it has the kinds {kinds}" if kinds else "the run had none"
            raise UserError(f"arm {str(arm)!r}: no parameter with noise fits {arm.place!r}; {has}")
        return Draw(self.seed, self.step, index, arm=arm)

    def mean(self) -> dict[str, torch.Tensor]:
        """The model's weights by name, from the safetensors files next to `posterior.safetensors`.

        For adapters, returns the adapter weights, by their names in a model of transformers' `add_adapter`.
        """
        if self.folder is None:
            raise UserError("posterior: was not read from a folder, so it has no mean; use perturb_ on the model")
        starts = ("model", "adapter_model")
        files = sorted(file for file in self.folder.glob("*.safetensors") if file.name.startswith(starts))
        if not files:
            raise UserError(f"{self.folder}: holds {POSTERIOR_FILE} but no model*.safetensors, so there is no mean")
        return {_in_model(name): tensor for file in files for name, tensor in load_file(file).items()}

    def draw(self, index: int, arm: Arm | None = None) -> dict[str, torch.Tensor]:
        """The weights of the `index`-th draw by name, in the dtype of the saved model: a state dict for it.

        `arm`: see `address`.
        """
        weights = self.mean()
        self.perturb_(weights.items(), self.address(index, arm))
        return weights

    def perturb_(self, parameters: Iterable[tuple[str, torch.Tensor]], draw: Draw) -> None:
        """Replace means, given by name, by the weights of `draw`, in place.

        After a forward pass of an FSDP2 model call `reshard()` of its modules, or a gathered copy hides the draw.
        """
        means = {model_name(name): p for name, p in parameters}
        for _ in weights_under(means.items(), self.noisy(means), draw, into=means):
            pass
        torch.clear_autocast_cache()  # it may hold copies of the means

    def noisy(self, means: Weights) -> list[NoisyParameter]:
        """Parameters that draws perturb in a model with these means; `UserError` if it is not the posterior's model."""
        settings = {name: group for group in self.groups for name in group.parameters}
        for name in settings:
            if name not in means:
                raise UserError(f"posterior of {name}: is missing in the model; it belongs to another model")
            shape, own = list(means[name].shape), list(self.hessian.get(name, means[name]).shape)
            if shape != own:
                raise UserError(f"posterior of {name} {own}: has shape {shape} here; it belongs to another model")
        return [
            NoisyParameter.of(name, mean, mean, self.hessian.get(name, mean), vars(settings[name]))
            for name, mean in means.items()
            if name in settings and settings[name].noise_scale  # else it was frozen in training, or has no noise
        ]

    def load_into(self, optimizer: IVON) -> None:
        """Start an optimizer from this Hessian; its own ess, weight decay and learning rate stay (method.md 1.5)."""
        if not self.hessian:
            fixed = "has noise of a given size and no Hessian; name a run of IVON, or leave it out"
            raise UserError(f"optimizer.load_hessian: {self.folder} {fixed}")
        for name, p, _ in optimizer.trainable():
            h = self.hessian.get(name)
            if h is None or h.shape != p.shape:
                found = "is missing" if h is None else f"has shape {list(h.shape)}, not {list(p.shape)}"
                fix = "it belongs to another model"
                if h is None and ".lora_" in name:
                    fix = "its run trained other weights; set [model.lora] as there, or leave load_hessian out"
                raise UserError(f"optimizer.load_hessian: the Hessian of {name} {found}; {fix}")
            optimizer.state[p]["hessian"].copy_(like_parameter(h, p))


def index_weights(folder: Path) -> None:
    """Write the index of a model in one file, by which other programs know it.

    vLLM would otherwise load all files of tensors, so that the Hessian, whose tensors have the same names, replaces the
    weights without a word.
    """
    file = folder / "model.safetensors"
    if file.is_file():
        with safe_open(file, framework="pt") as opened:
            weight_map = dict.fromkeys(opened.keys(), file.name)
        write_json(folder / f"{file.name}.index.json", {"metadata": {}, "weight_map": weight_map})


@dataclass
class FixedWeights(Perturbable):
    """A loaded model, with its posterior if it has one, as a source of weights for a rollout engine."""

    model: torch.nn.Module
    posterior: Posterior | None = None

    def __post_init__(self) -> None:
        self._model = self.model

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Every parameter with its name."""
        return [(name, p.detach()) for name, p in self.model.named_parameters()]

    @property
    def has_noise(self) -> bool:
        """True if the model has a posterior."""
        return self.posterior is not None

    def noisy(self) -> list[NoisyParameter]:
        """Parameters that draws perturb; `UserError` if the model has no posterior."""
        if self.posterior is None:
            raise UserError(f"the model has no {POSTERIOR_FILE}, so no draws can be made of it; set eval.draws = 0")
        return self.posterior.noisy(dict(self.named()))


def posterior_of(model: torch.nn.Module, folder: str, noise: NoiseConfig) -> Posterior:
    """The noise that [noise] names around a model from `folder`: its own posterior's, or one of a given size."""
    if noise.unit != "posterior":
        return Posterior.around(model.named_parameters(), noise)
    posterior = Posterior.from_pretrained(folder)
    posterior.refuse_arms()
    return posterior if noise == NoiseConfig() else posterior.scaled(noise)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """The file and its metadata; `UserError` if it turns out to be damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata["format"] != _FORMAT:
                written = metadata["format"]
                raise UserError(f"{path}: format {written!r} is not {_FORMAT!r}; it was written by another version")
            yield file, metadata
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: damaged ({error!r}); copy it again from where it was made") from error


def _in_model(name: str) -> str:
    """A weight's name in a model, from that in its file: peft's files have other names."""
    name = model_name(name)
    return name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")


def _groups(metadata: Mapping[str, str]) -> tuple[NoiseGroup, ...]:
    entries = json.loads(metadata["groups"])
    return tuple(NoiseGroup(**{**group, "parameters": tuple(group["parameters"])}) for group in entries)


def has_hessian(folder: Path) -> bool:
    """True if a checkpoint has a learned posterior."""
    if not (folder / POSTERIOR_FILE).is_file():
        return False
    with _opened(folder / POSTERIOR_FILE) as (file, _):
        return bool(file.keys())


def saved_groups(folder: Path) -> tuple[NoiseGroup, ...]:
    """The noise that a checkpoint was trained with; none if it has no posterior."""
    if not (folder / POSTERIOR_FILE).is_file():
        return ()
    with _opened(folder / POSTERIOR_FILE) as (_, metadata):
        return _groups(metadata)


def distribution(source: WeightSource) -> tuple[dict[str, torch.Tensor], Posterior | None]:
    """The means of a source by name, as draws are made of them, and the posterior around them; sharded as they are."""
    if isinstance(source, FixedWeights):
        return dict(source.named()), source.posterior
    optimizer: Any = source  # IVON or a point
    states = {name: optimizer.state.get(p, {}) for name, p in optimizer.named()}  # none of a frozen parameter
    masters = {name: state["mean"] for name, state in states.items() if "mean" in state}
    return {name: p.detach() for name, p in optimizer.named()} | masters, Posterior.of(optimizer, gather=False)
