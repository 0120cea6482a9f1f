"""Low-rank adapters: W + s B A for linear layers, with W frozen, s = alpha / rank (LoRA, 2106.09685), on peft.

In the `unit` parametrisation, which is ours, A is frozen and normal with variance 1 / (s^2 rank), and B begins at 0 and
is trained. So noise with deviation sigma on B changes every element of W with deviation sigma, in a random subspace:
sizes of noise, weight decay and clip radius keep the meaning that they have for W. A's numbers are addressed by the
seed of the run and its name.

The local engine multiplies with A and B next to one copy of W (rollout/ensemble.py). vLLM does so too, or it sees the
model without adapters: then `Merged` multiplies them out for each draw.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import Linear, Parameter

from threepo.config import LoRAConfig
from threepo.errors import UserError, import_extra
from threepo.files import read_json, write_json
from threepo.models.four_bit import FourBit, four_bit
from threepo.posterior.noise import address_key, normal_chunks
from threepo.posterior.policy_optimizer import Weights, WeightSource
from threepo.run_folder import ADAPTERS, model_folder
from threepo.types import Draw

_peft = partial(import_extra, "peft", "lora", "model.lora")
WEIGHTS = "adapter_model.safetensors"
"""The tensors of a peft directory."""
BASE_FILE = "base.json"
NAME = "default"
"""peft's name of the adapter, which is part of the names of parameters."""
A, B, BASE = f"lora_A.{NAME}", f"lora_B.{NAME}", "base_layer"
_SHAPE = {"r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
_ORIGIN = {"base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_type"}
_FREE = _SHAPE | _ORIGIN | {"peft_version"}
"""Settings of peft that may be anything; others must be peft's defaults, because they would compute something else."""
_INITS = (True, False, "gaussian")
"""Values of init_lora_weights that leave W as it is."""


def adapter_folder(path: str) -> Path | None:
    """The peft directory that a model path names, or the newest one of a run folder; None if it names none."""
    folder = Path(path).expanduser()
    folder = model_folder(folder) if folder.is_dir() else folder
    return folder if (folder / ADAPTERS).is_file() else None


def base_path(folder: Path, otherwise: str = "") -> str:
    """Path of the model that the adapters of a peft directory belong to; `otherwise` if it is gone."""
    base = read_json(folder / ADAPTERS).get("base_model_name_or_path")
    if not base:
        raise UserError(f"{folder / ADAPTERS}: has no base_model_name_or_path; write there which model it belongs to")
    if otherwise and Path(base).is_absolute() and not Path(base).is_dir():
        return otherwise
    return str(base)


def add_adapters(model: Any, settings: LoRAConfig, base: str, seed: int) -> None:
    """Give a loaded model new adapters, and freeze all else; it computes what it did. `base`: where it was loaded from.

    `UserError` if peft is missing, or a target is no linear layer with separate weights.
    """
    known = dict.fromkeys(name.rpartition(".")[2] for name in frozen_layers(model, "float32"))
    for target in settings.targets:
        fix = f"{target} is no linear layer with weights of its own; it has {', '.join(known)}"
        settings.check("targets", target in known, fix)
    rank, scale = settings.rank, settings.scale
    decoder = model.get_decoder()
    above, _, own = next(name for name, module in model.named_modules() if module is decoder).rpartition(".")
    config = _peft().LoraConfig(
        r=rank,
        lora_alpha=settings.alpha or rank,
        target_modules=list(settings.targets),
        exclude_modules=rf"{above}\.(?!{own}\.).*" if above else None,  # what sees and hears is beside the decoder
        task_type="CAUSAL_LM",
    )
    _attach(model, config, base)
    lost = [target for target in settings.targets if target not in config.target_modules]
    fix = f"peft would adapt the weights of experts in place of {', '.join(lost)}; leave these out"
    settings.check("targets", not lost, fix)
    for name, p in model.named_parameters():
        if f".{A}." in name and not p.is_meta:
            deviation = 1 / (scale * rank**0.5) if settings.init == "unit" else (3 * p.shape[1]) ** -0.5
            key = address_key("threepo-lora", seed, name)
            for start, numbers in normal_chunks(key, 0, p.numel(), p.device):
                p.detach().view(-1)[start : start + len(numbers)] = deviation * numbers
    _train(model, settings.init)


def frozen_layers(model: Any, dtype: str) -> dict[str, Linear]:
    """The linear layers whose frozen weights are held in `dtype`, without the adapters' own.

    `nf4`: all but the head; else all but those that share their weights with an embedding.
    """
    apart = model.get_output_embeddings() if dtype == "nf4" else model.get_input_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is Linear and module.weight is not apart.weight and not is_adapter(f"{name}.weight")
    }


