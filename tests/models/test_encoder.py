"""Texts as vectors: means over tokens, worked by hand, and no half-loaded model."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5Model,
)

from factories import completion
from threepo.errors import UserError
from threepo.models.encoder import Encoder
from threepo.training.metrics import mean_cosine
from threepo.types import Completion

WORDS = {"[PAD]": (1.0, 0.0, 0.0, 1.0), "a": (1.0, 1.0, 0.0, 0.0), "b": (1.0, 0.0, 1.0, 0.0)}


SHAPE = {"vocab_size": 3, "hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 0, "intermediate_size": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BERT without blocks and without positions: a word's state is its embedding, scaled to -1 and 1."""
    model = BertModel(BertConfig(max_position_embeddings=6, **SHAPE), add_pooling_layer=False)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.copy_(torch.tensor(list(WORDS.values())))
        model.embeddings.position_embeddings.weight.zero_()
        model.embeddings.token_type_embeddings.weight.zero_()
    return saved(model, tmp_path, pad_token="[PAD]")


def saved(model: Any, folder: Path, **tokenizer: str) -> Path:
    """A model with a tokenizer of words."""
    model.save_pretrained(folder)
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, **tokenizer).save_pretrained(folder)
    return folder


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
    assert torch.equal(encoder(texts("", "")), torch.zeros(2, 4)), "a step in which no completion has a text"


def test_a_text_that_is_too_long_is_read_from_its_beginning(folder: Path) -> None:
    vectors = Encoder(str(folder), torch.device("cpu"))(texts("a " * 6 + "b b b", "a"))
    torch.testing.assert_close(vectors[0], vectors[1])


@pytest.mark.parametrize("tokenizer", [{}, {"pad_token": "[PAD]", "padding_side": "left"}])
def test_a_text_does_not_depend_on_its_neighbours(tokenizer: dict[str, str], tmp_path: Path) -> None:
    """In a GPT-2 with positions of its own for each token, whose tokenizer pads on the left or not at all."""
    model = GPT2Model(GPT2Config(vocab_size=3, n_positions=8, n_embd=4, n_layer=1, n_head=1)).eval()
    encoder = Encoder(str(saved(model, tmp_path, **tokenizer)), torch.device("cpu"))
    alone, beside = encoder(texts("a")), encoder(texts("a", "b b b"))
    assert torch.equal(alone[0], beside[0])
    with torch.no_grad():
        torch.testing.assert_close(beside[1], model(torch.tensor([[2, 2, 2]])).last_hidden_state[0].mean(dim=0))


def test_roberta_has_fewer_positions_than_it_says(tmp_path: Path) -> None:
    """Of 6, two lie before the first token's: texts are cut after 4 words."""
    model = RobertaModel(RobertaConfig(max_position_embeddings=6, pad_token_id=1, **SHAPE), add_pooling_layer=False)
    encoder = Encoder(str(saved(model, tmp_path)), torch.device("cpu"))
    cut, whole, less = encoder(texts("b " * 9, "b " * 4, "b " * 3))
    assert torch.equal(cut, whole)
    assert not torch.equal(cut, less)


def test_a_model_that_is_no_encoder_is_refused_at_the_start(tmp_path: Path) -> None:
    model = T5Model(T5Config(vocab_size=3, d_model=4, d_kv=4, d_ff=4, num_layers=1, num_heads=1))
    with pytest.raises(UserError, match=r"ess_schedule.encoder = .*: cannot be loaded: .*inputs_embeds"):
        Encoder(str(saved(model, tmp_path)), torch.device("cpu"))


def test_what_is_no_whole_encoder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert len(Encoder(f"~/{folder.name}", torch.device("cpu"))(texts("a"))) == 1
    with pytest.raises(UserError, match=r"ess_schedule.encoder = '/nowhere': cannot be loaded"):
        Encoder("/nowhere", torch.device("cpu"))
    weights = load_file(folder / "model.safetensors")
    del weights["embeddings.word_embeddings.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="its weight files lack embeddings.word_embeddings.weight"):
        Encoder(str(folder), torch.device("cpu"))
