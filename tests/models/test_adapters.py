"""Low-rank adapters: peft's numbers, our noise, and the same weights everywhere."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Dots1Config, Gemma3Config

from families import MIXTURES, SHAPE, policy_of
from rollout.asked import requests_for, trainer_logprobs
from threepo import api
from threepo.config import LocalEngineConfig, LoRAConfig, ModelConfig, NoiseConfig, SamplingConfig, TinyConfig
from threepo.errors import UserError
from threepo.models.adapters import BASE_FILE
from threepo.models.policy import Policy, load_policy
from threepo.posterior.gaussian import FixedWeights, Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.metrics import Movement, posterior_metrics
from threepo.posterior.noise_sizes import root_mean_square
from threepo.rollout.local import LocalEngine
from threepo.types import Draw

peft = pytest.importorskip("peft")

SMALL = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1)
LORA = LoRAConfig(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    load_policy(ModelConfig(path="tiny-qwen2", tiny=SMALL), seed=2).save(folder)
    return folder


def adapted(base: Path, lora: LoRAConfig = LORA, seed: int = 0) -> Policy:
    return load_policy(ModelConfig(path=str(base), lora=lora), seed)


def moved(policy: Policy) -> Policy:
    """The policy, with a B that is not 0."""
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.02, generator=torch.Generator().manual_seed(len(name)))
    return policy


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 30)[None]).logits  # type: ignore[no-any-return]


def test_new_adapters_change_nothing_and_train_b_alone(base: Path) -> None:
    policy, plain = adapted(base), load_policy(ModelConfig(path=str(base)))
    assert torch.equal(logits(policy.model), logits(plain.model))
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in policy.model.named_parameters() if "lora_B" in name}
    assert len(trained) == 2 * 7
    usual = adapted(base, LoRAConfig(rank=4, init="usual", targets=("q_proj",)))
    trained = {name for name, p in usual.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 == len([name for name in trained if ".self_attn.q_proj.lora_" in name])
    a = torch.cat([p.detach().flatten() for name, p in usual.model.named_parameters() if "lora_A" in name])
    assert float(a.square().mean()) == pytest.approx(1 / (3 * 32), rel=0.25), "the size of peft's own"


def test_a_is_addressed_by_seed_and_name(base: Path) -> None:
    first, again, other = (dict(adapted(base, seed=seed).model.named_parameters()) for seed in (0, 0, 1))
    names = [name for name in first if "lora_A" in name]
    assert all(torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name]) for name in names)
    assert len({float(first[name][0, 0]) for name in names}) == len(names)
    values = torch.cat([first[name].flatten() for name in names])
    assert float(values.square().mean()) == pytest.approx(1 / (2**2 * 4), rel=0.1)  # 1 / (s^2 rank)


def test_noise_on_b_is_noise_of_the_same_size_on_every_weight(base: Path) -> None:
    """Means over 400 draws: sigma^2 for each element of W, and nothing between two elements of one column."""
    policy = adapted(base, LoRAConfig(rank=4, targets=("down_proj",)))
    posterior = Posterior.around(policy.model.named_parameters(), NoiseConfig(unit="absolute", size=0.1))
    source = policy.served(FixedWeights(policy.model, posterior))
    name = "model.layers.1.mlp.down_proj.weight"
    plain = dict(load_policy(ModelConfig(path=str(base))).model.named_parameters())[name]
    draws = [dict(source.weights(Draw(0, 0, i)))[name] - plain for i in range(400)]
    noise = torch.stack(draws).detach()
    assert float(noise.square().mean()) == pytest.approx(0.1**2, rel=0.15)
    rows = noise[:, :2, :].flatten(1)  # [400, 2 * in]
    one, two = rows.chunk(2, 1)
    assert abs(float((one * two).mean())) < 0.1 * 0.1**2


@pytest.mark.parametrize(
    ("dtype", "lora"),
    [
        ("float32", LORA),
        ("bfloat16", LORA),
        ("float32", LoRAConfig(rank=3, init="usual", targets=("v_proj", "up_proj"))),
    ],
)
def test_local_engine_and_trainer_agree_for_every_draw(base: Path, dtype: str, lora: LoRAConfig) -> None:
    """Contract 11, with as many rows as there are of each draw. The trainer's side is transformers with peft."""
    policy = moved(adapted(base, lora))
    optimizer = IVON(policy.model.named_parameters(), ess=1e5, hess_init=1e-2)
    engine = LocalEngine(policy, LocalEngineConfig(dtype=dtype))
    draws = [Draw(0, 0, 0), Draw(0, 0, 1), None]
    engine.load(optimizer, draws, 0)
    requests = requests_for(policy, draws, 1)
    requests = [r for r in requests if r.draw != draws[1]] + [r for r in requests if r.draw == draws[1]][:1]
    completions = engine.generate(requests, SamplingConfig(max_new_tokens=12), seed=1)
    found = {}
    for draw in draws:
        with optimizer.at(draw):
            for other in draws:
                mine = [c for c in completions if c.draw == other]
                gaps = [trainer_logprobs(policy, c, 1.0) - torch.tensor(c.logprobs) for c in mine]
                found[draw, other] = float(torch.cat(gaps).abs().max())
    allowed = 1e-5 if dtype == "float32" else 0.05
    assert max(found[draw, draw] for draw in draws) < allowed
    assert min(gap for (draw, other), gap in found.items() if draw != other) > 4 * allowed
    again = engine.generate(requests[::-1], SamplingConfig(max_new_tokens=12), seed=1)[::-1]
    assert [c.tokens for c in again] == [c.tokens for c in completions]


