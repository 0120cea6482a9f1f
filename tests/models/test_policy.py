"""Loading, saving and prompting a policy."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GenerationConfig,
    LlamaConfig,
    OPTConfig,
    PhimoeConfig,
    PreTrainedTokenizerFast,
)

from chats import chat_tokenizer
from factories import packed
from families import MIXTURES, SHAPE, policy_of
from threepo.config import DataConfig, ModelConfig, TinyConfig
from threepo.errors import UserError
from threepo.models.parts import cut, parts_in_files
from threepo.models.policy import Policy, load_policy, recompute_activations
from threepo.posterior.point_optimizers import PointAdamW
from threepo.training.checkpoint import TrainState, save_checkpoint
from threepo.types import Problem

TEXTS = ["sort 7391\n<think>1:79</think>12", "héé  日本 a\n\n  b\tc", "</think> x <think>", "1 22 333"]
DATA = DataConfig(train="sorting")
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2}


@pytest.mark.parametrize("kind", ["tiny-qwen2", "tiny-llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_policy_is_the_same_policy(kind: str, tied: bool, tmp_path: Path) -> None:
    shape = TinyConfig(hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1, tied=tied)
    policy = load_policy(ModelConfig(path=kind, tiny=shape), seed=3)
    policy.save(tmp_path)
    loaded = load_policy(ModelConfig(path=str(tmp_path)))
    ours, theirs = dict(policy.model.named_parameters()), dict(loaded.model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ("lm_head.weight" in ours) is not tied
    for text in TEXTS:
        tokens = policy.tokenizer(text)["input_ids"]
        assert loaded.tokenizer(text)["input_ids"] == tokens
        assert loaded.tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert (loaded.stop_tokens, loaded.context) == (policy.stop_tokens, 512)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_saved_by_the_names_that_other_programs_know(family: str, tmp_path: Path) -> None:
    """In memory, transformers has all experts of a layer in one tensor."""
    policy = policy_of(MIXTURES[family])
    policy.save(tmp_path / "theirs")
    save_checkpoint(tmp_path / "ours", policy, PointAdamW(policy.model.named_parameters()), TrainState())
    ours, theirs = (load_file(tmp_path / path / "model.safetensors") for path in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() != dict(policy.model.named_parameters()).keys()
    weights = policy.model.state_dict()
    pushed = dict(cut(weights.items(), parts_in_files(policy.model, weights)))
    assert pushed.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value)
        assert torch.equal(pushed[name], value)


@pytest.mark.parametrize("named", [["Qwen2Model"], None])
def test_a_checkpoint_names_the_class_with_the_head(named: list[str] | None, policy: Policy, tmp_path: Path) -> None:
    """Of a Qwen3.5, transformers loads the part for text, which names no class; vLLM then serves embeddings."""
    policy.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": named}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_policy(ModelConfig(path=str(tmp_path))).save_all_but_weights(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert saved["architectures"] == [type(policy.model).__name__]


def test_rotary_settings_are_saved_for_transformers_4_too(tmp_path: Path) -> None:
    """It reads no `rope_parameters`, and would take a base of 10,000 instead."""
    scaled = {"rope_type": "linear", "factor": 2.0}
    policy = policy_of(LlamaConfig(num_hidden_layers=1, rope_theta=5e5, rope_scaling={**scaled}, **SMALL))
    policy.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (5e5, scaled)
    loaded = load_policy(ModelConfig(path=str(tmp_path))).model.config
    assert loaded.rope_parameters == policy.model.config.rope_parameters == {"rope_theta": 5e5, **scaled}


def test_settings_of_generation_are_saved_as_they_were_loaded(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published models have a temperature without sampling, which transformers 5.9 and 5.19 load and refuse to save."""

    def refuse(self: GenerationConfig, *_: Any, **__: Any) -> None:
        assert self.temperature != 0.9, "as their validation does"

    policy.save(tmp_path / "published")
    settings = json.loads((tmp_path / "published" / "generation_config.json").read_text())
    (tmp_path / "published" / "generation_config.json").write_text(json.dumps({**settings, "temperature": 0.9}))
    loaded = load_policy(ModelConfig(path=str(tmp_path / "published")))
    monkeypatch.setattr(GenerationConfig, "save_pretrained", refuse)
    loaded.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text())["temperature"] == 0.9
    assert loaded.model.generation_config.temperature == 0.9


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (OPTConfig(word_embed_proj_dim=32, num_hidden_layers=1, ffn_dim=64, **SMALL), "dropout"),
        (PhimoeConfig(num_hidden_layers=1, intermediate_size=64, num_local_experts=2, **SMALL), "router_jitter_noise"),
    ],
)
def test_what_is_random_in_training_mode_is_refused_with_recomputed_activations(config: Any, named: str) -> None:
    """Such models call functions, and have no modules of dropout."""
    model = AutoModelForCausalLM.from_config(config)
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    with pytest.raises(UserError, match=f"would act in training mode .*set {named} in its config.json to 0"):
        recompute_activations(model)
    setattr(config, named, 0.0)
    recompute_activations(AutoModelForCausalLM.from_config(config))


