"""The certificate against a real vLLM server, as `vllm serve` starts it, with faults in how it gets its weights.

make test-vllm
"""

import importlib.util
import json
import math
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.test_vllm import tiny
from rollout.test_vllm_servers import OPTIONS, started, wait_for
from threepo.certify import Certificate, WrongWeights, completions_server
from threepo.cli import main
from threepo.errors import UserError
from threepo.models.policy import Policy

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` installs it"
)
PLAIN = dict.fromkeys(OPTIONS, "") | {"--served-model-name": "policy", "--max-model-len": "512"}
"""None of the options that threepo's own engine needs."""


@dataclass
class Trainer:
    """Pushes as a loop of one's own may: it writes a checkpoint and lets the server read it again."""

    policy: Policy
    folder: Path
    url: str
    lose: Callable[[str], bool] = field(default=lambda name: False)
    """What keeps its old value in the checkpoint."""
    change: Callable[[str, torch.Tensor], torch.Tensor] = field(default=lambda name, value: value)
    reloads: bool = True
    resets: bool = True

    def push(self) -> None:
        """Write and reload."""
        file = self.folder / "model.safetensors"
        old = {name: value for name, value in load_file(file).items() if self.lose(name)}
        now = {name: self.change(name, p.detach()) for name, p in self.policy.model.named_parameters()}
        save_file(now | old, file, metadata={"format": "pt"})
        if self.reloads:
            self.post("/collective_rpc", {"method": "reload_weights"})
        if self.resets:
            self.post("/reset_prefix_cache")

    def post(self, path: str, body: Any = None) -> None:
        content, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        assert urllib.request.urlopen(urllib.request.Request(self.url + path, content, kind)).status == 200


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("server")
    tiny("tiny-qwen2", tied=False).save(folder / "model")
    options = PLAIN | {"--dtype": request.param}
    with started(folder / "model", folder / "log", **options) as one:
        wait_for(lambda: one.answers("/health"), one)
        yield one.url, folder / "model"


@pytest.fixture
def trainer(server: tuple[str, Path]) -> Iterator[Trainer]:
    url, folder = server
    policy = tiny("tiny-qwen2", tied=False)
    trainer = Trainer(policy, folder, url)
    trainer.push()
    yield trainer
    Trainer(tiny("tiny-qwen2", tied=False), folder, url).push()


def test_right_weights_pass(trainer: Trainer, capfd: pytest.CaptureFixture[str]) -> None:
    engine = completions_server(f"{trainer.url}/v1", "policy")
    certificate = Certificate(trainer.policy.model)
    result = certificate.rehearse(engine, trainer.push)
    print(result)
    assert (len(result.arrived), result.unseen) == (15, ())
    assert result.dtype in ("float32", "bfloat16")
    torch.manual_seed(0)
    for _ in range(5):
        step(trainer)
        certificate.check(engine)
    assert main(["certify", trainer.url, "--model", str(trainer.folder), "--json"]) == 0
    print(capfd.readouterr().out)


def step(trainer: Trainer) -> None:
    """An update, pushed."""
    with torch.no_grad():
        for p in trainer.policy.model.parameters():
            p += 0.05 * p.abs().mean() * torch.randn_like(p)
    trainer.push()


def lost(*parts: str) -> dict[str, Any]:
    """Tensors that no push reaches."""
    return {"lose": lambda name: any(part in name for part in parts)}


def changed(part: str, factor: float) -> dict[str, Any]:
    """A tensor that every push multiplies."""
    return {"change": lambda name, value: value * factor if part in name else value}


LAYER = "model.layers.1."
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "the reload does nothing": ({"reloads": False}, *["noise does not arrive in any kind of tensor"] * 2),
    "no norms": (lost("norm"), *[r"noise does not arrive in \S+\.input_layernorm\S+, \S+, model\.norm\.weight\."] * 2),
    "no head": (lost("lm_head"), *[r"noise does not arrive in lm_head\.weight\."] * 2),
    "no down_proj": (lost("down_proj"), *[r"noise does not arrive in \S+down_proj\.weight\."] * 2),
    "no q_proj": (
        lost("q_proj"),
        r"not arrive in \S+q_proj\.weight, \S+q_proj\.bias\.",
        r"not arrive in \S+q_proj\.bias\.",
    ),
    "one layer": (
        lost(LAYER + "mlp.up_proj"),
        *[r"arrives in part or changed in, or behind, \S+up_proj\.weight\."] * 2,
    ),
    "a NaN": (changed(LAYER + "mlp.up_proj", math.nan), "off by nan", "off by nan"),
    "the head is 3 % off": (changed("lm_head", 1.03), r"allowed by tolerance: 0\.001", "where rounding explains"),
    "the head is 1 % off": (changed("lm_head", 1.01), r"allowed by tolerance: 0\.001", ""),
    "one v_proj is 5 % off": (changed(LAYER + "self_attn.v_proj.weight", 1.05), r"allowed by tolerance: 0\.001", ""),
    "one q_proj is 5 % off": (changed(LAYER + "self_attn.q_proj.weight", 1.05), "", ""),
    "the cache stays": (
        {"resets": False},
        *[r"log-probs after a fixed prompt are .* its prefix cache holds keys and values of other weights"] * 2,
    ),
}
"""What is found in float32 and in bfloat16, as docs/certificate.md has it; nothing where the text is empty."""


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_by_the_rehearsal(fault: str, trainer: Trainer) -> None:
    settings, *words = FAULTS[fault]
    engine = completions_server(trainer.url)
    expected = words[engine.dtype != torch.float32]
    vars(trainer).update(settings)
    if not expected:
        assert Certificate(trainer.policy.model).rehearse(engine, trainer.push).ok
        return
    with pytest.raises(WrongWeights, match=expected) as error:
        Certificate(trainer.policy.model).rehearse(engine, trainer.push)
    print(error.value.result.mean, error.value)


def test_the_command_finds_another_model(trainer: Trainer, capfd: pytest.CaptureFixture[str]) -> None:
    trainer.reloads = False
    step(trainer)
    assert main(["certify", trainer.url, "--model", str(trainer.folder), "--json"]) == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["ok"] is False
    assert err.startswith(f"threepo: {trainer.url} does not compute with the weights of the model at check 1")
    print(err)
    with pytest.raises(UserError, match="does not serve 'other'; it serves policy"):
        completions_server(trainer.url, "other")