def test_draws_of_another_programs_adapters_have_noise_on_both(base: Path, tmp_path: Path) -> None:
    """peft trains A and B, and its folders do not say so."""
    made = moved(adapted(base, LoRAConfig(rank=3, init="usual", targets=("q_proj",))))
    made.save(tmp_path)
    (tmp_path / BASE_FILE).unlink()
    policy = load_policy(ModelConfig(path=str(tmp_path)))
    optimizer = IVON(made.model.named_parameters(), ess=1e4, hess_init=1e-2)
    engine, draw = LocalEngine(policy, LocalEngineConfig()), Draw(0, 0, 0)
    engine.load(FixedWeights(policy.model, Posterior.of(optimizer)), [draw], 0)
    completions = engine.generate(requests_for(policy, [draw]), SamplingConfig(max_new_tokens=16), seed=1)
    with optimizer.at(draw):
        gaps = [trainer_logprobs(made, c, 1.0) - torch.tensor(c.logprobs) for c in completions]
    assert float(torch.cat(gaps).abs().max()) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_pefts_adapters_of_a_head_and_its_automatic_class(base: Path, tmp_path: Path, tied: bool) -> None:
    """peft writes the weights of a head that it adapts, and finds the class of a model by the task."""
    load_policy(ModelConfig(path="tiny-qwen2", tiny=replace(SMALL, tied=tied)), seed=1).save(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    assert any("base_layer" in name for name in load_file(tmp_path / "theirs" / "adapter_model.safetensors"))
    assert load_policy(ModelConfig(path=str(tmp_path / "theirs"))).has_adapters
    adapted(base).save(tmp_path / "ours")
    assert peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "ours").peft_config


def test_draws_share_the_frozen_weights_in_the_local_engine(base: Path) -> None:
    """A draw has its own B, and of the other weights there is one copy."""
    policy = adapted(base)
    plain = load_policy(ModelConfig(path=str(base)))
    weights = sum(p.numel() for p in plain.model.parameters())
    b = sum(p.numel() for name, p in policy.model.named_parameters() if "lora_B" in name)
    ensembles = []
    for of in (plain, policy):
        engine = LocalEngine(of, LocalEngineConfig())
        engine.load(IVON(of.model.named_parameters(), ess=1e5), [Draw(0, 0, i) for i in range(8)], 0)
        ensembles.append(engine._ensemble)
    assert ensembles[0].bytes >= 8 * 4 * weights
    assert 4 * 8 * b <= ensembles[1].bytes <= 1.02 * 4 * (weights + 8 * b)  # panels are whole
    assert ensembles[1].bytes == ensembles[1].bytes_for(8)