def test_rows_end_before_longrope_changes_the_frequencies_of_all(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 60, **factors}
    assert policy_of(LlamaConfig(**SHAPE, num_key_value_heads=4, rope_parameters=rope)).context == 60


def test_quantized_weights_are_refused(policy: Policy, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    policy.save(tmp_path / "whole")
    four_bits = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=four_bits).save_pretrained(
        tmp_path / "four"
    )
    policy.tokenizer.save_pretrained(tmp_path / "four")
    with pytest.raises(UserError, match="has quantized weights, which cannot be trained; name the original model"):
        load_policy(ModelConfig(path=str(tmp_path / "four")))


def test_a_plain_tokenizer_in_a_qwen2_folder_is_not_replaced_by_the_familys(policy: Policy, tmp_path: Path) -> None:
    """transformers gives every model of type qwen2 a Qwen2Tokenizer, even where the folder holds something else."""
    raw = Tokenizer(models.WordLevel({"<unk>": 0, " ": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    own = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<unk>")
    policy.model.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    loaded = load_policy(ModelConfig(path=str(tmp_path)))
    assert loaded.tokenizer("a b")["input_ids"] == own("a b")["input_ids"]


def test_weights_are_float32_whatever_the_checkpoint_holds(policy: Policy, tmp_path: Path) -> None:
    policy.model.to(torch.bfloat16).save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    loaded = load_policy(ModelConfig(path=str(tmp_path)))
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


def test_the_same_seed_makes_the_same_tiny_model_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    shape = TinyConfig(hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1)
    a, b, c = (load_policy(ModelConfig(path="tiny-qwen2", tiny=shape), seed=s).model for s in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(a.model.embed_tokens.weight, b.model.embed_tokens.weight)
    assert not torch.equal(a.model.embed_tokens.weight, c.model.embed_tokens.weight)


@pytest.mark.parametrize("kind", ["tiny-qwen2", "tiny-llama"])
def test_initial_weights_of_a_tiny_model_have_the_deviation_that_is_asked_for(kind: str) -> None:
    for deviation in (0.02, 0.08):
        model = load_policy(ModelConfig(path=kind, tiny=TinyConfig(layers=1, deviation=deviation))).model
        matrices = torch.cat([p.flatten() for p in model.parameters() if p.dim() == 2])
        assert float(matrices.std()) == pytest.approx(deviation, rel=0.01)


def test_bfloat16_compute_keeps_float32_weights_and_stays_close(policy: Policy) -> None:
    rows = packed(torch.randint(2, 200, (2, 20)), torch.ones(2, 19).bool())
    exact, *_ = policy.logprobs(rows)
    half = replace(policy, compute_dtype=torch.bfloat16)
    rounded, *_ = half.logprobs(rows)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.05


def test_prompts_with_and_without_a_chat_template(policy: Policy) -> None:
    problem = Problem(id="p", prompt="2 + 2")
    text = policy.encode_prompt(problem, DataConfig(train="x", prompt_template="Q: {prompt}\nA:"), 10)
    assert policy.tokenizer.decode(text) == "Q: 2 + 2\nA:"
    policy.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    chat = policy.encode_prompt(problem, DataConfig(train="x", system_prompt="Be brief."), 10)
    assert policy.tokenizer.decode(chat) == "[system]Be brief.[user]2 + 2[assistant]"
    never = policy.encode_prompt(problem, DataConfig(train="x", chat_template="never"), 10)
    assert policy.tokenizer.decode(never) == "2 + 2"
    messages = Problem(id="m", prompt=({"role": "user", "content": "Hi"},))
    assert policy.tokenizer.decode(policy.encode_prompt(messages, DATA, 10)) == "[user]Hi[assistant]"


@pytest.mark.parametrize(
    ("ending", "opening"),
    [
        ("<think>", "<think>"),
        ("<think>\\n", "<think>"),
        ("<think>\\n\\n</think>\\n\\n", ""),
        ("assistant\\n", ""),
        ("", ""),
    ],
)
def test_a_prompt_may_open_the_thought(ending: str, opening: str, policy: Policy) -> None:
    """This works even if the tokenizer has no token for the tag."""
    template = "{{ messages[0].content }}{{ '" + ending + "' }}"
    problem = Problem(id="p", prompt=({"role": "user", "content": "Is <think> a tag?"},))
    for tokenizer in (policy.tokenizer, chat_tokenizer(template)):
        tokenizer.chat_template = template
        mine = replace(policy, tokenizer=tokenizer)
        assert mine.opening(mine.prompt_tokens([problem], DATA)[0]) == opening


def test_prompts_that_cannot_be_used_are_refused(policy: Policy) -> None:
    with pytest.raises(UserError, match=r"problem long: prompt of 100 tokens and max_new_tokens = 29 .* 128"):
        policy.encode_prompt(Problem(id="long", prompt="x" * 100), DATA, 29)
    with pytest.raises(UserError, match="problem empty: its prompt is empty"):
        policy.encode_prompt(Problem(id="empty", prompt=""), DATA, 1)
    with pytest.raises(UserError, match="no chat template"):
        policy.encode_prompt(Problem(id="m", prompt=({"role": "user", "content": "Hi"},)), DATA, 1)


def test_many_prompts_are_encoded_as_one_by_one(policy: Policy) -> None:
    policy.tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    problems = [Problem(id="a", prompt="1 + 1"), Problem(id="b", prompt=({"role": "user", "content": "Hi"},))]
    data = DataConfig(train="x", chat_template="never")
    tokens = policy.prompt_tokens(problems, data)
    assert tokens == [policy.encode_prompt(problem, data, 1) for problem in problems]
    assert [policy.tokenizer.decode(t) for t in tokens] == ["1 + 1", "[Hi]"]


def test_a_system_prompt_needs_a_chat_template(policy: Policy) -> None:
    with pytest.raises(UserError, match="data.system_prompt = 'Be brief.': the tokenizer has no chat template"):
        policy.encode_prompt(Problem(id="p", prompt="Hi"), DataConfig(train="x", system_prompt="Be brief."), 1)


def test_a_chat_template_that_raises_is_named_with_the_problem(policy: Policy) -> None:
    problem = Problem(id="p", prompt="Hi", location="data file p.jsonl, row 3")
    policy.tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(UserError, match=r"p.jsonl, row 3: .* chat template failed on it: .*no users here"):
        policy.encode_prompt(problem, DATA, 1)


def test_a_tokenizer_of_another_model_is_refused(policy: Policy) -> None:
    policy.model.resize_token_embeddings(20)
    with pytest.raises(UserError, match=r"problem p: its text has token \d+, but the model has 20 embeddings"):
        policy.encode_prompt(Problem(id="p", prompt="hello"), DATA, 1)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_are_missing_or_damaged_are_not_made_up(tied: bool, tmp_path: Path) -> None:
    shape = TinyConfig(hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1, tied=tied)
    load_policy(ModelConfig(path="tiny-qwen2", tiny=shape)).save(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    whole = load_file(file)
    for tensors, message in (
        ({key: value for key, value in whole.items() if key != name}, f"its weight files lack {name}"),
        (whole | {name: whole[name][:3].clone()}, f"have another shape for {name}"),
    ):
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=message):
            load_policy(ModelConfig(path=str(tmp_path)))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot be loaded: model.safetensors: Error while deserializing header"):
        load_policy(ModelConfig(path=str(tmp_path)))


def test_names_that_are_no_folder(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    policy.save(tmp_path / "my-model")
    with pytest.raises(UserError, match=r"model.path = 'runs/a/b': no such folder; if another run writes it"):
        load_policy(ModelConfig(path="runs/a/b"))
    with pytest.raises(UserError, match=r"no such folder; did you mean tiny-qwen2\?"):
        load_policy(ModelConfig(path="tiny-qwen"))
    with pytest.raises(UserError, match=r"model.path = 'my-modle': no such folder, and the hub cannot be asked for it"):
        load_policy(ModelConfig(path="my-modle"))
    error = capfd.readouterr().err
    assert error == "threepo: no folder my-modle here (did you mean my-model?); asking the Hugging Face hub for it\n"


def test_folders_that_hold_no_model_are_refused(policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path / "good")
    for missing, message in (("tokenizer", "no tokenizer"), ("config.json", "no config.json")):
        folder = tmp_path / missing
        shutil.copytree(tmp_path / "good", folder)
        for file in folder.glob(f"{missing}*"):
            file.unlink()
        with pytest.raises(UserError, match=message):
            load_policy(ModelConfig(path=str(folder)))
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "good", broken)
    (broken / "config.json").write_text(json.dumps({"model_type": "no-such-family"}))
    with pytest.raises(UserError, match="cannot be loaded"):
        load_policy(ModelConfig(path=str(broken)))
    with pytest.raises(UserError, match="no config.json"):
        load_policy(ModelConfig(path=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="the hub cannot be asked"):
        load_policy(ModelConfig(path="nobody/has-this-model"))
    for device in ("abacus", "meta"):
        with pytest.raises(UserError, match=f"model.device = '{device}'"):
            load_policy(ModelConfig(path="tiny-qwen2", device=device))
