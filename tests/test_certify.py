"""The certificate of weights, with a copy of a model as the engine: faults put in are found and named, no others."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from threepo.certify import Certificate, Engine, WrongWeights, completions_server, sglang_server
from threepo.cli import main
from threepo.config import ModelConfig, TinyConfig
from threepo.errors import UserError
from threepo.models.policy import Policy, load_policy

BLOCK = 128
"""Tokens whose keys and values the engine's cache holds."""
LAYER = "model.layers.1.self_attn.q_proj.weight"


def tiny(**shape: Any) -> Policy:
    """A model that prefers some tokens to others."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "layers": 2, "heads": 2, "kv_heads": 1, "tied": False, **shape}
    policy = load_policy(ModelConfig(path="tiny-qwen2", tiny=TinyConfig(**shape)), seed=2)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight *= 6
    return policy


class Copy:
    """An engine that holds a copy of a model, with a prefix cache, and attention by other kernels than the model's."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model, self.held, self.pushes = model, deepcopy(model).to(dtype).eval(), 0
        self.held.set_attn_implementation("eager")
        self.cache: dict[tuple[int, ...], Any] = {}
        self.lose: Callable[[str], bool] = lambda name: False
        self.change: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, value: value
        self.resets = True
        self.told: Any = None
        self.engine = Engine("copy", self.prompt, self.following, dtype)

    @torch.no_grad()
    def push(self) -> None:
        """Copy the model's weights, but for the faults."""
        self.pushes += 1
        for name, p in self.held.named_parameters():
            if not self.lose(name):
                p.copy_(self.change(name, self.model.get_parameter(name)))
        if self.resets:
            self.cache = {}

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int], cache: Any = None) -> torch.Tensor:
        """Log-probs [T, V] after each token."""
        output = self.held(torch.tensor([tokens]), past_key_values=cache, use_cache=cache is not None)
        return output.logits[0].float().log_softmax(dim=-1)

    def prompt(self, tokens: Sequence[int]) -> list[float]:
        """Prompts are read without the cache, as in vLLM."""
        return self.logprobs(tokens)[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0].tolist()

    def following(self, tokens: Sequence[int]) -> Mapping[int, float]:
        """The five most probable tokens after the prompt."""
        first = tuple(tokens[:BLOCK])
        if first not in self.cache:
            self.cache[first] = DynamicCache()
            self.logprobs(first, self.cache[first])
        values, ids = self.logprobs(tokens[BLOCK:], deepcopy(self.cache[first]))[-1].topk(5)
        return dict(zip(ids.tolist(), values.tolist(), strict=True))


def step(model: Any, size: float = 0.02) -> None:
    """What an update does."""
    with torch.no_grad():
        for p in model.parameters():
            p += size * p.abs().mean() * torch.randn_like(p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_weights_pass_and_the_model_is_what_it_was(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = tiny().model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copy = Copy(model, dtype)
    certificate = Certificate(model)
    result = certificate.rehearse(copy.engine, copy.push)
    assert copy.pushes == 3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert len(result.arrived) == 15
    assert result.unseen == ()
    assert "a push has reached 15 kinds of tensors" in str(result)
    fields = json.loads(result.json())
    assert fields["ok"] is True
    assert fields["tokens"] == 160
    assert 0 < fields["mean"] < (1e-5 if dtype == torch.float32 else 0.02)
    assert 0 < fields["following"] < (1e-5 if dtype == torch.float32 else 0.05)
    for _ in range(5):
        step(model)
        copy.push()
        assert certificate.check(copy.engine).ok


@pytest.mark.parametrize(
    ("lost", "dtype", "named"),
    [
        (("",), torch.float32, r"does not arrive in any kind of tensor\. Log-probs"),
        (
            ("norm",),
            torch.bfloat16,
            r"in model\.layers\.\*\.input_layernorm\.weight, .*post_attention\S+, model\.norm\.weight\. Log",
        ),
        (
            ("lm_head", "down_proj"),
            torch.float32,
            r"in model\.layers\.\*\.mlp\.down_proj\.weight, lm_head\.weight\. Log",
        ),
        (
            ("layers.1.mlp.up_proj",),
            torch.bfloat16,
            r"arrives in part or changed in, or behind, model\.layers\.\*\.mlp\.up_proj\.weight\. Log",
        ),
    ],
)
def test_a_rehearsal_names_the_tensors_that_do_not_arrive(
    lost: tuple[str, ...], dtype: torch.dtype, named: str
) -> None:
    """The engine has them from the start, so no check can see that they are not pushed."""
    model = tiny().model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copy = Copy(model, dtype)
    copy.lose = lambda name: any(part in name for part in lost)
    assert Certificate(model).check(copy.engine).ok
    with pytest.raises(WrongWeights, match=r"^copy does not follow a push: noise .*" + named) as error:
        Certificate(model).rehearse(copy.engine, copy.push)
    assert not error.value.result.ok
    assert "\n" not in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p, before[name].to(dtype)) for name, p in copy.held.named_parameters())