def round_base(model: Any, dtype: str, device: torch.device) -> None:
    """Move the frozen weights of linear layers to a device, and hold them there in bfloat16 or NF4, one by one.

    Others, and one that an embedding shares, stay where and as they are; so does a head, with NF4. Under autocast to
    bfloat16, linear layers read the same bits of weights in bfloat16 as before.
    """
    for layer in frozen_layers(model, dtype).values() if dtype != "float32" else ():
        if dtype == "nf4":
            layer.weight = Parameter(four_bit(layer.weight.to(device)), requires_grad=False)
        else:
            layer.weight.data = layer.weight.data.to(device, torch.bfloat16)


def load_adapters(model: Any, folder: Path, base: str, settings: LoRAConfig) -> str:
    """Give a loaded model the adapters of a peft directory; returns "nf4" if its base was in four bits, or "".

    They are trained as `settings` say, or without a rank there, as in their own run. `UserError` for adapters of
    another model, of a kind that is not supported, or unlike the settings.
    """
    with _refused(f"{folder}: adapter_config.json or adapter_model.safetensors cannot be read"):
        config = _peft().PeftConfig.from_pretrained(str(folder))
        saved = load_file(folder / WEIGHTS)
    _check_supported(config, folder)
    trained_on = config.base_model_name_or_path
    with _refused(f"{folder}: its adapters do not fit {base}"):
        _attach(model, config, base)
    _fill(model, saved, folder, base)
    # Another program's adapters have no file of ours.
    recorded = read_json(folder / BASE_FILE) if (folder / BASE_FILE).is_file() else {"init": ""}
    init, base_dtype = recorded["init"], str(recorded.get("base_dtype", ""))
    if recorded.get("digest", base_digest(model)) != base_digest(model):
        fix = "" if init else "; a base that was changed in memory has to be saved, or the adapters merged"
        known = f"other weights than those of its adapters' training, which were in {trained_on}"
        raise UserError(f"{folder}: {base} has {known}{fix}")
    if settings.rank:
        _check_trained(model, settings, init)
        fix = f"the adapters of {folder} belong to a base in {base_dtype}; set it to that"
        settings.check("base_dtype", base_dtype in ("", settings.base_dtype), fix)
    _train(model, settings.init if settings.rank else init or "usual")  # other programs train both
    return base_dtype


def _fill(model: Any, saved: Weights, folder: Path, base: str) -> None:
    """Copy the tensors of a peft directory into a model's adapters; `UserError` if they are not those of this model."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and type(module.get_base_layer()) is not Linear:
            raise UserError(f"{folder}: its adapters change {name}, which is no linear layer")
    own = {peft_name(name): p for name, p in model.named_parameters() if is_adapter(name)}
    held = {peft_name(name): p for name, p in model.named_parameters(remove_duplicate=False) if f".{BASE}." in name}
    # Of a head that it adapts, peft writes the weights, too.
    again = {n for n in saved.keys() & held.keys() if torch.equal(saved[n].float(), held[n].float().cpu())}
    odd = (saved.keys() - again) ^ own.keys() or {name for name in own if saved[name].shape != own[name].shape}
    if odd:
        raise UserError(f"{folder}: its adapters do not fit {base}: {min(odd)}; they belong to another model")
    for name, p in own.items():
        p.detach().copy_(saved[name])


def _check_supported(config: Any, folder: Path) -> None:
    """Raise `UserError` if peft's configuration names adapters that are not plain LoRA."""
    if config.peft_type != "LORA":
        raise UserError(f"{folder}: holds adapters of the kind {config.peft_type}; only LORA is supported")
    usual = _peft().LoraConfig()
    for name in (field.name for field in fields(usual) if field.name not in _FREE):
        default = getattr(usual, name)
        value, allowed = getattr(config, name) or default, _INITS if name == "init_lora_weights" else (default,)
        if value not in allowed:
            raise UserError(f"{folder}: its adapters have {name} = {value!r}, which is not supported")


