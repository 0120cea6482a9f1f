"""Prompts, fine-tuning and completions with tokenizers that treat the beginning of a text in their own way."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import LlamaTokenizer

from chats import chat_tokenizer
from threepo.config import DataConfig, ModelConfig, TinyConfig
from threepo.files import write_json
from threepo.models.chat import ChatEncoder
from threepo.models.loading import _load_tokenizer, make_tokenizer
from threepo.models.policy import load_policy
from threepo.models.prompts import is_special, note_dates, tokenized
from threepo.rollout.engines import continued_text
from threepo.types import Problem

DATA = DataConfig(train="x")


def llama(**settings: Any) -> LlamaTokenizer:
    """Puts a blank in front of a text, as Llama 2's."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in (*(f"<0x{i:02X}>" for i in range(256)), *"▁abcdefghijklmnopqrstuvwxyzQA:?+=0123456789.()"):
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("2", "+"), ("▁", "Q"), ("▁", "4"), ("Q", ":")]
    for first, second in merges:
        vocabulary[first + second] = len(vocabulary)
    return LlamaTokenizer(vocab=vocabulary, merges=merges, **({"legacy": False, "add_bos_token": True} | settings))


def with_regex(template: str | None) -> Any:
    """Splits texts by GPT-2's regular expression, which keeps the last of several blanks for what follows."""
    tokenizer: Any = chat_tokenizer(template or "")
    tokenizer.chat_template = template
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.mark.parametrize("prompt", ["Q: 2+2=", "Q: 2+2= ", "Q\n\n", "Q:\n"])
@pytest.mark.parametrize("answer", ["4", "(4)", " 4", "\n4"])
@pytest.mark.parametrize("tokenizer", [llama(), with_regex(None)], ids=["llama", "regex"])
def test_a_plain_prompt_is_fine_tuned_as_it_is_read_later(tokenizer: Any, prompt: str, answer: str) -> None:
    encoder = ChatEncoder(tokenizer, frozenset([tokenizer.eos_token_id]), "all")
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    ((tokens, [(first, last)]),) = encoder.encode([encoder.render(turns, "a row", plain=True)])
    assert tuple(tokens[:first]) == tokenized([Problem("p", prompt)], tokenizer, DATA)[0]
    assert tokens[last - 1] == tokenizer.eos_token_id
    assert continued_text(tokenizer, tokens[:first], tokens[first : last - 1]) == answer


def test_a_chat_whose_prompt_ends_in_a_blank_line_is_fine_tuned_as_it_is_read_later() -> None:
    template = (
        "{% for m in messages %}### {{ m.role }}:\n\n{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:{{ '\n\n' }}{% endif %}"
    )
    tokenizer = with_regex(template)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("\n\n")
    encoder = ChatEncoder(tokenizer, frozenset([tokenizer.eos_token_id]), "all")
    ((tokens, [(first, _)]),) = encoder.encode([encoder.render(turns, "a row")])
    assert tuple(tokens[:first]) == tokenized([Problem("p", (turns[0],))], tokenizer, DATA)[0]


def test_a_prompt_does_not_end_in_the_end_token() -> None:
    tokenizer = llama()
    tokenizer.add_eos_token = True
    assert tokenizer("Q")["input_ids"][-1] == tokenizer.eos_token_id
    (tokens,) = tokenized([Problem("p", "Q")], tokenizer, DATA)
    assert list(tokens) == tokenizer("Q")["input_ids"][:-1]


def test_a_completion_keeps_the_blanks_that_it_begins_with() -> None:
    tokenizer = llama()
    prompt, whole = (tokenizer(text)["input_ids"] for text in ("Q:", "Q:    return"))
    assert whole[: len(prompt)] == prompt
    assert tokenizer.decode(whole[len(prompt) :]) == "   return"
    assert continued_text(tokenizer, prompt, whole[len(prompt) :]) == "    return"
    usual = make_tokenizer()
    ids = usual("é4", add_special_tokens=False)["input_ids"]
    assert continued_text(usual, ids[:1], ids[1:]) == usual.decode(ids[1:]), "half of a character is not its prefix"


def test_thoughts_in_special_tokens_are_noticed() -> None:
    special = llama()
    special.add_special_tokens({"additional_special_tokens": ["</think>"]})
    assert is_special("</think>", special)
    assert not is_special("</think>", make_tokenizer())
    assert not is_special("</think>", llama()), "of characters that it does not know"


def test_a_template_that_writes_the_date_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = llama()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    note_dates(tokenizer, DataConfig(train="sorting"))
    assert "writes today's date into prompts" in capsys.readouterr().err
    note_dates(tokenizer, DataConfig(train="sorting", chat_template="never"))
    note_dates(make_tokenizer(), DataConfig(train="sorting"))
    assert not capsys.readouterr().err


def test_a_checkpoints_tokenizer_does_what_the_models_did(tmp_path: Path) -> None:
    """transformers does not save `legacy`, and loads such a folder without it."""
    policy = load_policy(ModelConfig(path="tiny-llama", tiny=TinyConfig(hidden_size=32, layers=1, heads=2, kv_heads=1)))
    llama(legacy=True).save_pretrained(tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    write_json(tmp_path / "model" / "tokenizer_config.json", settings | {"legacy": True})
    policy.model.config.save_pretrained(tmp_path / "model")
    tokenizer = _load_tokenizer(str(tmp_path / "model"))
    replace(policy, tokenizer=tokenizer).save(tmp_path / "checkpoint")
    again = _load_tokenizer(str(tmp_path / "checkpoint"))
    text = "<s>[a] b</s>[a]"
    assert again(text, add_special_tokens=False) == tokenizer(text, add_special_tokens=False)
