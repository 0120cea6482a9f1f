"""Many policies in one batch: contract 4 for every family, and that company changes nothing for a row."""

import statistics
from dataclasses import replace
from typing import Any

import pytest
import scipy.stats
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MptConfig, Qwen2Config

from families import FAMILIES, SHAPE, policy_of
from rollout.asked import trainer_logprobs
from threepo.config import LocalEngineConfig, SamplingConfig
from threepo.errors import UserError
from threepo.models.logprobs import Scorer
from threepo.models.packing import flatten
from threepo.models.policy import Policy
from threepo.posterior.ivon import IVON
from threepo.rollout import cache, decode_attention, decoding, stacked_linear
from threepo.rollout.ensemble import Ensemble, Rows
from threepo.rollout.local import LocalEngine
from threepo.types import Completion, CreditedRow, Draw, Problem, Request

SAMPLING = SamplingConfig(max_new_tokens=12)
DRAWS = [Draw(0, 0, i) for i in range(4)]
PROMPTS = ["a", "sort 31\n", "a prompt that is longer than the others: ", "ab", "the second longest one"]


def requests_for(policy: Policy, draws: list[Draw | None], rollouts: int = 3) -> list[Request]:
    return [
        Request(Problem(id=text, prompt=text), tuple(policy.tokenizer(text)["input_ids"]), draw, n * rollouts + i)
        for text in PROMPTS
        for n, draw in enumerate(draws)
        for i in range(rollouts)
    ]


