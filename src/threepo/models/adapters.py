"""Low-rank adapters: W + s B A for linear layers, with W frozen, s = alpha / rank (LoRA, 2106.09685), on peft.

In the `unit` parametrisation, which is ours, A is frozen and normal with variance 1 / (s^2 rank), and B begins at 0 and
is trained. So noise with deviation sigma on B changes every element of W with deviation sigma, in a random subspace:
sizes of noise, weight decay and clip radius keep the meaning that they have for W. A's numbers are addressed by the
seed of the run and its name.

Engines see the model without adapters: `Merged` multiplies them out for each draw.
"""

import hashlib
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from threepo.config import LoRAConfig
from threepo.errors import UserError
from threepo.files import read_json, write_json
from threepo.posterior.noise import address_key, normal_chunks
from threepo.posterior.policy_optimizer import Weights, WeightSource
from threepo.run_folder import model_folder
from threepo.types import Draw

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a peft directory."""
BASE_FILE = "base.json"
NAME = "default"
"""Of the adapter, in peft and so in the names of parameters."""
A, B, BASE = f"lora_A.{NAME}", f"lora_B.{NAME}", "base_layer"
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "lora_dropout": (0, 0.0),
    "use_dora": (False,),
    "modules_to_save": (None, []),
    "bias": ("none",),
    "lora_bias": (False,),
    "use_rslora": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
}
"""Settings of peft that would change more than W + s B A, or make it random; and what they may be."""


def adapter_folder(path: str) -> Path | None:
    """The peft directory that a model path names, or the newest one of a run folder; None if it names none."""
    folder = Path(path).expanduser()
    folder = model_folder(folder) if folder.is_dir() else folder
    return folder if (folder / CONFIG).is_file() else None


def base_path(folder: Path, otherwise: str = "") -> str:
    """Where the model lies that the adapters of a peft directory belong to; `otherwise` if it is gone."""
    base = str(read_json(folder / CONFIG)["base_model_name_or_path"])
    if otherwise and Path(base).is_absolute() and not Path(base).is_dir():
        return otherwise
    return base


def add_adapters(model: Any, settings: LoRAConfig, base: str, seed: int) -> None:
    """Give a loaded model new adapters, and freeze all else; it computes what it did. `base`: where it was loaded from.

    `UserError` if peft is missing, or a target is no linear layer with weights of its own.
    """
    adapted_layers(model, settings)  # refuse first
    peft = _peft()
    rank, scale = settings.rank, settings.scale
    _attach(model, peft.LoraConfig(r=rank, lora_alpha=scale * rank, target_modules=list(settings.targets)), base)
    for name, p in model.named_parameters():
        if f".{A}." in name:
            deviation = 1 / (scale * rank**0.5) if settings.init == "unit" else (3 * p.shape[1]) ** -0.5
            key = address_key("threepo-lora", seed, name)
            for start, numbers in normal_chunks(key, 0, p.numel(), p.device):
                p.detach().view(-1)[start : start + len(numbers)] = deviation * numbers
    train_adapters(model, settings)


def adapted_layers(model: Any, settings: LoRAConfig) -> dict[str, torch.nn.Linear]:
    """The linear layers that get adapters; `UserError` if a target is none, or shares its weights."""
    shared = model.get_input_embeddings().weight
    found = {n: m for n, m in model.named_modules() if type(m) is torch.nn.Linear and m.weight is not shared}
    known = dict.fromkeys(name.rpartition(".")[2] for name in found)
    for target in settings.targets:
        fix = f"{target} is no linear layer with weights of its own; it has {', '.join(known)}"
        settings.check("targets", target in known, fix)
    return {name: layer for name, layer in found.items() if name.rpartition(".")[2] in settings.targets}


def load_adapters(model: Any, folder: Path, base: str) -> None:
    """Give a loaded model the adapters of a peft directory, and freeze all but B.

    `UserError` for adapters of another model, or of a kind that is not supported.
    """
    config = _peft().PeftConfig.from_pretrained(str(folder))
    if config.peft_type != "LORA":
        raise UserError(f"{folder}: holds adapters of the kind {config.peft_type}; only LORA is supported")
    for name, allowed in _UNSUPPORTED.items():
        if (found := getattr(config, name, allowed[0])) not in allowed:
            raise UserError(f"{folder}: its adapters have {name} = {found!r}, which is not supported")
    with _refused(f"{folder}: its adapters do not fit {base}"):
        _attach(model, config, base)
    saved = load_file(folder / WEIGHTS)
    own = {_saved_name(name): p for name, p in model.named_parameters() if is_adapter(name)}
    odd = saved.keys() ^ own.keys() or {name for name in own if saved[name].shape != own[name].shape}
    if odd:
        raise UserError(f"{folder}: its adapters do not fit {base}: {min(odd)}; they belong to another model")
    if (folder / BASE_FILE).is_file() and read_json(folder / BASE_FILE)["digest"] != base_digest(model):
        raise UserError(f"{folder}: {base} has other weights now than those that its adapters were trained with")
    for name, p in own.items():
        p.detach().copy_(saved[name])
    for name, p in model.named_parameters():
        p.requires_grad_(f".{B}." in name)


def save_adapters(model: Any, folder: Path) -> None:
    """Write a peft directory, which other tools can load, and what tells other weights of the base from its own."""
    model.save_pretrained(folder)
    write_json(folder / BASE_FILE, {"digest": base_digest(model)})


def base_digest(model: Any) -> str:
    """Of the frozen weights, by some 256 elements of each parameter."""
    found = hashlib.blake2b(digest_size=16)
    for name, p in model.named_parameters():
        if not is_adapter(name):
            sample = p.detach().view(-1)[:: max(1, p.numel() // 256)].float().cpu()
            found.update(name.encode() + sample.numpy().tobytes())
    return found.hexdigest()


def train_adapters(model: Any, settings: LoRAConfig) -> None:
    """Train B, and A where `settings` say so, of adapters that are as they say; `UserError` if they are not."""
    config = model.peft_config[NAME]
    found = {"rank": config.r, "alpha": float(config.lora_alpha), "targets": sorted(config.target_modules)}
    wanted = {"rank": settings.rank, "alpha": settings.scale * settings.rank, "targets": sorted(settings.targets)}
    for name, value in wanted.items():
        settings.check(name, found[name] == value, f"the adapters in model.path have {found[name]}; set it to that")
    for name, p in model.named_parameters():
        p.requires_grad_(f".{B}." in name or (settings.init == "usual" and f".{A}." in name))


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter's A or B."""
    return f".{A}." in name or f".{B}." in name


