"""Loading what others made: a Hugging Face model directory or hub id, checked to be whole, and the device for it."""

import difflib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging as transformers_logging

from threepo.config import ModelConfig
from threepo.errors import UserError
from threepo.models.tiny import TINY_MODELS, make_model, make_tokenizer
from threepo.run_folder import model_folder


def pick_device(name: str) -> torch.device:
    """The torch device for a `model.device` setting; `UserError` if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # the device "meta" has no numbers to give
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"model.device = {name!r}: not usable here ({str(error).splitlines()[0]}); set 'auto' or 'cpu'"
        ) from error
    return device


def load_pretrained(path: str, other_tokenizer: str = "") -> tuple[Any, Any]:
    """Model (float32) and tokenizer of a local directory or hub id; `UserError` if anything of them is missing.

    The tokenizer is that of `other_tokenizer`, a directory or hub id too, where one is named.
    """
    source = _found(path, with_tokenizer=not other_tokenizer)
    if other_tokenizer:
        place = Path(other_tokenizer).expanduser()
        with _library_errors(other_tokenizer, "model.tokenizer"):
            tokenizer = _load_tokenizer(str(model_folder(place)) if place.is_dir() else other_tokenizer)
    with _library_errors(path):
        if not other_tokenizer:
            tokenizer = _load_tokenizer(source)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    _refuse_incomplete(path, loaded)
    return model, tokenizer


def model_shape(settings: ModelConfig) -> tuple[Any, int]:
    """Configuration and number of weights of a model, from its config.json; `UserError` if it is not there."""
    if settings.path in TINY_MODELS:
        with torch.device("meta"):
            model: Any = make_model(settings.path, settings.tiny, 0)
    else:
        source = _found(settings.path, with_tokenizer=not settings.tokenizer)
        with _library_errors(settings.path), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    return model.config, sum(p.numel() for p in model.parameters())


def load_tokenizer(path: str) -> Any:
    """The tokenizer alone of a local directory, hub id or tiny model; `UserError` if it cannot be loaded."""
    if path in TINY_MODELS:
        return make_tokenizer()
    source = _found(path)
    with _library_errors(path):
        return _load_tokenizer(source)


def _found(path: str, *, with_tokenizer: bool = True) -> str:
    """What to load: a local model directory, checked to be one, or else the hub's id."""
    folder = Path(path)
    if path.startswith((".", "/", "~")) or folder.exists():
        return str(_checked_folder(path, with_tokenizer))
    near = difflib.get_close_matches(path, TINY_MODELS, n=1, cutoff=0.7)
    if near and "/" not in path:
        raise UserError(f"model.path = {path!r}: no such folder; did you mean {near[0]}?")
    here = [str(file.parent) for file in folder.parent.glob("*/config.json")]
    near = difflib.get_close_matches(path, here, n=1, cutoff=0.7)
    if path.count("/") > 1:  # which no id of the hub has
        hint = (
            f"did you mean {near[0]}?"
            if near
            else "if another run is to leave it, such as a warm start, run that first"
        )
        raise UserError(f"model.path = {path!r}: no such folder; {hint}")
    hint = f" (did you mean {near[0]}?)" if near else ""
    print(f"threepo: no folder {path} here{hint}; asking the Hugging Face hub for it", file=sys.stderr)
    return path


def _checked_folder(path: str, with_tokenizer: bool) -> Path:
    """The local model directory that `path` stands for; `UserError` if it lacks what every such directory has."""
    folder = model_folder(Path(path).expanduser())
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path = {path!r}: holds no config.json; name a Hugging Face model directory")
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if with_tokenizer and not any((folder / name).is_file() for name in names):
        raise UserError(
            f"model.path = {path!r}: holds a model but no tokenizer; save one there with "
            f"AutoTokenizer.from_pretrained(...).save_pretrained({path!r}), or name one in model.tokenizer"
        )
    return folder


def _refuse_incomplete(path: str, loaded: dict[str, Any]) -> None:
    """transformers fills gaps with random weights; a policy with such a gap must not be trained or scored."""
    for what, found in (("lack", loaded["missing_keys"]), ("have another shape for", loaded["mismatched_keys"])):
        names = sorted(item if isinstance(item, str) else str(item[0]) for item in found)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"model.path = {path!r}: its weight files {what} {', '.join(names[:3])}{more}; the directory is "
                f"incomplete, or its config.json belongs to another model"
            )


@contextmanager
def _library_errors(path: str, setting: str = "model.path") -> Iterator[None]:
    """Quiet, and with what the libraries raise where a model cannot be loaded as a `UserError`."""
    try:
        with _quiet_libraries():
            yield
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{setting} = {path!r}: cannot be loaded: {reason}") from error


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Without the libraries' own lines about retries and weights: what goes wrong is said once, by us."""
    hub = logging.getLogger("huggingface_hub")
    hub_level, level = hub.level, transformers_logging.get_verbosity()
    hub.setLevel(logging.CRITICAL)
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        hub.setLevel(hub_level)
        transformers_logging.set_verbosity(level)


def _load_tokenizer(path: str) -> Any:
    # AutoTokenizer gives some model types (qwen2) their family's tokenizer whatever the folder says. A folder whose
    # tokenizer was saved as the plain TokenizersBackend means what its tokenizer.json says, and another would encode
    # the same text differently without a word.
    if get_tokenizer_config(path).get("tokenizer_class") == "TokenizersBackend":
        return PreTrainedTokenizerFast.from_pretrained(path)
    return AutoTokenizer.from_pretrained(path)