def numbers_of(policy: Policy, dtype: torch.dtype = torch.float32) -> int:
    """Numbers in a draw's weights, the tied embedding once; matrices in whole panels if products are compiled."""
    packed = stacked_linear.serves(64, dtype, torch.device("cpu"))
    return sum(
        stacked_linear.padded(p.shape[0]) * p.shape[1] if packed and p.dim() == 2 else p.numel()
        for p in policy.model.parameters()
    )


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The compiled kernels, where there are a compiler and kernels for the processor."""
    if request.param == "of this machine":
        return request.param
    if request.param in ("torch", "products compiled"):
        monkeypatch.setattr(decode_attention, "serves", lambda k, v: False)
    elif decode_attention.LIBRARY.loaded is None:
        pytest.skip("no compiled attention here")
    if request.param in ("torch", "attention compiled"):
        monkeypatch.setattr(stacked_linear, "level", lambda dtype: 0)
    elif not stacked_linear.serves(64, torch.float32, torch.device("cpu")):
        pytest.skip("no compiled products here")
    return request.param


def worst_differences(policy: Policy, completions: list[Completion], optimizer: IVON) -> dict[tuple[int, int], float]:
    """Largest log-prob difference to the trainer, by the draw in the trainer and the draw that is said to have
    generated."""
    found = {}
    by_draw = {draw: [c for c in completions if c.draw == draw] for draw in DRAWS}
    assert all(by_draw.values())
    for at in DRAWS:
        with optimizer.at(at), torch.no_grad():
            for by, mine in by_draw.items():
                scored = policy.logprobs(flatten([CreditedRow.of(c, 0) for c in mine], policy.device)).logprobs
                said = torch.tensor([logprob for c in mine for logprob in c.logprobs])
                found[at.index, by.index] = float((scored - said).abs().max())
    return found


BY_TORCH_TOO = ["llama with biases", "qwen2 sliding", "qwen3", "head width 8", "gpt-neox", "granite"]
"""Families with every shape of weights and kind of attention that kernels see; the others differ in their own code."""


@pytest.mark.parametrize(
    ("kernels", "family"),
    [*(("of this machine", family) for family in FAMILIES), *(("torch", family) for family in BY_TORCH_TOO)],
    indirect=["kernels"],
)
@pytest.mark.usefixtures("kernels")
def test_every_family_is_decoded_as_the_trainer_sees_it(family: str) -> None:
    policy = policy_of(FAMILIES[family])
    optimizer = IVON(policy.model.named_parameters(), ess=1e6, seed=1)
    engine = LocalEngine(policy, LocalEngineConfig())
    engine.load(optimizer, DRAWS, 0)
    completions = engine.generate(requests_for(policy, list(DRAWS), 1), SAMPLING, seed=1)
    for (at, by), difference in worst_differences(policy, completions, optimizer).items():
        if at == by:
            assert difference < 1e-4
        else:
            assert difference > 1e-2, "one draw's rows went through another's weights"


@pytest.mark.parametrize(
    ("kernels", "family"),
    [
        ("compiled", "olmo3"),
        ("attention compiled", "qwen2 sliding"),
        ("products compiled", "qwen2 sliding"),
        ("torch", "olmo3"),
    ],
    indirect=["kernels"],
)
@pytest.mark.usefixtures("kernels")
def test_bfloat16_stays_close_to_the_trainer(family: str) -> None:
    policy = policy_of(FAMILIES[family])
    optimizer = IVON(policy.model.named_parameters(), ess=1e6, seed=1)
    engine = LocalEngine(policy, LocalEngineConfig(dtype="bfloat16"))
    engine.load(optimizer, DRAWS, 0)
    completions = engine.generate(requests_for(policy, list(DRAWS)), SAMPLING, seed=1)
    # A bfloat16 has 8 bits: logits of about 5 are off by up to 0.03, a few times in a row through the layers.
    errors = []
    for draw in DRAWS:
        with optimizer.at(draw):
            for c in completions:
                if c.draw == draw:
                    errors += (trainer_logprobs(policy, c) - torch.tensor(c.logprobs)).tolist()
    assert statistics.fmean(map(abs, errors)) < 0.03
    assert max(map(abs, errors)) < 0.3
    assert abs(statistics.fmean(errors)) < 0.01


@pytest.mark.usefixtures("kernels")
def test_a_row_does_not_depend_on_its_company() -> None:
    """Alone, with other draws, in a small batch that rows enter and leave, in another order: the same completion."""
    policy = policy_of(FAMILIES["olmo3"])
    ends = range(0, SHAPE["vocab_size"], 12)  # so many that rows leave at different times
    policy.model.generation_config.eos_token_id = list(ends)
    optimizer = IVON(policy.model.named_parameters(), ess=1e6, seed=1)
    requests = requests_for(policy, list(DRAWS), 2)
    sampling = replace(SAMPLING, max_new_tokens=16)

    def generated(requests: list[Request], draws: list[Draw], **settings: Any) -> dict[tuple[str, int], Completion]:
        engine = LocalEngine(policy, LocalEngineConfig(**settings))
        engine.load(optimizer, draws, 3)
        return {(c.problem.id, c.rollout): c for c in engine.generate(requests, sampling, seed=1)}

    expected = generated(requests, DRAWS)
    assert len({len(c.tokens) for c in expected.values()}) > 4
    assert {c.finish_reason for c in expected.values()} == {"stop", "length"}
    for rows in (4, 13):
        for key, completion in generated(requests[::-1], DRAWS[::-1], max_batch_rows=rows).items():
            assert completion.tokens == expected[key].tokens
            assert completion.logprobs == pytest.approx(expected[key].logprobs, abs=1e-5)
    for draw in DRAWS[:2]:
        alone = generated([request for request in requests if request.draw == draw], [draw])
        assert len(alone) == len(requests) / len(DRAWS)
        for key, completion in alone.items():
            assert completion.tokens == expected[key].tokens
            assert completion.logprobs == pytest.approx(expected[key].logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("kernels", "inner"), [("compiled", 96), ("compiled", 88), ("torch", 96)], indirect=["kernels"]
)
def test_draws_may_have_different_numbers_of_rows(kernels: str, inner: int) -> None:
    """This includes layers whose width the compiled products do not take."""
    policy = policy_of(Qwen2Config(**SHAPE | {"intermediate_size": inner}, num_key_value_heads=2))
    optimizer = IVON(policy.model.named_parameters(), ess=1e6, seed=1)
    engine = LocalEngine(policy, LocalEngineConfig(max_batch_rows=6))
    assert engine._ensemble.ragged == (inner == 96 and kernels == "compiled")
    engine.load(optimizer, [None, *DRAWS[:2]], 0)
    requests = requests_for(policy, [None], 4) + requests_for(policy, [DRAWS[1]], 1)
    completions = engine.generate(requests, SAMPLING, 0)
    assert [(c.problem, c.draw, c.rollout) for c in completions] == [(r.problem, r.draw, r.rollout) for r in requests]
    for completion in completions:
        with optimizer.at(completion.draw):
            difference = trainer_logprobs(policy, completion) - torch.tensor(completion.logprobs)
        assert difference.abs().max() < 1e-4
    assert engine.generate([], SAMPLING, 0) == []


def test_tokens_come_with_their_probabilities_under_every_draw() -> None:
    """Chi-squared over the first token, against the softmax of the model itself at each draw."""
    policy = policy_of(FAMILIES["qwen2"])
    optimizer = IVON(policy.model.named_parameters(), ess=1e6, seed=1)
    engine = LocalEngine(policy, LocalEngineConfig(max_batch_rows=4096))
    engine.load(optimizer, DRAWS[:2], 0)
    problem = Problem(id="x", prompt="x")
    prompt, n = tuple(policy.tokenizer("x: ")["input_ids"]), 4000
    requests = [Request(problem, prompt, DRAWS[i % 2], i) for i in range(2 * n)]
    completions = engine.generate(requests, SamplingConfig(max_new_tokens=1, temperature=0.8), seed=5)
    for draw in DRAWS[:2]:
        with optimizer.at(draw), torch.no_grad():
            p = (policy.model(torch.tensor([prompt])).logits[0, -1].double() / 0.8).softmax(-1)
        tokens = torch.tensor([c.tokens[0] for c in completions if c.draw == draw])
        counts = tokens.bincount(minlength=len(p))
        common = n * p >= 5
        observed = [*counts[common].tolist(), int(counts[~common].sum())]
        expected = [*(n * p[common]).tolist(), float(n * p[~common].sum())]
        assert scipy.stats.chisquare(observed, expected).pvalue > 1e-3


def test_weights_are_made_in_the_engines_dtype_and_take_nothing_else() -> None:
    policy = policy_of(FAMILIES["qwen2"])
    optimizer = IVON(policy.model.named_parameters(), ess=1e6, seed=1)
    engine = LocalEngine(policy, LocalEngineConfig(dtype="bfloat16"))
    for draws in ([*DRAWS], [None]):
        engine.load(optimizer, draws, 0)
        assert engine._ensemble.bytes == len(draws) * numbers_of(policy, torch.bfloat16) * 2
    written = []
    engine._ensemble.pack = written.append
    engine.load(optimizer, DRAWS, 0)
    assert written == [0, 1, 2, 3]
    for n, draw in enumerate(DRAWS):
        for name, value in optimizer.weights(draw):
            assert torch.equal(engine._ensemble.views(n)[name], value.bfloat16())
    assert not any(p.numel() and p.device.type != "meta" for p in engine._ensemble.model.parameters())


@pytest.mark.parametrize("left_out", ["a part of the model", "a name of the tied head"])
def test_the_optimizer_need_not_name_every_parameter(left_out: str) -> None:
    """Parameters that it leaves out are the model's; a tied parameter may have either of its names."""
    policy = policy_of(FAMILIES["qwen2"])
    everything = IVON(policy.model.named_parameters(), ess=1e6, seed=1)
    engine = LocalEngine(policy, LocalEngineConfig())
    engine.load(everything, DRAWS, 0)  # what is not written below has these values, and not those of the trainer
    named = dict(policy.model.named_parameters())
    if left_out == "a part of the model":
        named = {name: p for name, p in named.items() if "layers.1" in name}
    else:
        named["lm_head.weight"] = named.pop("model.embed_tokens.weight")
    optimizer = IVON(named.items(), ess=1e6, seed=2)
    engine.load(optimizer, DRAWS, 0)
    completions = engine.generate(requests_for(policy, list(DRAWS), 1), SAMPLING, seed=1)
    differences = worst_differences(policy, completions, optimizer)
    assert max(differences[i, i] for i in range(len(DRAWS))) < 1e-4