def test_a_rounded_base_is_in_memory_once(tmp_path: Path) -> None:
    """The local engine uses the trainer's own, where its products take them as they are."""
    odd = TinyConfig(hidden_size=24, intermediate_size=40, layers=1, heads=2, kv_heads=1)  # too odd to be packed
    load_policy(ModelConfig(path="tiny-qwen2", tiny=odd), seed=2).save(tmp_path)
    lora = LoRAConfig(rank=4, base_dtype="bfloat16")
    policy = load_policy(ModelConfig(path=str(tmp_path), compute_dtype="bfloat16", lora=lora))
    linear = {n: p for n, p in policy.model.named_parameters() if p.dtype == torch.bfloat16}
    assert len(linear) == 7
    engine = LocalEngine(policy, LocalEngineConfig(dtype="bfloat16"))
    optimizer = IVON(policy.model.named_parameters(), ess=1e5, hess_init=1e-2)
    draws = [Draw(0, 0, 0), None]
    engine.load(optimizer, draws, 0)
    for name, p in linear.items():
        assert engine._ensemble.stacks[name.replace(".base_layer", "")].values.data_ptr() == p.data_ptr()
    own = sum(p.numel() * (2 if "lora_B" in n else 1) for n, p in policy.model.named_parameters() if n not in linear)
    assert engine._ensemble.bytes == engine._ensemble.bytes_for(2) == 2 * own
    before = {name: p.clone() for name, p in linear.items()}
    for completion in engine.generate(requests_for(policy, draws), SamplingConfig(max_new_tokens=16), seed=1):
        with optimizer.at(completion.draw):
            gap = trainer_logprobs(policy, completion, 1.0) - torch.tensor(completion.logprobs)
        assert float(gap.abs().max()) < 0.05
    engine.close()
    assert all(torch.equal(p, before[name]) for name, p in linear.items())


def test_a_checkpoint_is_a_peft_directory_and_merging_gives_the_same_model(base: Path, tmp_path: Path) -> None:
    policy = moved(adapted(base))
    policy.save(tmp_path / "adapters")
    expected = logits(policy.model)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapters")
    assert torch.equal(logits(theirs), expected)
    again = load_policy(ModelConfig(path=str(tmp_path / "adapters")))
    assert torch.equal(logits(again.model), expected)
    assert again.tokenizer("1 2")["input_ids"] == policy.tokenizer("1 2")["input_ids"]
    api.merge(tmp_path / "adapters", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="has no adapters, so there is nothing to merge"):
        api.merge(tmp_path / "merged", tmp_path / "twice")


def test_draws_are_written_as_adapters(base: Path, tmp_path: Path) -> None:
    policy = moved(adapted(base))
    optimizer = IVON(policy.model.named_parameters(), ess=1e5, hess_init=1e-2)
    policy.save(tmp_path / "step-1")
    Posterior.of(optimizer).save(tmp_path / "step-1")
    (path,) = api.sample(tmp_path / "step-1", tmp_path / "draws", range(1))
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path)
    with optimizer.at(Posterior.of(optimizer).address(0)):
        assert torch.equal(logits(theirs), logits(policy.model))
    assert not torch.equal(logits(theirs), logits(policy.model))