def test_one_layer_of_norms_that_does_not_arrive_is_found() -> None:
    """In float32; bfloat16 may hide one of six."""
    model = tiny(layers=6).model
    copy = Copy(model, torch.float32)
    copy.lose = lambda name: "layers.4.input_layernorm" in name
    with pytest.raises(
        WrongWeights, match=r"in part or changed in, or behind, model\.layers\.\*\.input_layernorm\.weight\."
    ):
        Certificate(model).rehearse(copy.engine, copy.push)


def test_a_prefix_cache_that_outlives_a_push_is_found() -> None:
    model = tiny().model
    copy = Copy(model)
    copy.resets = False
    words = r"the model with the rehearsal's noise that .* after a fixed prompt are .* keys and values of other weights"
    with pytest.raises(WrongWeights, match=words):
        Certificate(model).rehearse(copy.engine, copy.push)
    copy = Copy(model, torch.float32)
    copy.resets = False
    blind = Engine("copy", copy.prompt, None, torch.float32)
    assert Certificate(model).rehearse(blind, copy.push).following is None


def test_old_weights_are_found_after_a_push_and_named() -> None:
    torch.manual_seed(0)
    model = tiny().model
    copy = Copy(model)
    certificate = Certificate(model)
    certificate.rehearse(copy.engine, copy.push)
    for _ in range(3):
        step(model, 0.1)
        copy.push()
        certificate.check(copy.engine)
    step(model, 0.1)
    with pytest.raises(WrongWeights, match=r"at check 6 that .* they fit the weights of check 5, which are"):
        certificate.check(copy.engine)
    copy.held.load_state_dict({name: value.bfloat16() for name, value in tiny().model.state_dict().items()})
    with pytest.raises(WrongWeights, match=r"at check 7 that .* they fit the weights of check 1, which are"):
        certificate.check(copy.engine)


@pytest.mark.parametrize(("factor", "words"), [(1.5, r"off by 0\.\d+ on average"), (float("nan"), "off by nan")])
def test_a_tensor_that_a_push_changes_is_found_by_a_check(factor: float, words: str) -> None:
    model = tiny().model
    copy = Copy(model, torch.float32)
    copy.change = lambda name, value: value * factor if name == LAYER else value
    copy.push()
    with pytest.raises(WrongWeights, match=words) as error:
        Certificate(model).check(copy.engine)
    fields = json.loads(error.value.result.json())
    assert fields["ok"] is False
    assert (fields["mean"] is None) is (words == "off by nan"), "JSON has no NaN"


def test_a_push_that_stops_arriving_is_found_however_small_the_steps() -> None:
    """They do not teach that rounding is large. The error names weights about as the engine got them last."""
    torch.manual_seed(0)
    model = tiny().model
    copy = Copy(model)
    certificate = Certificate(model)
    for _ in range(50):
        copy.push()
        certificate.check(copy.engine)
        step(model, 0.001)
    with pytest.raises(WrongWeights, match=r"they fit the weights of check \d+, which are") as error:
        for _ in range(400):
            certificate.check(copy.engine)
            step(model, 0.001)
    assert error.value.result.mean < 0.02
    [named] = re.findall(r"check (\d+), which", str(error.value))
    assert abs(int(named) - 50) < 20


def test_rounding_is_known_at_the_first_check() -> None:
    model = tiny().model
    copy = Copy(model)
    copy.change = lambda name, value: value * 1.05 if name == "lm_head.weight" else value
    copy.push()
    with pytest.raises(WrongWeights, match=r"0\.0[5-7]\d* \(root mean square\), where rounding explains 0\.00\d"):
        Certificate(model).check(copy.engine)
    assert Certificate(model, tolerance=0.1).check(copy.engine).ok