def _check_trained(model: Any, settings: LoRAConfig, init: str) -> None:
    """Raise `UserError` if loaded adapters, which were made with `init`, are not as `settings` say."""
    config = model.peft_config[NAME]
    adapted = {
        name.partition(f".{A}.")[0].rpartition(".")[2] for name, _ in model.named_parameters() if f".{A}." in name
    }
    pairs = {
        "rank": (config.r, settings.rank),
        "alpha": (float(config.lora_alpha), settings.alpha or float(settings.rank)),
        "targets": (sorted(adapted), sorted(set(settings.targets))),
    }
    for name, (own, wanted) in pairs.items():
        settings.check(name, own == wanted, f"the adapters in model.path have {own}; set it to that")
    if settings.init == "unit" and init != "unit":
        of_a = [p for name, p in model.named_parameters() if f".{A}." in name]
        square = sum(float(p.detach().float().square().sum()) for p in of_a) / sum(p.numel() for p in of_a)
        fix = "A of the adapters in model.path has another size, so sigma would be another one on W; set it to 'usual'"
        settings.check("init", not init and 0.7 < square * settings.scale**2 * settings.rank < 1.4, fix)


def _train(model: Any, init: str) -> None:
    """Train B, and A unless it is frozen, and freeze all else."""
    for name, p in model.named_parameters():
        p.requires_grad_(f".{B}." in name or (init == "usual" and f".{A}." in name))


def saved_adapters(model: Any) -> dict[str, torch.Tensor]:
    """Tensors of a peft directory: A and B, by their names there.

    Not by peft's own function, which adds W where a head is adapted, and asks the hub about a base from there.
    """
    return {peft_name(name): p.detach() for name, p in model.named_parameters() if is_adapter(name)}


def save_settings(model: Any, digest: str, folder: Path) -> None:
    """Write the rest of a peft directory, and what tells other weights of the base from its own."""
    model.peft_config[NAME].save_pretrained(str(folder))
    trained = any(p.requires_grad for name, p in model.named_parameters() if f".{A}." in name)
    rounded = {"base_dtype": "nf4"} if any(isinstance(p, FourBit) for p in model.parameters()) else {}
    write_json(folder / BASE_FILE, {"digest": digest, "init": "usual" if trained else "unit"} | rounded)


def base_digest(model: Any) -> str:
    """Digest of the frozen weights, from some 256 elements of each parameter, as they are in bfloat16."""
    found = hashlib.blake2b(digest_size=16)
    for name, p in model.named_parameters():
        if not is_adapter(name):
            sample = p.detach().view(-1)[:: max(1, p.numel() // 256)].bfloat16().float().cpu()
            found.update(name.encode() + sample.numpy().tobytes())
    return found.hexdigest()


def is_adapter(name: str) -> bool:
    """True if a parameter's name is an adapter's A or B."""
    return f".{A}." in name or f".{B}." in name


def without_adapter(name: str) -> str:
    """A parameter's name in the model before it got adapters; the names of A and B stay."""
    return name.replace(f".{BASE}.", ".")


def _attach(model: Any, config: Any, base: str) -> None:
    """Put adapters into a model, which keeps its class; the values of A and B are to be set."""
    config.inference_mode = False
    with _refused("model.lora"):  # transformers refuses versions of peft that are too old for it
        model.add_adapter(config, adapter_name=NAME)
    config.base_model_name_or_path = base


def peft_name(name: str) -> str:
    """The name of an adapter's parameter in the files of a peft directory."""
    return "base_model.model." + name.replace(f".{NAME}.", ".")


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Turn what peft raises for adapters of another model into a `UserError`."""
    try:
        yield
    except (ValueError, OSError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{what}: {' '.join(str(error).split())[:300]}") from error


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
            linear.weight = Parameter(merged(linear.weight, a, b, scale))
            model.set_submodule(name, linear)
        elif type(module) is Linear and isinstance(module.weight, FourBit):
            module.weight = Parameter(module.weight.dense())
    del model.peft_config
    model._hf_peft_config_loaded = False


def adapter_scale(model: Any) -> float:
    """s = alpha / rank of a model's adapters."""
    config = model.peft_config[NAME]
    return float(config.lora_alpha / config.r)