def test_a_compiled_model_is_decoded_as_it_was_before() -> None:
    policy = policy_of(FAMILIES["qwen2"])
    compiled = replace(policy, scorer=Scorer(torch.compile(policy.model, backend="eager"), linear_head=True))
    assert disagreement(compiled, policy) < 1e-4


def disagreement(decoded: Policy, scored: Policy) -> float:
    """Largest difference in log-prob between the engine for one policy and the trainer for the same one."""
    optimizer = IVON(decoded.model.named_parameters(), ess=1e6, seed=1)
    engine = LocalEngine(decoded, LocalEngineConfig())
    engine.load(optimizer, DRAWS, 0)
    completions = engine.generate(requests_for(scored, list(DRAWS), 1), SAMPLING, seed=1)
    differences = worst_differences(scored, completions, optimizer)
    return max(differences[i, i] for i in range(len(DRAWS)))


def test_prompts_of_many_tokens_are_read_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As real ones are; here by twos, and the last alone."""
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 400)
    policy = policy_of(FAMILIES["qwen2"])
    assert disagreement(policy, policy) < 1e-4


def test_positions_that_depend_on_the_batch_are_refused() -> None:
    """Such models read short and long sequences with other frequencies, so a row would depend on its company."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 60, **factors}
    policy = policy_of(LlamaConfig(**SHAPE, num_key_value_heads=4, rope_parameters=rope))
    optimizer = IVON(policy.model.named_parameters(), ess=1e6, seed=1)
    engine = LocalEngine(policy, LocalEngineConfig())
    engine.prepare(2, 60)
    with pytest.raises(UserError, match=r"'longrope' .* above 60 tokens; .* are 61"):
        engine.prepare(2, 61)
    engine.load(optimizer, DRAWS, 0)
    completions = engine.generate(requests_for(policy, list(DRAWS), 1), SAMPLING, seed=1)
    differences = worst_differences(policy, completions, optimizer)
    assert max(differences[i, i] for i in range(len(DRAWS))) < 1e-4
    with pytest.raises(UserError, match="'longrope'"):
        engine.generate(requests_for(policy, list(DRAWS), 1), replace(SAMPLING, max_new_tokens=50), seed=1)


