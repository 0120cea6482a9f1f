"""A vLLM engine in a replica's process, which answers the trainer's requests.

vLLM only warns when a reload misses tensors, and log-probs change little in one training step. Therefore the engine
starts with weights that are NaN: a tensor that keeps some of them makes the probe NaN. First every parameter is
overwritten in place, which finds tensors that no push reaches. (vLLM's own initial values are about zero: a bias would
pass.) Then NaN weights are pushed, which finds tensors that only the first push reaches. A packed copy that no push
reaches keeps the start's values, and differs. (An output head did keep its old weights in such a copy.)

With tensor parallelism vLLM has a worker process for each part, and every worker reads the shared memory itself.

Draws of adapters are served in one batch: the frozen weights are loaded once, and each draw is put into a slot of
vLLM's adapters, from memory and not from a file as its requests would. A slot is emptied first, since vLLM ignores a
second adapter under a known number; it gets a copy, since vLLM multiplies what it is given by alpha / rank in place;
and the prefix cache is flushed, since it tells adapters apart by their names. Every row names an adapter, also the
mean's: in a batch with others, the CPU build of vLLM 0.32 gives a row without one the adapter of the last slot.

vLLM decodes step by step here, with a report after every step and every reload. `LLM.generate` would be silent until
all is done.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from threepo.config import SamplingConfig, VLLMEngineConfig
from threepo.rollout.memory import Layout, SharedTensors

Row = tuple[tuple[int, ...], int]
"""Prompt tokens and seed, which vLLM holds in a signed 64-bit integer."""
Decoded = tuple[list[int], list[float]]
"""New tokens and their log-probs."""
Held = tuple[list[int], list[float]]
"""The checksum of what each worker has read, and the log-probs of the probe."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM has kernels for; adapters of a rank between take the next one's memory."""
_mapped: dict[int, SharedTensors] = {}
"""In a worker, which is this process unless there are several: the shared memory of weights, by their index."""


class Server:
    """Its methods are the requests. Weights are named by the index of the shared memory that they are in."""

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report
        self._probe: Sequence[int] = ()
        self._held: list[int] = []
        """The weights in each slot: one, or with adapters several."""
        self._rehearsed = 0
        """Slots into which NaN has been pushed."""
        self._adapters: dict[str, Any] = {}
        self._slots = 1
        self._engine: Any = None

    def start(
        self, settings: VLLMEngineConfig, folder: str, room: int, probe: Sequence[int], adapters: dict[str, Any]
    ) -> None:
        """Start vLLM for the model whose config.json is in `folder`, with weights that are not numbers.

        `adapters`: empty, or the configuration of peft for those that will be pushed.
        """
        import vllm

        own, on_gpu = settings.vllm, torch.cuda.is_available()
        self._adapters, more = adapters, {}
        if adapters:
            self._slots = own.adapters
            rank = min(rank for rank in RANKS if rank >= adapters["r"])
            more = {"enable_lora": True, "max_loras": own.adapters, "max_lora_rank": rank}
            more["lora_target_modules"] = adapters["target_modules"]
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
            **more,
        )
        self._engine.apply_model(fill_with_nan)
        self._probe = probe

    def share(self, index: int, layout: Layout, path: str) -> None:
        """Map the shared memory that weights `index` will be in."""
        self._engine.collective_rpc(share, args=(index, layout, path))

    def freeze(self, index: int, first: bool) -> None:
        """Load the weights that adapters are beside, which drops all adapters; `first`: for the first time."""
        for rehearsed in (True, False) if first else (False,):
            self._engine.collective_rpc(reload, args=(index, rehearsed))
            self._report()
        self._held = []

    def forget(self, index: int) -> None:
        """Free the memory that weights were loaded from."""
        self._engine.collective_rpc(forget, args=(index,))

    def push(self, *indices: int) -> list[Held]:
        """Load weights into vLLM, as many as it has slots at most; returns what shows that it holds each."""
        read, self._held = [], list(indices)
        for slot, index in enumerate(indices):
            if slot == self._rehearsed:
                self._load(slot, index, rehearsed=True)
                self._rehearsed += 1
            read.append(self._load(slot, index))
        if not self._engine.reset_prefix_cache():  # it holds keys and values of the old weights
            raise RuntimeError("vLLM did not flush its prefix cache")
        # Prompt log-probs are never served from the prefix cache.
        parameters = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        found = self._run([(slot, self._probe, parameters) for slot in range(len(indices))])
        after = [
            [of[token].logprob for of, token in zip(row.prompt_logprobs[1:], self._probe[1:], strict=True)]
            for row in found
        ]
        return list(zip(read, after, strict=True))

    def generate(
        self, rows_of: Mapping[int, Sequence[Row]], sampling: SamplingConfig, stop_tokens: Sequence[int]
    ) -> dict[int, tuple[Held | None, list[Decoded]]]:
        """Decode the rows of several weights, a slot each at once, with the result of `push` if one was needed."""
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
        done: dict[int, tuple[Held | None, list[Decoded]]] = {}
        for first in range(0, len(rows_of), self._slots):
            indices = list(rows_of)[first : first + self._slots]
            shown: Sequence[Held | None] = [None] * len(indices)
            if not set(indices) <= set(self._held):
                shown = self.push(*indices)
            rows = [
                (self._held.index(index), prompt, {**decoding, "seed": seed})
                for index in indices
                for prompt, seed in rows_of[index]
            ]
            decoded = map(_decoded, self._run(rows))
            for index, held in zip(indices, shown, strict=True):
                done[index] = held, [next(decoded) for _ in rows_of[index]]
        return done

    def _load(self, slot: int, index: int, rehearsed: bool = False) -> list[int]:
        args: tuple[Any, ...] = (index, rehearsed)
        load: Callable[..., int] = reload
        if self._adapters:
            load, args = adapt, (slot, self._adapters, *args)
        read: list[int] = self._engine.collective_rpc(load, args=args)
        self._report()
        return read

    def _run(self, rows: Sequence[tuple[int, Sequence[int], dict[str, Any]]]) -> list[Any]:
        """A vLLM `RequestOutput` for the slot, the prompt and the arguments of vllm.SamplingParams of each row."""
        import vllm
        from vllm.lora.request import LoRARequest

        named = [LoRARequest(f"slot {slot}", slot + 1, "pushed from memory") for slot, _, _ in rows]
        self._engine.enqueue(
            [{"prompt_token_ids": list(prompt)} for _, prompt, _ in rows],
            [vllm.SamplingParams(**parameters) for _, _, parameters in rows],
            lora_request=named if self._adapters else None,
            use_tqdm=False,
        )
        engine, finished = self._engine.llm_engine, []
        while engine.has_unfinished_requests():
            finished += [output for output in engine.step() if output.finished]
            self._report()
        assert len(finished) == len(rows)
        return sorted(finished, key=lambda output: int(output.request_id))  # numbered as they were enqueued