def test_a_posterior_from_a_file_gives_draws_for_a_model_with_its_adapters(base: Path, tmp_path: Path) -> None:
    policy = moved(adapted(base))
    optimizer = IVON(policy.model.named_parameters(), ess=1e4, hess_init=1e-2)
    policy.save(tmp_path)
    Posterior.of(optimizer).save(tmp_path)
    found = Posterior.from_pretrained(tmp_path).draw(3)
    other = AutoModelForCausalLM.from_pretrained(base)
    other.load_adapter(str(tmp_path))
    assert set(found) == {name for name, _ in other.named_parameters() if "lora" in name}
    other.load_state_dict(found, strict=False)
    with optimizer.perturbed(Draw(0, 0, 3)):
        expected = logits(policy.model)
    torch.testing.assert_close(logits(other), expected)
    assert not torch.allclose(logits(policy.model), expected, atol=1e-2)


def test_sigma_and_movement_are_measured_beside_the_weights_that_are_adapted(base: Path) -> None:
    policy = adapted(base)
    optimizer = IVON(policy.model.named_parameters(), ess=1e4, hess_init=1.0, weight_decay=0.0)  # sigma 0.01
    own = [p for name, p in policy.model.named_parameters() if ".base_layer.weight" in name]
    rows = sum(p.shape[0] for p in own)  # B has 4 elements for each
    square = sum(p.shape[0] * root_mean_square(p) ** 2 for p in own) / rows
    found = posterior_metrics(optimizer)["posterior/sigma_to_rms"]
    assert found == pytest.approx(0.01 / square**0.5, rel=0.05)
    movement = Movement(optimizer)
    for name, p in policy.model.named_parameters():
        p.data += 0.003 * ("lora_B" in name)
    moved = movement.metrics()
    assert moved["update/rms"] == pytest.approx(0.003, rel=1e-4)
    assert moved["update/rms_to_weights"] == pytest.approx(0.003 / square**0.5, rel=0.05)
    relative = Posterior.around(policy.model.named_parameters(), NoiseConfig(unit="rms", size=0.5))
    sizes = {name: group.noise_scale for group in relative.groups for name in group.parameters}
    name = "model.layers.0.mlp.up_proj"
    weight = dict(policy.model.named_parameters())[f"{name}.base_layer.weight"]
    assert sizes[f"{name}.lora_B.default.weight"] == pytest.approx(0.5 * root_mean_square(weight))


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of some adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    adapted(base).save(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens = .3., which is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa', which is not supported"),
        ({"base_model_name_or_path": None}, "has no base_model_name_or_path; write there which model it belongs to"),
        ({"use_dora": True}, "its adapters have use_dora = True, which is not supported"),
        ({"lora_dropout": 0.1}, "lora_dropout = 0.1"),
        ({"peft_type": "LOHA"}, "kind .*LOHA.*; only LORA"),
        ({"target_modules": ["nothing"]}, "do not fit"),
        ({"r": 8}, "do not fit .* belong to another model"),
    ],
)
def test_other_adapters_are_refused(saved: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message) as error:
        load_policy(ModelConfig(path=str(tmp_path)))
    assert "\n" not in str(error.value)


