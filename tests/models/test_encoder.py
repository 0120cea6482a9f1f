"""Texts as vectors: means over tokens, worked by hand, and no half-loaded model."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from factories import completion
from threepo.errors import UserError
from threepo.models.encoder import Encoder
from threepo.training.metrics import mean_cosine
from threepo.types import Completion

WORDS = {"[PAD]": (1.0, 0.0, 0.0, 1.0), "a": (1.0, 1.0, 0.0, 0.0), "b": (1.0, 0.0, 1.0, 0.0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BERT without blocks and without positions: a word's state is its embedding, scaled to -1 and 1."""
    shape = {"hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 0, "intermediate_size": 4}
    model = BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=6, **shape), add_pooling_layer=False)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.copy_(torch.tensor(list(WORDS.values())))
        model.embeddings.position_embeddings.weight.zero_()
        model.embeddings.token_type_embeddings.weight.zero_()
    model.save_pretrained(tmp_path)
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]").save_pretrained(tmp_path)
    return tmp_path


def texts(*found: str) -> list[Completion]:
    return [replace(completion(), text=text) for text in found]


def test_a_text_is_the_mean_of_its_tokens(folder: Path) -> None:
    """a and b are (1, 1, -1, -1) and (1, -1, 1, -1), at a right angle, and "a b" halfway: cosines 0 and 1 / sqrt 2."""
    encoder = Encoder(str(folder), torch.device("cpu"))
    vectors = encoder(texts("a b", "a", "b", "b b a b", ""))
    expected = torch.tensor([[1, 0, 0, -1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -0.5, 0.5, -1], [0, 0, 0, 0]])
    torch.testing.assert_close(vectors, expected)
    assert mean_cosine(vectors[:3]) == pytest.approx(math.sqrt(2) / 3)
    assert mean_cosine(vectors[[0, 1, 4]]) == pytest.approx(math.sqrt(0.5) / 3)


def test_a_text_that_is_too_long_is_read_from_its_beginning(folder: Path) -> None:
    vectors = Encoder(str(folder), torch.device("cpu"))(texts("a " * 6 + "b b b", "a"))
    torch.testing.assert_close(vectors[0], vectors[1])


def test_what_is_no_whole_encoder_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"ess_schedule.encoder = '/nowhere': cannot be loaded"):
        Encoder("/nowhere", torch.device("cpu"))
    weights = load_file(folder / "model.safetensors")
    del weights["embeddings.word_embeddings.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="its weight files lack embeddings.word_embeddings.weight"):
        Encoder(str(folder), torch.device("cpu"))