@pytest.mark.parametrize("where", ["push", "engine"])
def test_an_error_restores_the_model(where: str) -> None:
    model = tiny().model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copy = Copy(model)

    def fail(*_: Any) -> Any:
        if any(not torch.equal(p, before[name]) for name, p in model.named_parameters()):
            raise OSError("the connection broke off")
        return copy.prompt(*_) if _ else copy.push()

    engine = Engine("copy", fail if where == "engine" else copy.prompt, dtype=torch.bfloat16)
    with pytest.raises(OSError, match="broke off"):
        Certificate(model).rehearse(engine, fail if where == "push" else copy.push)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_mixed_precision_of_accelerate_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer of transformers computes in bfloat16 under autocast, whatever the dtype of the weights."""
    accelerate = pytest.importorskip("accelerate")
    # Shared by all that a process makes, such as the trainers of tests that ran before.
    monkeypatch.setattr(accelerate.state.AcceleratorState, "_shared_state", {})
    model = tiny().model
    copy = Copy(model, torch.float32)
    model = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    wrapped = model.forward
    assert Certificate(model).rehearse(copy.engine, copy.push).mean < 1e-5
    rounded = Copy(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert len(Certificate(model).rehearse(rounded.engine, rounded.push).arrived) == 15
    assert model.forward == wrapped


def test_adapters_that_a_push_merges() -> None:
    """As TRL pushes them; what merging noise leaves behind in the weights below is undone."""
    peft = pytest.importorskip("peft")
    base = tiny().model
    copy = Copy(deepcopy(base), torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lost = ""

    @torch.no_grad()
    def push() -> None:
        model.merge_adapter()
        for name, p in model.named_parameters():
            own = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if model.prefix not in name and not (lost and lost in name):
                copy.held.get_parameter(own).copy_(p)
        model.unmerge_adapter()
        copy.cache = {}

    result = Certificate(model).rehearse(copy.engine, push)
    assert len(result.arrived) == 4
    assert result.unseen == ()
    lost = "down_proj"
    with pytest.raises(WrongWeights, match=r"does not arrive in \S+\.down_proj\.lora_B\.default\.weight\. Log-probs"):
        Certificate(model).rehearse(copy.engine, push)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_in_parts_is_refused() -> None:
    model = tiny().model
    model.get_parameter(LAYER).ds_id = 3  # as DeepSpeed marks what it shards
    copy = Copy(tiny().model)
    with pytest.raises(UserError, match=r"q_proj\.weight is sharded or quantised.*`threepo certify URL"):
        Certificate(model).check(copy.engine)


def answered(copy: Copy, path: str, body: Any) -> Any:
    """The answer of SGLang, as far as its source says, or of vLLM, of which the real one is tested elsewhere."""
    if path.startswith("/server_info"):
        return copy.told
    if path == "/v1/models":
        return {"data": [{"id": "policy", "max_model_len": 512}]}
    tokens = body and body.get("input_ids", body.get("prompt"))
    if path == "/v1/completions":
        read = zip(tokens[1:], copy.prompt(tokens), strict=True)
        prompt = [None, *({str(token): {"logprob": value}} for token, value in read)]
        top = {f"token_id:{token}": value for token, value in copy.following(tokens).items()}
        return {"choices": [{"prompt_logprobs": prompt, "logprobs": {"top_logprobs": [top]}}]}
    if path == "/generate":
        top = [[value, token, None] for token, value in copy.following(tokens).items()]
        read = [None, *copy.prompt(tokens)] if body["logprob_start_len"] == 0 else []
        inputs = [[value, token, None] for value, token in zip(read, tokens, strict=bool(read))]
        return {"meta_info": {"input_token_logprobs": inputs, "output_top_logprobs": [top]}}
    return None


@contextmanager
def served(copy: Copy) -> Iterator[str]:
    """The address of a copy behind HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = answered(copy, self.path, json.loads(sent or "null"))
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_command_says_what_it_found(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    policy = tiny()
    policy.save(tmp_path / "model")
    copy = Copy(policy.model)
    with served(copy) as url:
        command = ["certify", url, "--kind", kind, "--model", str(tmp_path / "model")]
        assert main(command) == 0
        assert f"{url} computes with the model's weights" in capfd.readouterr().out
        assert main([*command, "--tolerance", "1e-6"]) == 1
        assert "(allowed by tolerance: 1e-06)" in capfd.readouterr().err
        assert main([*command, "--json", "--dtype", "float32", "--tolerance", "1"]) == 0
        assert json.loads(capfd.readouterr().out)["dtype"] == "float32"
        step(policy.model, 0.3)
        copy.push()
        assert main([*command, "--json"]) == 1
        out, err = capfd.readouterr()
        assert json.loads(out)["ok"] is False
        assert err.startswith(f"threepo: {url} does not compute with the weights of the model at check 1")
        assert main(["certify", f"{url}/else", "--model", str(tmp_path / "model")]) == 2
        assert f"{url}/else: refuses /v1/models (404)" in capfd.readouterr().err
        asked = {"vllm": completions_server, "sglang": sglang_server}[kind](url)
        assert asked.following
        assert asked.following(range(150)) == copy.following(range(150))
    assert main(command) == 2
    assert f"{url}: does not answer /" in capfd.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: {**answer, "choices": [{}]},
        lambda answer: {"choices": [{"prompt_logprobs": None, "logprobs": None}]},
        lambda answer: {"choices": [{"prompt_logprobs": [None, {"3": {"logprob": -1.0}}], "logprobs": {}}]},
        lambda answer: {"choices": [{"logprobs": {"top_logprobs": [{"word": -1.0}]}}]},
        lambda answer: {"choices": []},
    ],
)
def test_a_server_without_logprobs_is_named(
    change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = tiny()
    policy.save(tmp_path)
    original = answered

    def changed(copy: Copy, path: str, body: Any) -> Any:
        found = original(copy, path, body)
        return change(found) if path == "/v1/completions" else found

    monkeypatch.setitem(globals(), "answered", changed)
    with served(Copy(policy.model)) as url:
        assert main(["certify", url, "--model", str(tmp_path)]) == 2
    assert f"{url}: answers without log-probs of a prompt and of the next token" in capfd.readouterr().err


def test_a_server_that_tells_logits_is_refused() -> None:
    copy = Copy(tiny().model)
    copy.told = {"vllm_config": {"model_config": {"dtype": "torch.bfloat16", "logprobs_mode": "raw_logits"}}}
    with served(copy) as url, pytest.raises(UserError, match=r"^http\S+: was started with --logprobs-mode raw_logits"):
        completions_server(url)


def test_bad_input_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    policy = tiny()
    policy.save(tmp_path)
    copy = Copy(policy.model)
    with pytest.raises(UserError, match=r"tolerance = -1: must be above 0"):
        Certificate(policy.model, tolerance=-1.0)
    short = Engine("mine", lambda tokens: copy.prompt(tokens)[1:])
    with pytest.raises(UserError, match=r"mine: tells 158 log-probs of 160 tokens; .* are needed, 159"):
        Certificate(policy.model).check(short)
    other = Engine("other", copy.prompt, lambda tokens: {100_000: -1.0})
    with pytest.raises(UserError, match=r"other: has a token 100000, .* it serves another model"):
        Certificate(policy.model).check(other)
    assert main(["certify", "localhost:8000", "--model", str(tmp_path)]) == 2
    assert "localhost:8000: is no address of a server; write http://localhost:8000" in capfd.readouterr().err


def test_right_weights_pass_however_coarse_the_model_is() -> None:
    """Rounding grows with the head: here it is more than 0.1 nats on average."""
    policy = tiny(layers=4)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight *= 80 / 6
    copy = Copy(policy.model)
    certificate = Certificate(policy.model)
    for _ in range(10):
        certificate.check(copy.engine)
        step(policy.model, 0.05)
        copy.push()


def test_a_mixture_of_experts_is_not_rehearsed() -> None:
    model = torch.nn.Module()
    model.experts = torch.nn.Linear(2, 2)
    layers = torch.nn.Module()
    layers.mlp = model
    with pytest.raises(UserError, match=r"rehearsal: .* mixture .* use check alone"):
        Certificate(layers).rehearse(Engine("copy", lambda tokens: []), lambda: None)


def test_the_loop_of_the_page_runs() -> None:
    """As docs/certificate.md has it, but for the address and what the reader has."""
    page = (Path(__file__).parents[1] / "docs" / "certificate.md").read_text(encoding="utf-8")
    [block] = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Certificate(model)" in text]
    model = tiny().model
    copy = Copy(model)

    with served(copy) as url:
        names = {"model": model, "push": copy.push, "batches": range(3)}
        exec(compile(block.replace("http://10.0.0.7:8000", url), "docs/certificate.md", "exec"), names)
    assert copy.pushes == 3 + 3
