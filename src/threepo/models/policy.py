"""The policy: a causal LM with its tokenizer."""

import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import logging as transformers_logging

from threepo.config import DataConfig, ModelConfig
from threepo.errors import UserError
from threepo.models import adapters as lora
from threepo.models.attention import ENDLESS, lasting_positions, takes_packed_rows
from threepo.models.four_bit import FourBit
from threepo.models.loading import (
    TINY_MODELS,
    add_older_names,
    has_tokenizer,
    load_pretrained,
    make_model,
    make_tokenizer,
    pick_device,
    save_pretrained,
)
from threepo.models.logprobs import Scorer, TokenLogprobs, has_linear_head
from threepo.models.prompts import tokenized
from threepo.posterior.policy_optimizer import WeightSource
from threepo.posterior.shards import device_of
from threepo.run_folder import ADAPTERS, model_folder
from threepo.types import THINK, MicroBatch, Problem

OPENING_TOKENS = 16
"""More tokens than any tokenizer needs for `<think>` and the blanks after it."""


@dataclass(frozen=True)
class Policy:
    """A model with float32 master weights, and its tokenizer."""

    scorer: Scorer
    tokenizer: Any
    """Fast or slow tokenizer (`PreTrainedTokenizerBase`)."""
    compute_dtype: torch.dtype = torch.float32
    without_weights: Any = None
    """Architecture that engines copy, on the meta device, if the model is sharded or has adapters."""
    base_digest: str = ""
    """Digest of the frozen weights, if the model has adapters."""

    @property
    def model(self) -> Any:
        """The Hugging Face causal LM (`PreTrainedModel`)."""
        return self.scorer.model

    @property
    def architecture(self) -> Any:
        """Model as engines have it: without weights if it is sharded, and as it was before it got adapters."""
        return self.without_weights or self.model

    @property
    def has_adapters(self) -> bool:
        """True if low-rank adapters are trained, and all else is frozen."""
        return hasattr(self.model, "peft_config")

    def served(self, source: WeightSource) -> WeightSource:
        """The weights of a source of this model by the names of `architecture`: with adapters multiplied out."""
        return lora.Merged(source, lora.adapter_scale(self.model)) if self.has_adapters else source

    @property
    def device(self) -> torch.device:
        """Device on which the policy computes."""
        return device_of(next(self.model.parameters()))

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Token ids that end a completion."""
        configured = self.model.generation_config.eos_token_id
        ids = configured if isinstance(configured, list) else [configured]
        return tuple(sorted({i for i in (*ids, self.tokenizer.eos_token_id) if i is not None}))

    @property
    def context(self) -> int:
        """Most tokens of prompt and completion together.

        No row may be so long that the frequencies of positions change, as they would for all rows of its pass.
        """
        config = self.model.config
        most = int(getattr(config.get_text_config(), "max_position_embeddings", ENDLESS))
        return min(most, lasting_positions(config)[0])

    def logprobs(
        self, packed: MicroBatch, temperature: float = 1.0, *, with_entropy_gradient: bool = False
    ) -> TokenLogprobs:
        """See `Scorer.forward`; in the compute dtype."""
        with torch.autocast(self.device.type, self.compute_dtype, enabled=self.compute_dtype != torch.float32):
            return self.scorer(packed, temperature, with_entropy_gradient=with_entropy_gradient)  # type: ignore[no-any-return]

    def idle(self) -> None:
        """Take part in a pass of the other ranks, without rows; where gradients are enabled, it adds 0 to them."""
        two = torch.tensor([0, 0], device=self.device)
        first = torch.tensor([0], device=self.device)
        logprobs = self.logprobs(MicroBatch(two, (2,), first, first, first)).logprobs
        if logprobs.requires_grad:
            (0.0 * logprobs.sum()).backward()  # type: ignore[no-untyped-call]

    def add_up_copies(self, now: bool) -> None:
        """Say whether copies of sharded weights add up their gradients in the next backward pass, or in a later one."""
        scorer: Any = self.scorer
        if hasattr(scorer, "set_requires_all_reduce"):  # FSDP2's
            scorer.set_requires_all_reduce(now)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face model directory: weights (float32 safetensors), configuration, tokenizer.

        For a model with adapters: a peft directory, which holds the adapters alone, and the tokenizer.
        """
        if self.has_adapters:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: value.cpu().contiguous() for name, value in self.saved_tensors().items()}
            save_file(tensors, folder / self.weights_file, metadata={"format": "pt"})
        else:
            save_pretrained(self.model, folder)
        self.save_all_but_weights(folder)

    @property
    def weights_file(self) -> str:
        """The name of a file with `saved_tensors` in the directory that `save` writes."""
        return lora.WEIGHTS if self.has_adapters else "model.safetensors"

    def save_all_but_weights(self, folder: Path) -> None:
        """Write the files that are not made of tensors."""
        if self.has_adapters:
            lora.save_settings(self.model, self.base_digest, folder)
        else:
            # By which vLLM knows that it has a head; of what was loaded, it may name another class, or none.
            self.model.config.architectures = [type(self.architecture).__name__]
            self.model.config.save_pretrained(folder)
            add_older_names(folder)
            settings = deepcopy(self.model.generation_config)
            ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
            if set(self.stop_tokens) - set(ends):  # those of model.tokenizer, at which other programs shall stop, too
                settings.eos_token_id = list(self.stop_tokens)
            settings.to_json_file(folder / "generation_config.json")  # else as it was loaded
        if (legacy := getattr(self.tokenizer, "legacy", None)) is not None:  # transformers would load it as false
            self.tokenizer.init_kwargs["legacy"] = legacy
        self.tokenizer.save_pretrained(folder)

    def saved_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors for a file of the weights: each parameter once, and buffers that are saved; sharded as they are.

        For a model with adapters, the adapters alone under peft's names.
        """
        if self.has_adapters:
            return lora.saved_adapters(self.model)
        own = {name: p.detach() for name, p in self.model.named_parameters()}
        buffers = {name for name, _ in self.model.named_buffers()}
        return own | {name: t for name, t in self.model.state_dict().items() if name in buffers}

    def encode_prompt(self, problem: Problem, settings: DataConfig, max_new_tokens: int) -> tuple[int, ...]:
        """Prompt tokens of a problem; `UserError` if prompt and completion cannot fit into the model's context."""
        (tokens,) = self.prompt_tokens([problem], settings)
        self.check_length(problem, len(tokens), max_new_tokens)
        return tokens

    def prompt_tokens(self, problems: Sequence[Problem], settings: DataConfig) -> list[tuple[int, ...]]:
        """Prompt tokens of many problems, of any length."""
        tokens = tokenized(problems, self.tokenizer, settings)
        for problem, ids in zip(problems, tokens, strict=True):
            self.check_vocabulary(problem.label, ids)
        return tokens

    def check_vocabulary(self, label: str, tokens: Sequence[int]) -> None:
        """Raise `UserError` for a token that the model has no embedding for; `label` names its text."""
        rows = self.model.get_input_embeddings().weight.shape[0]
        if max(tokens) >= rows:
            raise UserError(
                f"{label}: its text has token {max(tokens)}, but the model has {rows} embeddings; the tokenizer "
                f"belongs to another model: see model.path and model.tokenizer"
            )

    def opening(self, prompt_tokens: Sequence[int]) -> str:
        """`<think>` if the prompt ends in it, as with the chat templates of some reasoning models; else empty."""
        ending = self.tokenizer.decode(list(prompt_tokens[-OPENING_TOKENS:])).rstrip()
        return THINK if ending.endswith(THINK) else ""

    def check_length(self, problem: Problem, prompt_tokens: int, max_new_tokens: int) -> None:
        """Raise `UserError` if prompt and completion do not fit into the model's context."""
        if prompt_tokens + max_new_tokens > self.context:
            raise UserError(
                f"{problem.label}: prompt of {prompt_tokens} tokens and max_new_tokens = {max_new_tokens} exceed "
                f"the model's context of {self.context}; shorten the prompt, lower max_new_tokens, or set "
                f"data.too_long = 'drop' to leave such problems out"
            )


