"""Rollout engines of other trainers, asked for log-probs: vLLM and SGLang, by HTTP or in this process (certify.py)."""

import json
import math
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    served = ask("/v1/models")["data"]
    names = [card["id"] for card in served]
    if model and model not in names:
        raise UserError(f"{url}: does not serve {model!r}; it serves {', '.join(names)}")
    card = served[names.index(model) if model else 0]
    common = {"model": card["id"], "max_tokens": 1, "temperature": 0.0, "repetition_penalty": 1.0}

    def prompt(tokens: Sequence[int]) -> list[float]:
        answer = ask("/v1/completions", common | {"prompt": list(tokens), "prompt_logprobs": 0})
        if answer is None:
            return [math.nan] * (len(tokens) - 1)
        found = zip(answer["choices"][0]["prompt_logprobs"][1:], tokens[1:], strict=True)
        return [at_position[str(token)]["logprob"] for at_position, token in found]

    def following(tokens: Sequence[int]) -> dict[int, float]:
        wanted = {"prompt": list(tokens), "logprobs": TOP, "return_tokens_as_token_ids": True}
        answer = ask("/v1/completions", common | wanted)
        top = answer["choices"][0]["logprobs"]["top_logprobs"][0] if answer else {"token_id:0": math.nan}
        return {int(token.removeprefix("token_id:")): value for token, value in top.items()}

    told = ask("/server_info?config_format=json", missing=True)
    dtype = getattr(torch, told["vllm_config"]["model_config"]["dtype"].removeprefix("torch.")) if told else None
    return Engine(url, prompt, following, dtype, card.get("max_model_len"))


def sglang_server(url: str, timeout: float = 120.0) -> Engine:
    """SGLang's own server. Not yet run against a real one: the format is read from SGLang's source."""
    url = url.rstrip("/").removesuffix("/v1")

    def ask(tokens: Sequence[int], start: int) -> Any:
        sampling = {"max_new_tokens": 1, "temperature": 0.0, "repetition_penalty": 1.0}
        body = {"input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True}
        answer = _request(url, "/generate", body | {"logprob_start_len": start, "top_logprobs_num": TOP}, timeout)
        return answer["meta_info"]

    def prompt(tokens: Sequence[int]) -> list[float]:
        return [math.nan if entry[0] is None else entry[0] for entry in ask(tokens, 0)["input_token_logprobs"][1:]]

    def following(tokens: Sequence[int]) -> dict[int, float]:
        top = ask(tokens, -1)["output_top_logprobs"][0]
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


def _request(url: str, path: str, body: Any = None, timeout: float = 120.0, missing: bool = False) -> Any:
    """The answer; None if a number in it is NaN, of which vLLM makes an error, or if `missing` and there is no path."""
    content = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url + path, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        text = " ".join(error.read().decode(errors="replace").split())[:300]
        if (missing and error.code == 404) or "not JSON compliant" in text:
            return None
        raise UserError(f"{url}: refuses {path} ({error.code}): {text}") from error
    except (OSError, ValueError) as error:  # ValueError: no URL, or no JSON
        raise UserError(f"{url}: does not answer {path} ({error}); start the server, or correct the address") from error