def test_another_base_is_refused_and_a_missing_one_is_named(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    adapted(tmp_path / "base").save(tmp_path / "adapters")
    load_policy(ModelConfig(path="tiny-qwen2", tiny=SMALL), seed=3).save(tmp_path / "base")
    with pytest.raises(UserError, match="has other weights than those of its adapters' training, which were in /"):
        load_policy(ModelConfig(path=str(tmp_path / "adapters")))
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(UserError, match="base_model_name_or_path = .*: the model of these adapters is not there"):
        load_policy(ModelConfig(path=str(tmp_path / "adapters")))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            LoRAConfig(rank=4, targets=("query",)),
            "model.lora.targets = .*query is no linear layer .* it has q_proj, k_",
        ),
        (LoRAConfig(rank=4, targets=("embed_tokens",)), "embed_tokens is no linear layer"),
        (LoRAConfig(rank=4, targets=("lm_head",)), "lm_head is no linear layer"),  # tied
    ],
)
def test_targets_must_be_linear_layers_with_weights_of_their_own(base: Path, lora: LoRAConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        adapted(base, lora)


def test_adapters_of_a_mixture_of_experts_are_those_of_its_linear_layers(tmp_path: Path) -> None:
    """For such models, peft adapts experts in place of layers with the names that older files have for them."""
    policy_of(MIXTURES["mixtral"]).save(tmp_path / "mixtral")
    policy = moved(adapted(tmp_path / "mixtral", LoRAConfig(rank=4, targets=("q_proj", "o_proj"))))
    policy.save(tmp_path / "adapters")
    again = load_policy(ModelConfig(path=str(tmp_path / "adapters")))
    assert torch.equal(logits(again.model), logits(policy.model))
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    policy_of(Dots1Config(**SHAPE, **experts, n_group=1, topk_group=1, num_key_value_heads=4)).save(tmp_path / "dots")
    with pytest.raises(UserError, match="experts in place of gate_proj, up_proj, down_proj; leave these out"):
        adapted(tmp_path / "dots")


def test_what_sees_gets_no_adapters(tmp_path: Path) -> None:
    text = SHAPE | {"num_key_value_heads": 2, "head_dim": 32}
    seen = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=seen, mm_tokens_per_image=4)
    policy_of(config).save(tmp_path)
    names = [name for name, p in adapted(tmp_path).model.named_parameters() if p.requires_grad]
    assert len(names) == 7 * SHAPE["num_hidden_layers"]
    assert all(name.startswith("model.language_model.") for name in names)


def test_random_weights_are_not_frozen() -> None:
    with pytest.raises(UserError, match="model.lora.rank = 4: tiny-qwen2 has random weights"):
        load_policy(ModelConfig(path="tiny-qwen2", lora=LORA))


def test_missing_and_damaged_weights_are_one_line(base: Path, tmp_path: Path) -> None:
    adapted(base).save(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="adapter_model.safetensors cannot be read: "):
        load_policy(ModelConfig(path=str(tmp_path)))
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="adapter_model.safetensors cannot be read: "):
        load_policy(ModelConfig(path=str(tmp_path)))


def test_an_adapted_head_is_saved_without_its_weights(tmp_path: Path) -> None:
    shape = TinyConfig(hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1, tied=False)
    load_policy(ModelConfig(path="tiny-qwen2", tiny=shape), seed=2).save(tmp_path / "untied")
    policy = moved(adapted(tmp_path / "untied", LoRAConfig(rank=4, targets=("lm_head", "q_proj"))))
    policy.save(tmp_path / "adapters")
    assert all("lora" in name for name in load_file(tmp_path / "adapters" / "adapter_model.safetensors"))
    again = load_policy(ModelConfig(path=str(tmp_path / "adapters")))
    assert torch.equal(logits(again.model), logits(policy.model))


def test_adapters_of_another_program_with_its_own_a_and_no_tokenizer(base: Path, tmp_path: Path) -> None:
    """B's sigma would differ from W's, so they are not trained as if A were ours."""
    model = AutoModelForCausalLM.from_pretrained(base)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(LORA.targets))
    theirs = peft.get_peft_model(model, settings)
    theirs.save_pretrained(tmp_path)
    plain = load_policy(ModelConfig(path=str(tmp_path)))
    assert torch.equal(logits(plain.model), logits(theirs))
    with pytest.raises(UserError, match="model.lora.init = 'unit': A of the adapters in model.path has another size"):
        load_policy(ModelConfig(path=str(tmp_path), lora=LORA))
    usual = LoRAConfig(rank=4, alpha=8.0, init="usual")
    trained = load_policy(ModelConfig(path=str(tmp_path), lora=usual))
    assert [n for n, p in trained.model.named_parameters() if "lora_A" in n and p.requires_grad]
    trained.save(tmp_path / "again")
    loaded = load_policy(ModelConfig(path=str(tmp_path / "again")))
    assert [n for n, p in loaded.model.named_parameters() if "lora_A" in n and p.requires_grad]