def _decoded(row: Any) -> Decoded:
    (output,) = row.outputs
    assert output.finish_reason in ("stop", "length"), output.finish_reason
    logprobs = [of[token].logprob for of, token in zip(output.logprobs, output.token_ids, strict=True)]
    return list(output.token_ids), logprobs


def share(worker: Any, index: int, layout: Layout, path: str) -> None:
    """In a vLLM worker: map shared memory."""
    _mapped[index] = SharedTensors(layout, path)


def forget(worker: Any, index: int) -> None:
    """In a vLLM worker: forget shared memory."""
    del _mapped[index]


def reload(worker: Any, index: int, rehearsed: bool) -> int:
    """In a vLLM worker: load its part of weights `index`, or of NaN in their place; returns their checksum."""
    weights = _mapped[index].tensors
    worker.reload_weights(weights_iterator=all_nan(weights) if rehearsed else iter(weights.items()))
    return _mapped[index].checksum()


def adapt(worker: Any, slot: int, settings: dict[str, Any], index: int, rehearsed: bool) -> int:
    """In a vLLM worker: put adapters `index`, or NaN in their place, into a slot; returns their checksum.

    By the steps of vLLM's own `_load_adapter` (lora/worker_manager.py of 0.32), which reads files.
    """
    from vllm.lora.peft_helper import PEFTHelper

    held, manager = _mapped[index].tensors, worker.model_runner.lora_manager
    inner, helper = manager._adapter_manager, PEFTHelper.from_dict(settings)
    helper.validate_legal(manager.lora_config)
    mapper = getattr(inner.model, "hf_to_vllm_mapper", None)
    adapters = manager._lora_model_cls.from_lora_tensors(
        lora_model_id=slot + 1,
        tensors=dict(all_nan(held)) if rehearsed else {name: value.clone() for name, value in held.items()},
        peft_helper=helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=mapper and mapper.get_rename_mapper(),
    )
    inner.remove_adapter(slot + 1)
    inner.add_adapter(adapters)
    inner.activate_adapter(slot + 1)
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