def without_adapter(name: str) -> str:
    """A parameter's name in the model before it got adapters; those of A and B stay."""
    return name.replace(f".{BASE}.", ".")


def _attach(model: Any, config: Any, base: str) -> None:
    """Put adapters into a model, which keeps its class; the values of A and B are to be set."""
    config.inference_mode = False
    model.add_adapter(config, adapter_name=NAME)
    config.base_model_name_or_path = base


def _saved_name(name: str) -> str:
    return "base_model.model." + name.replace(f".{NAME}.", ".")


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise UserError("model.lora: needs the package; pip install 'threepo[lora]'") from error


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Turn what peft raises for adapters of another model into a `UserError`."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{what}: {error}") from error


class Merged:
    """The weights of a source, under the names and with the values that the model has without adapters."""

    def __init__(self, source: WeightSource, scale: float) -> None:
        self._source, self._scale = source, scale

    def weights(
        self, draw: Draw | None, into: Weights | None = None, *, gather: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource.weights`; W + s B A is made in float32, one at a time."""
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for name, value in self._source.weights(draw, gather=gather):
            part = next((part for part in (A, B, BASE) if name.endswith(f".{part}.weight")), "")
            if not part:
                yield without_adapter(name), value
                continue
            module = name.removesuffix(f".{part}.weight")
            held = parts.setdefault(module, {})
            held[part] = value
            if len(held) == 3:
                yield f"{module}.weight", merged(held[BASE], held[A], held[B], self._scale)
                del parts[module]


def merged(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + s B A in float32: [out, in], of [out, in], [rank, in] and [out, rank]."""
    return torch.addmm(base.float(), b.float(), a.float(), alpha=scale)


@torch.no_grad()
def merge_(model: Any) -> None:
    """Replace the adapters of a model by weights that compute the same, so that it is an ordinary one again."""
    scale = adapter_scale(model)
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A"):
            linear = module.get_base_layer()
            a, b = module.lora_A[NAME].weight, module.lora_B[NAME].weight
            linear.weight.copy_(merged(linear.weight, a, b, scale))
            model.set_submodule(name, linear)
    del model.peft_config
    model._hf_peft_config_loaded = False


def adapter_scale(model: Any) -> float:
    """s = alpha / rank of a model's adapters."""
    config = model.peft_config[NAME]
    return float(config.lora_alpha / config.r)