def load_policy(settings: ModelConfig, seed: int = 0, adapters: Path | None = None) -> Policy:
    """Load the model and tokenizer that `settings.path` names, or make a tiny one from `seed`.

    Adapters come from the peft directory `adapters`, or from the one that `settings.path` names (its base model is then
    loaded), or are made as [model.lora] says, from `seed`.
    """
    transformers_logging.disable_progress_bar()  # would show "Writing model shards" on the line of ours
    base, folder = _base_and_adapters(settings.path, adapters)
    device = pick_device(settings.device)
    if base in TINY_MODELS:
        settings.only_if(False, f"{settings.path} has its own tokenizer; remove the setting", "tokenizer")
        fix = f"{base} has random weights, which are not worth freezing; train them all first"
        settings.lora.only_if(False, fix, "rank")
        model, tokenizer = make_model(base, settings.tiny, seed), make_tokenizer()
    else:
        own = str(folder) if folder and has_tokenizer(folder) else ""
        model, tokenizer = load_pretrained(base, settings.tokenizer or own)

    architecture, base_dtype = None, str(settings.lora.base_dtype)
    if folder or settings.lora.rank:
        architecture = without_weights(model)
        local = Path(base).expanduser()
        where = str(model_folder(local).absolute()) if local.is_dir() else base
        if folder:
            base_dtype = lora.load_adapters(model, folder, where, settings.lora) or base_dtype
        else:
            lora.add_adapters(model, settings.lora, where, seed)
            if where != str(local.absolute()) and local.is_dir():
                fix = "if that run goes on, run.keep_checkpoints deletes it; train from a copy of it then"
                print(f"threepo: the adapters will always need {where}: {fix}", file=sys.stderr)
    digest = lora.base_digest(model) if architecture else ""

    if base_dtype == "float32":
        model.to(device)
    scorer = Scorer(model.eval(), has_linear_head(model), takes_packed_rows(model))  # found with weights in float32
    lora.round_base(model, base_dtype, device)  # before the rest is moved: all in float32 may not fit there
    rest = (tensor for tensor in (*model.parameters(), *model.buffers()) if not isinstance(tensor, FourBit))
    for tensor in (*rest, *(architecture.buffers() if architecture else ())):
        tensor.data = tensor.to(device)

    if settings.gradient_checkpointing:
        recompute_activations(model)
    if settings.compile:
        settings.check("compile", base_dtype != "nf4", "takes no weights in four bits; remove it")
        compile_blocks(model)
    return Policy(scorer, tokenizer, getattr(torch, settings.compute_dtype), architecture, digest)


