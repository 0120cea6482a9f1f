"""Texts as vectors, by a Hugging Face encoder."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

from threepo.errors import UserError
from threepo.models.loading import library_errors
from threepo.run_folder import model_folder
from threepo.types import Completion

_TRIED = 4096
"""Words of the text that an encoder must read before the run begins; more than any learned positions know."""


class Encoder:
    """Sentence embeddings: the mean of a model's last hidden states over the tokens of a text."""

    def __init__(self, path: str, device: torch.device) -> None:
        """`path`: ess_schedule.encoder, a directory or hub id; `UserError` if it is no whole model with a tokenizer."""
        folder = Path(path).expanduser()
        source = str(model_folder(folder)) if folder.is_dir() else path
        with library_errors(path, "ess_schedule.encoder"):
            self._tokenizer = AutoTokenizer.from_pretrained(source)
            model, loaded = AutoModel.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
        # transformers gives missing tensors random values; the pooler comes after the states that are read here.
        if missing := sorted(name for name in loaded["missing_keys"] if "pooler" not in name):
            raise UserError(f"ess_schedule.encoder = {path!r}: its weight files lack {missing[0]}; name a whole model")
        self._model, self._device = model.to(device).eval(), device
        # RoBERTa and its kin count positions from the one after that of padding.
        tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
        unused = max((table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None)), default=0)
        positions = getattr(model.config, "max_position_embeddings", 1 << 20) - unused
        self._longest = min(self._tokenizer.model_max_length, positions)
        with library_errors(path, "ess_schedule.encoder"):  # not in the loop
            self._width = len(self._embed(self._tokens(["a " * _TRIED])[0]))

    def __call__(self, completions: Sequence[Completion]) -> torch.Tensor:
        """Embeddings [G, D] of completions; 0 for a text without tokens (most tokenizers of encoders add their own).

        What exceeds the model's context is not read. One text after the other, so that none depends on another.
        """
        rows = self._tokens([completion.text for completion in completions])
        nothing = torch.zeros(self._width, device=self._device)
        return torch.stack([self._embed(row) if row else nothing for row in rows])

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, truncation=True, max_length=self._longest)["input_ids"]  # type: ignore[no-any-return]

    @torch.no_grad()
    def _embed(self, row: list[int]) -> torch.Tensor:
        ids = torch.tensor([row], device=self._device)
        states = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state  # [1, L, D]
        return states[0].mean(dim=0)  # type: ignore[no-any-return]
