"""Loads models and tokenizers from a directory or the hub, with checks that they are complete; makes tiny ones.

The tiny models are for demonstrations, tests and studies on a CPU: randomly initialised byte-level decoders of real
Hugging Face architectures.
"""

import difflib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging as transformers_logging

from threepo.config import ModelConfig, TinyConfig
from threepo.errors import UserError
from threepo.files import read_json, write_json
from threepo.models.adapters import BASE_FILE, adapter_folder, add_adapters, base_digest, base_path, frozen_layers
from threepo.models.four_bit import FourBit
from threepo.run_folder import model_folder

TINY_MODELS = {"tiny-qwen2": Qwen2Config, "tiny-llama": LlamaConfig}
END, PAD = "<|endoftext|>", "<|pad|>"
TAGS = ("<think>", "</think>")
"""One token each; they are decoded as text, unlike special tokens."""


def pick_device(name: str) -> torch.device:
    """The device of a `model.device` setting; a GPU becomes the current one. `UserError` if it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # fails on the device "meta", too
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"model.device = {name!r}: not usable here ({str(error).splitlines()[0]}); set 'auto' or 'cpu'"
        ) from error
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # for streams, and for what libraries put on the current one
    return device


def load_pretrained(path: str, other_tokenizer: str = "") -> tuple[Any, Any]:
    """Model (float32) and tokenizer of a local directory or hub id; `UserError` if anything of them is missing.

    `other_tokenizer`: another directory or hub id, for the tokenizer.
    """
    source = _found(path, with_tokenizer=not other_tokenizer)
    folder = Path(other_tokenizer).expanduser()
    other = str(model_folder(folder)) if other_tokenizer and folder.is_dir() else other_tokenizer
    with library_errors(other_tokenizer or path, "model.tokenizer" if other_tokenizer else "model.path"):
        tokenizer = _load_tokenizer(other or source)
    with library_errors(path):
        model, loaded = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(f"model.path = {path!r}: holds adapters on the hub; download them, and name their folder")
    if getattr(model, "is_quantized", False):
        fix = "name the original model; model.lora.base_dtype = 'nf4' holds it in four bits"
        raise UserError(f"model.path = {path!r}: has quantized weights, which cannot be trained; {fix}")
    # transformers gives missing tensors random values; such a policy must not be trained or scored.
    for what, found in (("lack", loaded["missing_keys"]), ("have another shape for", loaded["mismatched_keys"])):
        names = sorted(item if isinstance(item, str) else str(item[0]) for item in found)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"model.path = {path!r}: its weight files {what} {', '.join(names[:3])}{more}; the directory is "
                f"incomplete, or its config.json belongs to another model"
            )
    return model, tokenizer


class Shape(NamedTuple):
    """Shape of a model to come, without its weights."""

    model: Any
    """The Hugging Face model on the meta device, with adapters."""
    weights: int
    """Number of weights, without adapters."""
    adapters: int = 0
    """Numbers in all A and B of [model.lora]; 0: without adapters."""
    trained: int = 0
    """Numbers of all weights and adapters that are trained."""
    rounded: int = 0
    """Weights that are held in [model.lora] base_dtype, if it is not float32."""

    @property
    def config(self) -> Any:
        """Configuration of the model, as Hugging Face has it."""
        return self.model.config


def model_shape(settings: ModelConfig) -> Shape:
    """The shape of a model, from its config.json; `UserError` if it is not there."""
    if settings.path in TINY_MODELS:
        with torch.device("meta"):
            model = make_model(settings.path, settings.tiny, 0)
    else:
        folder = adapter_folder(settings.path)
        source = _found(base_path(folder) if folder else settings.path, with_tokenizer=not settings.tokenizer)
        with library_errors(settings.path), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    weights, lora = sum(p.numel() for p in model.parameters()), settings.lora
    if not lora.rank:
        return Shape(model, weights, 0, weights)
    rounded = sum(layer.weight.numel() for layer in frozen_layers(model, lora.base_dtype).values())
    add_adapters(model, lora, settings.path, 0)
    found = list(model.parameters())
    return Shape(
        model,
        weights,
        adapters=sum(p.numel() for p in found) - weights,
        trained=sum(p.numel() for p in found if p.requires_grad),
        rounded=rounded if lora.base_dtype != "float32" else 0,
    )


def save_pretrained(pretrained: Any, folder: Path) -> None:
    """Write a model, by the names of tensors that other programs know, or a tokenizer."""
    if settings := getattr(pretrained, "generation_config", None):
        pretrained.generation_config = type(settings)()  # of published models, transformers refuses to save their own
    try:
        pretrained.save_pretrained(folder)
    finally:
        if settings:
            pretrained.generation_config = settings
    if settings:
        settings.to_json_file(folder / "generation_config.json")


def add_older_names(folder: Path) -> None:
    """Add the rotary settings to config.json under the names that transformers 4 reads.

    It ignores `rope_parameters`, and would silently use its default base of 10,000 instead.
    """
    config = read_json(folder / "config.json")
    rope = config.get("rope_parameters") or {}
    older = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if older and rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = {name: value for name, value in rope.items() if name not in older}
    if older:  # not if each kind of layer has settings of its own
        write_json(folder / "config.json", config | older)


def save_object(pretrained: Any, folder: Path) -> None:
    """Write a model or tokenizer that a user gave. Of peft's adapters, whose base stays where it is, note its digest.

    So a base that has changed in memory is refused when it is read, and not taken for the one on the disk.
    """
    save_pretrained(pretrained, folder)
    if hasattr(pretrained, "peft_config"):
        model = pretrained.get_base_model() if hasattr(pretrained, "get_base_model") else pretrained
        if any(isinstance(p, FourBit) for p in model.parameters()):
            write_json(folder / BASE_FILE, {"init": "", "base_dtype": "nf4"})
        elif all(p.dtype in (torch.float32, torch.bfloat16) for p in model.parameters()):  # else rounded otherwise
            write_json(folder / BASE_FILE, {"init": "", "digest": base_digest(model)})


def load_tokenizer(path: str) -> Any:
    """The tokenizer alone of a local directory, hub id or tiny model; `UserError` if it cannot be loaded."""
    if path in TINY_MODELS:
        return make_tokenizer()
    folder = adapter_folder(path)
    if folder and not has_tokenizer(folder):
        path, folder = base_path(folder), None
    source = str(folder) if folder else _found(path)
    with library_errors(path):
        return _load_tokenizer(source)


def has_tokenizer(folder: Path) -> bool:
    """True if a model directory has a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def _found(path: str, *, with_tokenizer: bool = True) -> str:
    """Model to load: a hub id, or a local directory; `UserError` if it has no configuration or no tokenizer."""
    folder = Path(path)
    if path.startswith((".", "/", "~")) or folder.exists():
        folder = model_folder(folder.expanduser())
        if not (folder / "config.json").is_file():
            raise UserError(f"model.path = {path!r}: holds no config.json; name a Hugging Face model directory")
        if with_tokenizer and not has_tokenizer(folder):
            raise UserError(
                f"model.path = {path!r}: holds a model but no tokenizer; save one there with "
                f"AutoTokenizer.from_pretrained(...).save_pretrained({path!r}), or name one in model.tokenizer"
            )
        return str(folder)
    here = [*TINY_MODELS, *(str(file.parent) for file in folder.parent.glob("*/config.json"))]
    near = difflib.get_close_matches(path, here, n=1, cutoff=0.7)
    if path.count("/") > 1 or (near and near[0] in TINY_MODELS):  # no id of the hub
        hint = f"did you mean {near[0]}?" if near else "if another run writes it, such as a warm start, run that first"
        raise UserError(f"model.path = {path!r}: no such folder; {hint}")
    hint = f" (did you mean {near[0]}?)" if near else ""
    print(f"threepo: no folder {path} here{hint}; asking the Hugging Face hub for it", file=sys.stderr)
    _refuse_unreachable(path)
    return path