@pytest.mark.parametrize("targets", [r".*self_attn\.(q|v)_proj", "all-linear"])
def test_targets_of_another_program_may_be_a_pattern(targets: str, base: Path, tmp_path: Path) -> None:
    theirs = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    )
    theirs.save_pretrained(tmp_path)
    wrong = LoRAConfig(rank=4, alpha=8.0, init="usual", targets=("k_proj",))
    with pytest.raises(
        UserError, match=r"model.lora.targets = .*: the adapters in model.path have \[.*'q_proj'"
    ) as said:
        load_policy(ModelConfig(path=str(tmp_path), lora=wrong))
    named = tuple(re.findall(r"'(\w+_proj)'", str(said.value).split("have")[1]))
    trained = load_policy(ModelConfig(path=str(tmp_path), lora=replace(wrong, targets=named)))
    assert any("lora_B" in name and p.requires_grad for name, p in trained.model.named_parameters())


def test_noise_goes_to_what_is_trained(base: Path) -> None:
    policy = adapted(base)
    for where in ("norm", "embedding", "*base_layer*"):
        noise = NoiseConfig(unit="rms", size=0.1, where={where: 1.0})
        with pytest.raises(UserError, match="no parameter of this model fits; it has the kinds attention, mlp"):
            Posterior.around(policy.model.named_parameters(), noise)
    noise = NoiseConfig(unit="rms", size=0.1, where={"mlp": 1.0})
    source = FixedWeights(policy.model, Posterior.around(policy.model.named_parameters(), noise))
    assert {entry.name for entry in source.noisy()} == {
        name for name, _ in policy.model.named_parameters() if ".mlp." in name and "lora_B" in name
    }
    tensors = load_policy(ModelConfig(path=str(base))).model.state_dict().items()
    found = Posterior.around(tensors, NoiseConfig(unit="rms", size=0.1))
    assert any(group.noise_scale > 0 for group in found.groups)


def test_an_optimizer_may_have_the_adapters_alone(base: Path) -> None:
    """The Hugging Face Trainer gives its optimizer no frozen parameters."""
    policy = adapted(base)
    trained = [(name, p) for name, p in policy.model.named_parameters() if p.requires_grad]
    assert posterior_metrics(IVON(trained, ess=1e4))["posterior/sigma_to_rms"] > 0


def test_settings_must_be_those_of_the_adapters_in_the_folder(base: Path, tmp_path: Path) -> None:
    adapted(base).save(tmp_path)
    assert load_policy(ModelConfig(path=str(tmp_path), lora=LORA)).has_adapters
    with pytest.raises(UserError, match="model.lora.rank = 8: the adapters in model.path have 4; set it to that"):
        load_policy(ModelConfig(path=str(tmp_path), lora=LoRAConfig(rank=8)))
    for lora, message in (
        (LoRAConfig(rank=4, alpha=4.0), "lora.alpha = 4.0: the adapters in model.path have 8.0; set it to that"),
        (replace(LORA, targets=("q_proj",)), r"lora.targets = .*: the adapters in model.path have \['down_proj', "),
    ):
        with pytest.raises(UserError, match=message):
            load_policy(ModelConfig(path=str(tmp_path), lora=lora))
    twice = LoRAConfig(rank=4, targets=("q_proj", "v_proj", "q_proj"))
    adapted(base, twice).save(tmp_path / "twice")
    assert load_policy(ModelConfig(path=str(tmp_path / "twice"), lora=twice)).has_adapters


def test_a_peft_that_transformers_refuses_is_one_line(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ValueError("The version of PEFT you are using is not compatible, please use a version >= 99")

    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", refuse)
    with pytest.raises(UserError, match=r"^model.lora: The version of PEFT .* >= 99$"):
        adapted(base)
