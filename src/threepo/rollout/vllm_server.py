"""A vLLM engine in a replica's process, which answers the trainer's requests.

vLLM only warns when a reload misses tensors, and log-probs change little in one training step. Therefore the engine
starts with weights that are NaN: a tensor that keeps some of them makes the probe NaN. First every parameter is
overwritten in place, which finds tensors that no push reaches. (vLLM's own initial values are about zero: a bias would
pass.) Then NaN weights are pushed, which finds tensors that only the first push reaches. A packed copy that no push
reaches keeps the start's values, and differs. (An output head did keep its old weights in such a copy.)

With tensor parallelism vLLM has a worker process for each part, and every worker reads the shared memory itself.

vLLM decodes step by step here, with a report after every step and every reload. `LLM.generate` would be silent until
all is done.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from threepo.config import EngineConfig, SamplingConfig
from threepo.rollout.memory import Layout, SharedTensors

Row = tuple[tuple[int, ...], int]
"""Prompt tokens and seed, which vLLM holds in a signed 64-bit integer."""
Decoded = tuple[list[int], list[float]]
"""New tokens and their log-probs."""
Held = tuple[list[int], list[float]]
"""The checksum of what each worker has read, and the log-probs of the probe."""
_mapped: dict[int, SharedTensors] = {}
"""In a worker, which is this process unless there are several: the shared memory of weights, by their index."""


class Server:
    """Its methods are the requests. Weights are named by the index of the shared memory that they are in."""

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report
        self._probe: Sequence[int] = ()
        self._held: int | None = None
        self._engine: Any = None

    def start(self, settings: EngineConfig, folder: str, room: int, probe: Sequence[int]) -> None:
        """Start vLLM for the model whose config.json is in `folder`, with weights that are not numbers."""
        import vllm

        own, on_gpu = settings.vllm, torch.cuda.is_available()
        self._engine = vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",  # no sampling defaults from the model's files
            dtype=settings.dtype,
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            # On a CPU a prompt cut in two fails: vLLM 0.32 sets back its generator, which only those of GPUs allow.
            enable_chunked_prefill=None if on_gpu else False,
            max_model_len=room,
            max_num_seqs=settings.max_batch_rows,
            enforce_eager=own.enforce_eager,
            gpu_memory_utilization=own.gpu_memory_utilization,
            kv_cache_memory_bytes=own.kv_cache_memory_bytes or (None if on_gpu else 1 << 30),
            disable_log_stats=True,
            seed=0,
            tensor_parallel_size=own.tensor_parallel,
            distributed_executor_backend="mp" if own.tensor_parallel > 1 else None,
        )
        self._engine.apply_model(fill_with_nan)
        self._probe = probe

    def share(self, index: int, layout: Layout, path: str) -> None:
        """Map the shared memory that weights `index` will be in."""
        self._engine.collective_rpc(share, args=(index, layout, path))

    def push(self, index: int) -> Held:
        """Load weights `index` into vLLM; returns what shows that it holds them."""
        if self._held is None:
            self._reload(index, rehearsed=True)
        read = self._reload(index)
        self._held = index
        # Prompt log-probs are never served from the prefix cache.
        parameters = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        found = self._run([self._probe], [parameters])[0].prompt_logprobs
        return read, [of[token].logprob for of, token in zip(found[1:], self._probe[1:], strict=True)]

    def generate(
        self, rows_of: Mapping[int, Sequence[Row]], sampling: SamplingConfig, stop_tokens: Sequence[int]
    ) -> dict[int, tuple[Held | None, list[Decoded]]]:
        """Decode the rows of each of several weights in turn, with the result of `push` where one was needed."""
        decoding = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.temperature else 1.0,
            "top_k": sampling.top_k if sampling.temperature else 0,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(stop_tokens),
            "ignore_eos": True,  # only the policy's stop tokens end a row
            "detokenize": False,
            "logprobs": 0,  # of the sampled token only
        }
        return {
            index: (None if index == self._held else self.push(index), self._decode(rows, decoding))
            for index, rows in rows_of.items()
        }

    def _reload(self, index: int, rehearsed: bool = False) -> list[int]:
        read: list[int] = self._engine.collective_rpc(reload, args=(index, rehearsed))
        if not self._engine.reset_prefix_cache():  # it holds keys and values of the old weights
            raise RuntimeError("vLLM did not flush its prefix cache")
        self._report()
        return read

    def _decode(self, rows: Sequence[Row], decoding: dict[str, Any]) -> list[Decoded]:
        found = self._run([prompt for prompt, _ in rows], [{**decoding, "seed": seed} for _, seed in rows])
        decoded = []
        for (output,) in (row.outputs for row in found):
            assert output.finish_reason in ("stop", "length"), output.finish_reason
            logprobs = [of[token].logprob for of, token in zip(output.logprobs, output.token_ids, strict=True)]
            decoded.append((list(output.token_ids), logprobs))
        return decoded

    def _run(self, prompts: Sequence[Sequence[int]], parameters: Sequence[dict[str, Any]]) -> list[Any]:
        """A vLLM `RequestOutput` per prompt; `parameters` are arguments of vllm.SamplingParams."""
        import vllm

        self._engine.enqueue(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [vllm.SamplingParams(**of) for of in parameters],
            use_tqdm=False,
        )
        engine, finished = self._engine.llm_engine, []
        while engine.has_unfinished_requests():
            finished += [output for output in engine.step() if output.finished]
            self._report()
        assert len(finished) == len(prompts)
        return sorted(finished, key=lambda output: int(output.request_id))  # numbered as they were enqueued


def share(worker: Any, index: int, layout: Layout, path: str) -> None:
    """In a vLLM worker: map shared memory."""
    _mapped[index] = SharedTensors(layout, path)


def reload(worker: Any, index: int, rehearsed: bool) -> int:
    """In a vLLM worker: load its part of weights `index`, or of NaN in their place; returns their checksum."""
    weights = _mapped[index].tensors
    worker.reload_weights(weights_iterator=all_nan(weights) if rehearsed else iter(weights.items()))
    return _mapped[index].checksum()


def all_nan(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors like these, one at a time, in which every floating-point number is NaN."""
    for name, value in weights.items():
        yield name, torch.full_like(value, math.nan) if value.is_floating_point() else value


@torch.no_grad()
def fill_with_nan(model: torch.nn.Module) -> None:
    """Overwrite the floating-point parameters of a model in place."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.fill_(math.nan)