def _refuse_unreachable(path: str) -> None:
    """Raise `UserError` if the hub does not answer and its cache has no such model: loading would retry for minutes."""
    try:
        HfApi().model_info(path, timeout=10)
    except (HfHubHTTPError, HFValidationError):
        pass  # an answer, which loading explains: no such model, or one that needs a token
    except Exception as error:  # none came; its class depends on the hub's library for HTTP
        if not isinstance(try_to_load_from_cache(path, "config.json"), str):
            reason = f"no such folder, and the hub cannot be asked for it: {error}"
            raise UserError(f"model.path = {path!r}: {reason}; name a folder, or see to the connection") from error


@contextmanager
def library_errors(path: str, setting: str = "model.path") -> Iterator[None]:
    """Turn the libraries' errors into a `UserError`, and silence their lines about retries and weights."""
    hub = logging.getLogger("huggingface_hub")
    hub_level, level = hub.level, transformers_logging.get_verbosity()
    hub.setLevel(logging.CRITICAL)
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except (ImportError, OSError, ValueError, RuntimeError, LookupError, AttributeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        where = _unreadable_file(Path(path).expanduser()) if isinstance(error, SafetensorError) else ""
        raise UserError(f"{setting} = {path!r}: cannot be loaded: {where}{reason}") from error
    finally:
        hub.setLevel(hub_level)
        transformers_logging.set_verbosity(level)


def _unreadable_file(folder: Path) -> str:
    """The name of the first file of weights there that is damaged, since its library names none; empty if all read."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError):  # such as a link that leads nowhere
            return f"{file.name}: "
    return ""


def _load_tokenizer(path: str) -> Any:
    # For some model types (qwen2), AutoTokenizer ignores the folder's class and makes their family's tokenizer. If the
    # class is TokenizersBackend, that would silently encode the same text differently than tokenizer.json says.
    if get_tokenizer_config(path).get("tokenizer_class") == "TokenizersBackend":
        return PreTrainedTokenizerFast.from_pretrained(path)
    return AutoTokenizer.from_pretrained(path)


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per byte, which encodes any text, plus the thinking tags, an end and a padding token."""
    vocabulary = {token: i for i, token in enumerate((END, PAD, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], eos_token=END, unk_token=END, pad_token=PAD, padding_side="left"
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def make_model(kind: str, shape: TinyConfig, seed: int) -> Any:
    """A `tiny-qwen2` or `tiny-llama` with weights drawn from `seed`, float32, without touching the global generator."""
    tokenizer = make_tokenizer()
    config = TINY_MODELS[kind](
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        initializer_range=shape.deviation,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]  # by which vLLM knows that it has a head
    return model
