"""Texts as vectors, by a Hugging Face encoder."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

from threepo.errors import UserError
from threepo.models.loading import library_errors
from threepo.run_folder import model_folder
from threepo.types import Completion


class Encoder:
    """Sentence embeddings: the mean of a model's last hidden states over the tokens of a text."""

    def __init__(self, path: str, device: torch.device) -> None:
        """`path`: ess_schedule.encoder, a directory or hub id; `UserError` if it is no whole model with a tokenizer."""
        source = str(model_folder(Path(path))) if Path(path).is_dir() else path
        with library_errors(path, "ess_schedule.encoder"):
            self._tokenizer = AutoTokenizer.from_pretrained(source)
            model, loaded = AutoModel.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
        # transformers gives missing tensors random values; the pooler comes after the states that are read here.
        if missing := sorted(name for name in loaded["missing_keys"] if "pooler" not in name):
            raise UserError(f"ess_schedule.encoder = {path!r}: its weight files lack {missing[0]}; name a whole model")
        self._model, self._device = model.to(device).eval(), device
        self._longest = min(self._tokenizer.model_max_length, model.config.max_position_embeddings)

    @torch.no_grad()
    def __call__(self, completions: Sequence[Completion]) -> torch.Tensor:
        """Embeddings [G, D] of completions; 0 for an empty text. What exceeds the model's context is not read."""
        texts = [completion.text for completion in completions]
        fitted = {"padding": True, "truncation": True, "max_length": self._longest}
        tokens = self._tokenizer(texts, return_tensors="pt", **fitted).to(self._device)
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state  # [G, L, D]
        counts = mask.sum(dim=1, keepdim=True).clamp(min=1)
        return (states * mask.unsqueeze(2)).sum(dim=1) / counts  # type: ignore[no-any-return]
