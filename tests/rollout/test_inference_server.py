"""What an inference server answers that is no answer; the real ones are in test_vllm_servers.py."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch

from threepo.config.engine import VLLMConfig, VLLMEngineConfig
from threepo.errors import UserError
from threepo.models.policy import Policy
from threepo.ranks.vllm_servers import VLLMServers
from threepo.ranks.world import ALONE
from threepo.rollout.inference_server import InferenceServer


class Handler(BaseHTTPRequestHandler):
    """Answers as vLLM does that was started with --api-key: with a text where other errors have a table."""

    def do_POST(self) -> None:
        allowed = self.headers.get("Authorization") == "Bearer secret"
        told: dict[str, Any] = {"success": True} if allowed else {"error": "Unauthorized"}
        if self.path == "/busy":
            told = {"error": "The model is currently scaling"}
        self.send_response(503 if self.path == "/busy" else 200 if allowed else 401)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[InferenceServer]:
    real = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=real.serve_forever)
    thread.start()
    yield InferenceServer(f"http://127.0.0.1:{real.server_port}", 10.0)
    real.shutdown()
    thread.join()
    real.server_close()


def test_a_server_with_a_key(server: InferenceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(UserError, match=r"refuses /reset_prefix_cache without its key; set VLLM_API_KEY"):
        asyncio.run(server._request("POST", "/reset_prefix_cache", {}))
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert asyncio.run(server._request("POST", "/reset_prefix_cache", {})) == {"success": True}


def test_an_error_that_is_a_text(server: InferenceServer) -> None:
    with pytest.raises(UserError, match="failed to /busy: The model is currently scaling"):
        asyncio.run(server._request("POST", "/busy", {}))


def test_a_model_in_bfloat16_wants_servers_in_bfloat16(policy: Policy) -> None:
    """Its draws are rounded, and a server in float32 would make others."""
    policy.model.to(torch.bfloat16)
    settings = VLLMEngineConfig(vllm=VLLMConfig(servers=("http://127.0.0.1:9",), weights_folder="weights"))
    with pytest.raises(UserError, match=r"engine.dtype = 'float32': the model is in bfloat16"):
        VLLMServers(policy, settings, ALONE)