def _base_and_adapters(path: str, adapters: Path | None) -> tuple[str, Path | None]:
    """Path of the model to load, and the peft directory with its adapters, if there are any; see `load_policy`."""
    named = lora.adapter_folder(path)
    base = lora.base_path(named) if named else path
    if adapters:
        base = lora.base_path(adapters, otherwise=base)
    folder = adapters or named
    if folder and Path(base).is_absolute() and not Path(base).is_dir():
        fix = f"write where it is now into {folder / ADAPTERS}"
        raise UserError(f"base_model_name_or_path = {base!r}: the model of these adapters is not there; {fix}")
    return base, folder


def without_weights(model: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy of a model with parameters on the meta device, in their own dtype or in another one."""
    empty = {id(p): torch.nn.Parameter(p.detach().to("meta", dtype), p.requires_grad) for p in model.parameters()}
    copied = deepcopy(model, empty)
    for module in copied.modules():
        module.__dict__.pop("forward", None)  # a trainer's wrapper, which would call the original
    return copied


def blocks(model: Any) -> list[Any]:
    """The modules that a model repeats, by the names of their classes."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_blocks(model: Any) -> None:
    """Let torch.compile make the passes of the parts of a model's blocks when they first run, once for all blocks.

    Not of whole blocks: it gives up at activation checkpointing around attention that it leaves out.
    """
    found = blocks(model)
    if not found:
        raise UserError(f"model.compile = true: {type(model).__name__} does not name its blocks; remove it")
    for block in found:
        for part in block.children():
            part.compile(dynamic=True)


_RANDOM = re.compile("^(?!summary_|classifier).*(?:drop|jitter)")
"""Names of settings that make training mode random, but for those of heads that no policy has."""


def recompute_activations(model: Any) -> None:
    """Switch activation checkpointing on; transformers needs training mode for it, so there must be no dropout."""
    settings = vars(model.config.get_text_config())
    # Many models call a function in place of a module, some of them with noise for the choice of experts.
    named = [key for key, value in settings.items() if isinstance(value, float) and value and _RANDOM.search(key)]
    if named or any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)):
        raise UserError(
            f"model.gradient_checkpointing = true: this model has dropout or jitter, which would act in training mode "
            f"and make its log-probs random; set {', '.join(named) or 'the dropout rates'} in its config.json to 0"
        )
    # Newer versions of transformers deprecate the second name; older ones have no other.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model.train()
