"""The local engine's completions: text, random numbers and ends. Contract 4 is in test_ensemble.py."""

from dataclasses import replace

import pytest
import torch

from chats import THINKING
from rollout.asked import differences, requests_for
from threepo.config import DataConfig, LocalEngineConfig, ModelConfig, SamplingConfig, TinyConfig
from threepo.models.policy import Policy, load_policy
from threepo.posterior.ivon import IVON
from threepo.rollout.local import LocalEngine
from threepo.types import Draw, Problem, Request

SAMPLING = SamplingConfig(max_new_tokens=24)
DRAWS = [Draw(0, 0, i) for i in range(3)]


def tiny(kind: str = "tiny-qwen2", tied: bool = True) -> Policy:
    shape = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, tied=tied)
    policy = load_policy(ModelConfig(path=kind, tiny=shape), seed=2)
    with torch.no_grad():  # a likely end of sequence, so that rows finish at different times
        if not tied:
            policy.model.lm_head.weight[policy.stop_tokens[0]] *= 4
    return policy


@pytest.mark.parametrize("tied", [True, False])
def test_engine_and_trainer_agree_at_another_temperature(tied: bool) -> None:
    policy = tiny(tied=tied)
    optimizer = IVON(policy.model.named_parameters(), ess=1e6)  # sigma 0.03: draws differ visibly
    engine = LocalEngine(policy, LocalEngineConfig(max_batch_rows=5))
    draws, sampling = [*DRAWS[:2], None], SamplingConfig(max_new_tokens=8, temperature=0.7)
    engine.load(optimizer, draws, 0)
    completions = engine.generate(requests_for(policy, draws, 1), sampling, seed=1)
    for (draw, other), difference in differences(policy, optimizer, completions, 0.7).items():
        if draw == other:
            assert difference < 1e-4
        else:
            assert difference > 1e-2, "the engine served one draw's rows with another's weights"


def test_a_completion_says_what_its_prompt_has_opened() -> None:
    policy = tiny()
    policy.tokenizer.chat_template = THINKING
    problem = Problem(id="p", prompt=({"role": "user", "content": "Hi"},))
    prompts = policy.prompt_tokens([problem], DataConfig(train="x"))[0], tuple(policy.tokenizer("Hi")["input_ids"])
    engine = LocalEngine(policy, LocalEngineConfig())
    engine.load(IVON(policy.model.named_parameters(), ess=1e6), [None], 0)
    requests = [Request(problem, tokens, None, 0) for tokens in prompts]
    assert [c.opening for c in engine.generate(requests, SAMPLING, seed=1)] == ["<think>", ""]


def test_seed_step_problem_and_rollout_are_the_random_address() -> None:
    policy = tiny()
    optimizer = IVON(policy.model.named_parameters())
    engine = LocalEngine(policy, LocalEngineConfig())
    request = requests_for(policy, [None])[0]

    def tokens(request: Request, seed: int, step: int) -> tuple[int, ...]:
        engine.load(optimizer, [None], step)
        return engine.generate([request], SAMPLING, seed)[0].tokens

    same = tokens(request, 1, 0)
    assert tokens(request, 1, 0) == same
    assert tokens(request, 2, 0) != same
    assert tokens(request, 1, 1) != same
    assert tokens(replace(request, rollout=1), 1, 0) != same
    assert tokens(replace(request, problem=Problem(id="other", prompt="a")), 1, 0) != same


@pytest.mark.parametrize("kind", ["tiny-qwen2", "tiny-llama"])
def test_greedy_decoding_equals_transformers(kind: str) -> None:
    policy = tiny(kind, tied=False)
    engine = LocalEngine(policy, LocalEngineConfig())
    engine.load(IVON(policy.model.named_parameters()), [None], 0)
    for completion in engine.generate(requests_for(policy, [None], 1), replace(SAMPLING, temperature=0.0), 0):
        generated = policy.model.generate(
            torch.tensor([completion.prompt_tokens]),
            attention_mask=torch.ones(1, len(completion.prompt_tokens), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=24,
        )
        assert generated[0, len(completion.prompt_tokens) :].tolist() == list(completion.tokens)


def test_stopping_and_cutting() -> None:
    policy = tiny(tied=False)
    engine = LocalEngine(policy, LocalEngineConfig())
    engine.load(IVON(policy.model.named_parameters()), [None], 0)
    stop = policy.stop_tokens[0]
    for completion in engine.generate(requests_for(policy, [None], 8), SAMPLING, 0):
        assert len(completion.logprobs) == len(completion.tokens)
        assert stop not in completion.tokens[:-1]
        if completion.finish_reason == "stop":
            assert completion.tokens[-1] == stop
        else:
            assert len(completion.tokens) == 24
            assert completion.tokens[-1] != stop
        assert "<|endoftext|>" not in completion.text


def test_a_draw_that_is_not_loaded_is_refused() -> None:
    policy = tiny()
    engine = LocalEngine(policy, LocalEngineConfig())
    engine.load(IVON(policy.model.named_parameters()), DRAWS[:1], 0)
    with pytest.raises(RuntimeError, match="is not loaded"):
        engine.generate(requests_for(policy, DRAWS[:2]), SAMPLING, 0)


def test_the_trainers_weights_are_not_touched() -> None:
    policy = tiny()
    optimizer = IVON(policy.model.named_parameters(), ess=1e6)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    engine = LocalEngine(policy, LocalEngineConfig())
    engine.load(optimizer, DRAWS, 0)
    engine.generate(requests_for(policy, list(DRAWS)), SAMPLING, 0)
    for name, p in policy.model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.requires_grad
