"""A vLLM server on an inference node, as its client sees it: draws told by address, token ids in, log-probs out.

The server is vLLM's own, with the weight-transfer backend of plugins/vllm.py; docs/engines.md has the command that
starts it. Requests run side by side in one event loop, each over a connection of its own (HTTP/1.0, so that an answer
ends with its connection), and each with a time limit.
"""

import asyncio
import json
import math
import os
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from threepo.errors import UserError
from threepo.rollout.bit_sums import Sums
from threepo.rollout.vllm_replica import READING, Generated, asking
from threepo.rollout.weight_check import Logprobs, followers
from threepo.types import Draw

_NAN = "not JSON compliant"
"""Part of the error that vLLM gives instead of a log-prob that is NaN."""


class InferenceServer:
    """One server. Methods raise a `UserError` of one line that names it, if it is down, fails or does not answer."""

    def __init__(self, url: str, timeout: float) -> None:
        """`timeout`: seconds for a request."""
        self.url, self._timeout = url, timeout
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port or 80
        self.version = ""
        """Names the weights that it holds."""

    async def check(self, dtype: str) -> int:
        """Refuse a server that was started with options that do not fit. Returns its longest row in tokens."""
        config = (await self._request("GET", "/server_info?config_format=json"))["vllm_config"]
        model, transfer = config["model_config"], config["weight_transfer_config"] or {}
        started = {
            "--weight-transfer-config": (transfer.get("backend"), "threepo"),
            "--logprobs-mode": (model["logprobs_mode"], "processed_logprobs"),
            "--dtype": (model["dtype"].removeprefix("torch."), dtype),
        }
        for option, (found, needed) in started.items():
            if found != needed:
                raise self._error(f"was started with {option} {found}; start it with {needed} (docs/engines.md)")
        return int(model["max_model_len"])

    async def tell(
        self,
        pushed: tuple[Path, Sequence[Sequence[Path]]],
        draw: Draw | None,
        sums: Sums,
        version: str,
        prompt: Sequence[int],
    ) -> Logprobs:
        """Make the server read a draw from a full push and the changes since, whose tensors must have these sums.

        Returns log-probs for the fixed prompt.
        """
        full, changes = str(pushed[0]), [[str(file) for file in files] for files in pushed[1]]
        address = None if draw is None else list(astuple(draw))
        try:
            await self._request("POST", "/start_weight_update", {})
        except UserError as error:
            if "already active" not in str(error):  # by a run that was killed; there is nothing to undo
                raise
        update = {"path": full, "changes": changes, "draw": address, "sums": sums}
        await self._request("POST", "/update_weights", {"update_info": update})
        await self._request("POST", "/finish_weight_update", {"weight_version": version})
        flushed = await self._request("POST", "/reset_prefix_cache", {})  # it holds keys and values of the old weights
        if not flushed["success"]:
            raise self._error("did not flush its prefix cache: somebody else sends it requests; stop them")
        self.version = version
        try:
            # Asks first, before the reading fills the prefix cache anew.
            asked, read = [await self._generate(prompt, how) for how in (asking(prompt), READING)]
        except UserError as error:
            if _NAN not in str(error):
                raise
            return Logprobs([math.nan] * (len(prompt) - 1), [])
        (position,) = asked["choices"][0]["logprobs"]["content"]
        after = {found["token_id"]: found["logprob"] for found in position["top_logprobs"]}
        at_each = zip(read["prompt_logprobs"][1:], prompt[1:], strict=True)
        return Logprobs(
            [at_position[str(token)]["logprob"] for at_position, token in at_each],
            [after[token] for token in followers(prompt)],
        )

    async def complete(self, prompt: Sequence[int], parameters: dict[str, Any]) -> Generated:
        """New tokens and their log-probs; `parameters` are arguments of vllm.SamplingParams."""
        (choice,) = (await self._generate(prompt, parameters))["choices"]
        assert choice["finish_reason"] in ("stop", "length"), choice["finish_reason"]
        return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]

    async def _generate(self, prompt: Sequence[int], parameters: dict[str, Any]) -> Any:
        body = {"token_ids": list(prompt), "sampling_params": parameters}
        answer = await self._request("POST", "/inference/v1/generate", body)
        used = {span["version"] for choice in answer["choices"] for span in choice["weight_versions"] or ()}
        if used != {self.version}:
            raise self._error(
                f"answered with the weights {', '.join(used)!r} and not with {self.version!r}: it was started anew, "
                f"or another run uses it; give every run servers of its own, and resume this one"
            )
        return answer

    async def _request(self, method: str, path: str, body: Any = None) -> Any:
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.0\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
        if key := os.environ.get("VLLM_API_KEY"):
            head += f"Authorization: Bearer {key}\r\n"
        try:
            async with asyncio.timeout(self._timeout):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
                    answer = await reader.read()
                finally:
                    writer.close()
        except TimeoutError as error:
            raise self._error(
                f"did not answer {path} for {self._timeout:g} seconds: it is stopped or stuck; if it only needs "
                f"longer, raise engine.vllm.timeout_s = {self._timeout:g}"
            ) from error
        except OSError as error:
            raise self._error(f"is not there ({error}); start it, or remove it from the list") from error
        head, _, text = answer.decode().partition("\r\n\r\n")
        status = head.split()[1:2]
        if status == ["404"]:
            raise self._error(
                f"has no {path}: start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out (docs/engines.md)"
            )
        if status == ["401"]:
            raise self._error(f"refuses {path} without its key; set VLLM_API_KEY")
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise self._error(f"broke off during {path} {text[:200]!r}: it has ended; its log says why") from error
        if status != ["200"]:
            told = found.get("error", text) if isinstance(found, dict) else text
            message = told.get("message", text) if isinstance(told, dict) else told
            raise self._error(f"failed to {path}: {message}; its log says more")
        return found

    def _error(self, what: str) -> UserError:
        return UserError(f"engine.vllm.servers: {self.url} {what}")