@pytest.mark.usefixtures("kernels")
def test_lengths_at_the_borders_of_blocks() -> None:
    """Prompts of one token, of stop tokens, around multiples of 16, and up to the context, in slots that change."""
    policy = policy_of(FAMILIES["qwen2 sliding"])
    optimizer = IVON(policy.model.named_parameters(), ess=1e6, seed=1)
    engine = LocalEngine(policy, LocalEngineConfig(max_batch_rows=5))
    engine.load(optimizer, DRAWS, 0)
    prompts = [tuple(2 + i % 90 for i in range(n)) for n in (1, 2, 15, 16, 17, 32, 33, 126)]
    prompts += [policy.stop_tokens * n for n in (1, 20)]
    requests = [
        Request(Problem(id=f"{i} {n}", prompt=""), prompt, DRAWS[n % 3], 0)  # the last draw has none
        for i in range(2)
        for n, prompt in enumerate(prompts)
    ]
    for most in (1, 2):
        for completion in engine.generate(requests, replace(SAMPLING, max_new_tokens=most), seed=1):
            with optimizer.at(completion.draw):
                difference = trainer_logprobs(policy, completion) - torch.tensor(completion.logprobs)
            assert difference.abs().max() < 1e-4


def test_an_interrupted_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(FAMILIES["qwen2"])
    engine = LocalEngine(policy, LocalEngineConfig())
    engine.load(IVON(policy.model.named_parameters(), ess=1e6, seed=1), DRAWS, 0)
    requests = requests_for(policy, list(DRAWS))
    expected = engine.generate(requests, SAMPLING, seed=1)
    calls = iter(range(17))

    def interrupted(*arguments: Any) -> torch.Tensor:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return attend(*arguments)

    attend = cache.Decode.attend
    with monkeypatch.context() as patch:
        patch.setattr(cache.Decode, "attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(requests, SAMPLING, seed=1)
    assert engine.generate(requests, SAMPLING, seed=1) == expected


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    policy = policy_of(FAMILIES["qwen2"])
    weights = numbers_of(policy) * 4
    row = 112 * 3 * 2 * 2 * 16 * 4  # tokens (the cache has whole blocks of 16), layers, keys and values, heads, width
    row += 9 * SHAPE["vocab_size"] * 4  # to choose a token
    gib = 1 << 30
    enough = LocalEngine(policy, LocalEngineConfig(memory_gib=(2 * (weights + row) + 1) / gib))
    enough.prepare(2, 100)
    short = LocalEngine(policy, LocalEngineConfig(memory_gib=(2 * (weights + row) - 1) / gib))
    with pytest.raises(UserError, match=r"2 policies of .* GiB and cache .* for one row of each \(100 tokens\)"):
        short.prepare(2, 100)
    short.prepare(1, 100)


def test_a_batch_has_room_for_a_row_of_every_draw() -> None:
    engine = LocalEngine(policy_of(FAMILIES["qwen2"]), LocalEngineConfig(max_batch_rows=3))
    engine.prepare(3, 10)
    with pytest.raises(UserError, match=r"engine.max_batch_rows = 3: fewer than the 4 draws"):
        engine.prepare(4, 10)


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(policy_of(FAMILIES["qwen2"]), LocalEngineConfig())
    engine.prepare(1, 100)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(1 << 30))  # a few hundred bytes are left for each
    with pytest.raises(UserError, match=r"for one row of each \(100 tokens\) need .* GiB; there are"):
        engine.prepare(1, 100)


