"""Rollout engines of other trainers, asked for log-probs: vLLM and SGLang, by HTTP or in this process (certify.py)."""

import json
import math
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from typing import Any

import torch

from threepo.errors import UserError

TOP = 5
"""Most probable tokens after a prompt whose log-probs are asked for."""


@dataclass(frozen=True)
class Engine:
    """A rollout engine, as a certificate asks it. Token ids go in, log-probs come out."""

    name: str
    """Name in messages."""
    prompt: Callable[[Sequence[int]], Sequence[float]]
    """Log-probs of all tokens of a prompt but the first."""
    following: Callable[[Sequence[int]], Mapping[int, float]] | None = None
    """Log-probs of some tokens after a prompt, as generation has them; None: generation is not looked at."""
    dtype: torch.dtype | None = None
    """Dtype of its weights; None: unknown."""
    longest: int | None = None
    """Most tokens of a row; None: as many as the model takes."""


def completions_server(url: str, model: str = "", timeout: float = 120.0) -> Engine:
    """vLLM's server, as started by `vllm serve`; `model` is the name that it serves the weights under.

    It tells its dtype only with VLLM_SERVER_DEV_MODE=1. `UserError` if it is not there or refuses.
    """
    url = url.rstrip("/").removesuffix("/v1")
    ask = partial(_request, url, timeout=timeout)
    with _readable(url):
        served = {card["id"]: card for card in ask("/v1/models")["data"]}
        name = model or next(iter(served))
    if name not in served:
        raise UserError(f"{url}: does not serve {name!r}; it serves {', '.join(served)}")
    common = {"model": name, "max_tokens": 1, "temperature": 0.0, "repetition_penalty": 1.0}

    def prompt(tokens: Sequence[int]) -> list[float]:
        answer = ask("/v1/completions", common | {"prompt": list(tokens), "prompt_logprobs": 0})
        if answer is None:
            return [math.nan] * (len(tokens) - 1)
        with _readable(url):
            found = zip(answer["choices"][0]["prompt_logprobs"][1:], tokens[1:], strict=True)
            return [at_position[str(token)]["logprob"] for at_position, token in found]

    def following(tokens: Sequence[int]) -> dict[int, float]:
        wanted = {"prompt": list(tokens), "logprobs": TOP, "return_tokens_as_token_ids": True}
        answer = ask("/v1/completions", common | wanted)
        with _readable(url):
            top = answer["choices"][0]["logprobs"]["top_logprobs"][0] if answer else {"token_id:0": math.nan}
            return {int(token.removeprefix("token_id:")): value for token, value in top.items()}

    told, dtype = ask("/server_info?config_format=json", missing=True), None
    with _readable(url):
        if told:
            started = told["vllm_config"]["model_config"]
            dtype = getattr(torch, started["dtype"].removeprefix("torch."))
            if "logits" in started["logprobs_mode"]:
                mode = f"--logprobs-mode {started['logprobs_mode']}"
                raise UserError(f"{url}: was started with {mode}, which gives no log-probs; use raw_logprobs")
    return Engine(url, prompt, following, dtype, served[name].get("max_model_len"))


def sglang_server(url: str, timeout: float = 120.0) -> Engine:
    """SGLang's own server. Not yet run against a real one: the format is read from SGLang's source."""
    url = url.rstrip("/").removesuffix("/v1")

    def ask(tokens: Sequence[int], start: int) -> Any:
        sampling = {"max_new_tokens": 1, "temperature": 0.0, "repetition_penalty": 1.0}
        body = {"input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True}
        return _request(url, "/generate", body | {"logprob_start_len": start, "top_logprobs_num": TOP}, timeout)

    def prompt(tokens: Sequence[int]) -> list[float]:
        answer = ask(tokens, 0)
        with _readable(url):
            found = answer["meta_info"]["input_token_logprobs"][1:]
            return [math.nan if entry[0] is None else entry[0] for entry in found]

    def following(tokens: Sequence[int]) -> dict[int, float]:
        answer = ask(tokens, -1)
        with _readable(url):
            top = answer["meta_info"]["output_top_logprobs"][0]
            return {token: math.nan if value is None else value for value, token, *_ in top}

    return Engine(url, prompt, following)


def vllm_engine(llm: Any) -> Engine:
    """A `vllm.LLM` in this process."""
    parameters = sys.modules["vllm"].SamplingParams  # imported by whoever has made the engine

    def ask(tokens: Sequence[int], **what: int) -> Any:
        wanted = parameters(max_tokens=1, temperature=0.0, **what)
        (output,) = llm.generate([{"prompt_token_ids": list(tokens)}], wanted, use_tqdm=False)
        return output

    def prompt(tokens: Sequence[int]) -> list[float]:
        found = ask(tokens, prompt_logprobs=0).prompt_logprobs[1:]
        return [at_position[token].logprob for at_position, token in zip(found, tokens[1:], strict=True)]

    def following(tokens: Sequence[int]) -> dict[int, float]:
        return {token: value.logprob for token, value in ask(tokens, logprobs=TOP).outputs[0].logprobs[0].items()}

    config = llm.llm_engine.model_config
    return Engine("vllm.LLM", prompt, following, config.dtype, config.max_model_len)


@contextmanager
def _readable(url: str) -> Iterator[None]:
    """`UserError` if the body cannot read what it looks for in a server's answer."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{url}: answers without log-probs of a prompt and of the next token ({reason}); is it a server of vLLM "
            f"or, with --kind sglang, of SGLang?"
        ) from error


def _request(url: str, path: str, body: Any = None, timeout: float = 120.0, missing: bool = False) -> Any:
    """The answer; None if a number in it is NaN, of which vLLM makes an error, or if `missing` and there is no path."""
    content, headers = None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"}
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url}: is no address of a server; write http://{url}")
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    try:
        request = urllib.request.Request(url + path, content, headers)
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        text = " ".join(error.read().decode(errors="replace").split())[:300]
        if (missing and error.code == 404) or "not JSON compliant" in text:
            return None
        fix = {401: "; set VLLM_API_KEY to its key", 404: "; is it a server of another kind (--kind)?"}
        raise UserError(f"{url}: refuses {path} ({error.code}): {text}{fix.get(error.code, '')}") from error
    except (OSError, ValueError, HTTPException) as error:  # ValueError: no URL, or no JSON
        what = f"does not answer {path} ({str(error).strip()})"
        raise UserError(f"{url}: {what}; start the server, or correct the address") from error