def test_less_memory_means_fewer_rows_at_a_time() -> None:
    policy = policy_of(FAMILIES["qwen2"])
    optimizer = IVON(policy.model.named_parameters(), ess=1e6, seed=1)
    weights = numbers_of(policy) * 4
    requests = requests_for(policy, list(DRAWS[:2]))
    tokens = max(len(request.prompt_tokens) for request in requests) + SAMPLING.max_new_tokens
    row = -(-tokens // 16) * 16 * 3 * 2 * 2 * 16 * 4 + 9 * SHAPE["vocab_size"] * 4
    engine = LocalEngine(policy, LocalEngineConfig(memory_gib=(2 * weights + 7 * row) / (1 << 30)))
    engine.load(optimizer, DRAWS[:2], 0)
    assert engine._rows_per_draw(2, 15, tokens) == 3
    roomy = LocalEngine(policy, LocalEngineConfig())
    roomy.load(optimizer, DRAWS[:2], 0)
    assert roomy._rows_per_draw(2, 15, tokens) == 15
    for one, other in zip(engine.generate(requests, SAMPLING, 0), roomy.generate(requests, SAMPLING, 0), strict=True):
        assert one.tokens == other.tokens


def test_a_policy_that_has_diverged_is_named() -> None:
    policy = policy_of(FAMILIES["qwen2"])
    with torch.no_grad():
        policy.model.model.norm.weight[0] = torch.nan
    engine = LocalEngine(policy, LocalEngineConfig())
    engine.load(IVON(policy.model.named_parameters()), DRAWS[:1], 0)
    with pytest.raises(UserError, match="probabilities of Draw.* are not numbers"):
        engine.generate(requests_for(policy, DRAWS[:1], 1), SAMPLING, 0)


@pytest.mark.usefixtures("kernels")
def test_a_policy_that_has_diverged_is_not_mistaken_for_another() -> None:
    """Rows of another policy take its slots in the cache, short ones next to long ones."""
    policy = policy_of(FAMILIES["qwen2"])
    engine = LocalEngine(policy, LocalEngineConfig(max_batch_rows=4))
    engine.load(IVON(policy.model.named_parameters(), ess=1e6, seed=1), DRAWS[:2], 0)
    engine._ensemble.stacks["model.layers.0.input_layernorm.weight"].values[0] = torch.nan
    problem, prompts = Problem(id="x", prompt="x"), [(5,) * 3, (5,) * 15]
    requests = [Request(problem, prompts[i % 2], DRAWS[1], i) for i in range(8)]
    requests += [Request(problem, (5,) * 20, DRAWS[0], i) for i in range(2)]
    with pytest.raises(UserError, match=r"probabilities of Draw\(.*index=0,.* are not numbers"):
        engine.generate(requests, replace(SAMPLING, max_new_tokens=6), 0)


def test_a_model_that_mixes_its_rows_is_found_out() -> None:
    """Only its position tells which policy a row belongs to."""
    if not stacked_linear.serves(64, torch.float32, torch.device("cpu")):
        pytest.skip("no compiled products here")
    ensemble = Ensemble(policy_of(FAMILIES["qwen2"]).model, torch.float32, torch.device("cpu"))
    ensemble.resize(2)
    linear = ensemble.model_for(Rows([1, 2], torch.device("cpu"))).model.layers[0].mlp.up_proj
    assert linear(torch.zeros(3, 5, 64)).shape == (3, 5, 96)
    with pytest.raises(AssertionError, match="3 rows cannot have equally many of 7 positions"):
        linear(torch.zeros(7, 64))


def test_what_cannot_be_stacked_is_refused() -> None:
    mpt = AutoModelForCausalLM.from_config(MptConfig(vocab_size=64, d_model=32, n_heads=2, n_layers=1))
    with pytest.raises(UserError, match="cannot replace the attention of MptForCausalLM"):
        Ensemble(mpt, torch.float32, torch.device("cpu"))
    model = policy_of(FAMILIES["qwen2"]).model
    model.model.layers[0].mlp.gate_proj = torch.nn.Bilinear(64, 64, 96)
    with pytest.raises(UserError, match="cannot stack the weights of a Bilinear"):
        Ensemble(model, torch.float32, torch.device("cpu"))


class Scaled(torch.nn.Embedding):
    """An embedding that inherits from torch's and computes something else, as Gemma's does."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return super().forward(ids) * 8


def test_an_embedding_that_inherits_from_torchs_is_refused() -> None:
    model = policy_of(FAMILIES["llama with biases"]).model
    model.model.embed_tokens = Scaled(model.config.vocab_size, 64)
    with pytest.raises(UserError, match="cannot stack the weights of a Scaled"):
        Ensemble(model, torch.float32, torch.device("cpu"))


class OwnRMSNorm(torch.nn.LayerNorm):
    """A norm that inherits from torch's, and computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A norm that, like RMSNorm, does not subtract the mean."""
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


def test_a_norm_that_inherits_from_torchs_keeps_its_own_code() -> None:
    policy = policy_of(FAMILIES["llama"])
    for block in policy.model.model.layers:
        norm = OwnRMSNorm(block.input_layernorm.weight.shape[0], bias=False)
        norm.weight.data.copy_(block.input_layernorm.weight.data)
        block.input_layernorm = norm
    assert disagreement(policy, policy) < 1e-4
