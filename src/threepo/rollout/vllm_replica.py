"""A vLLM engine in a replica's process, which answers the trainer's requests.

vLLM only warns when a reload misses tensors, and log-probs change little in one training step. Therefore the engine
starts with parameters that are NaN: one that no push reaches makes the weight check NaN, and a packed copy that none
reaches keeps the start's values, and differs. Sums over the bits find what only the first push reaches, at the next,
in tensors that vLLM holds as the trainer does.

Draws of adapters are decoded in one batch: the base weights are loaded once, and each draw is put into a slot of vLLM's
adapters. Every row names an adapter, also for the mean: in a batch with others, the CPU build of vLLM 0.32 gives a row
without one the adapter of the last slot.

vLLM decodes step by step here, with a report after every step and every reload. `LLM.generate` would be silent until
all is done.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from threepo.config.engine import SamplingConfig, VLLMEngineConfig
from threepo.models.parts import Parts, cut
from threepo.rollout.bit_sums import Sums, added_up, bit_sum, sums_in_engine
from threepo.rollout.memory import Layout, SharedTensors
from threepo.rollout.weight_check import Logprobs, followers

Seeded = tuple[int, tuple[int, ...], int]
"""Index of a row's weights, its prompt tokens, and its seed, which vLLM holds in a signed 64-bit integer."""
Generated = tuple[list[int], list[float]]
"""New tokens and their log-probs."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM has kernels for; one in between takes the memory of the next."""
Asked = tuple[int, Sequence[int], dict[str, Any]]
"""The slot of a row, its prompt, and the arguments of vllm.SamplingParams."""
READING = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
"""Arguments of vllm.SamplingParams for the log-probs of a prompt, which vLLM never serves from its prefix cache."""


class Evidence(NamedTuple):
    """The evidence that a replica computes with the weights that it was given."""

    sums: Sums
    """The sums of the tensors that it computes with, of all workers together; none if not asked for."""
    logprobs: Logprobs
    """Log-probs for the weight check's prompt."""


def asking(prompt: Sequence[int]) -> dict[str, Any]:
    """Arguments of vllm.SamplingParams for the log-probs of tokens that follow the weight check's prompt."""
    tokens = [*followers(prompt), prompt[0]]  # one more, since a server shows the sampled token first, and then cuts
    shown = {"logprob_token_ids": tokens, "logprobs": len(tokens)}
    return {"max_tokens": 1, "temperature": 0.0, "detokenize": False, **shown}


_mapped: dict[int, dict[str, torch.Tensor]] = {}
"""Weights in shared memory by index, in a worker, which is this process unless there are several."""


def decoding_parameters(sampling: SamplingConfig, stop_tokens: Sequence[int]) -> dict[str, Any]:
    """Arguments of vllm.SamplingParams, all except the seed."""
    greedy = sampling.temperature == 0
    return {
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy else sampling.top_k,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(stop_tokens),
        "ignore_eos": True,  # only the policy's stop tokens end a row
        "detokenize": False,
        "logprobs": 0,  # of the sampled token only
    }


class Server:
    """A server whose methods are the requests. Weights are named by the index of their shared memory."""

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report
        self._prompt: Sequence[int] = ()
        """The prompt of the weight check."""
        self._loaded: list[int] = []
        """The weights in each slot: one, or with adapters several."""
        self._adapters: dict[str, Any] = {}
        self._unfinished: dict[str, int] = {}
        """Rows that `decode` has begun, by vLLM's names for them."""
        self._engine: Any = None
        self._asleep = False
        self._dtype = torch.float32

    def start(
        self, settings: VLLMEngineConfig, folder: str, max_length: int, prompt: Sequence[int], adapters: dict[str, Any]
    ) -> None:
        """Start vLLM for the model whose config.json is in `folder`, with weights that are NaN.

        `adapters`: peft's configuration of the adapters that will be pushed; empty if whole weights will be.
        """
        import vllm

        own, on_gpu = settings.vllm, torch.cuda.is_available()
        cache = own.kv_cache_memory_bytes or (None if on_gpu else 1 << 30)
        self._adapters, lora = adapters, {}
        if adapters:
            lora = {
                "enable_lora": True,
                "max_loras": own.adapters,
                "max_lora_rank": min(rank for rank in LORA_RANKS if rank >= adapters["r"]),
                "lora_target_modules": adapters["target_modules"],
            }
        os.chdir(folder)  # a new one each time: by its path, vLLM would not find what it has compiled for this model
        self._engine = vllm.LLM(
            model=".",
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",  # no sampling defaults from the model's files
            dtype=settings.dtype,
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            # On a CPU a prompt cut in two fails: vLLM 0.32 resets its generator, which only GPU generators allow.
            enable_chunked_prefill=None if on_gpu else False,
            max_model_len=max_length,
            max_num_seqs=settings.max_batch_rows,
            enforce_eager=own.enforce_eager,
            # vLLM 0.32 refuses to start on a GPU with less than this share free, also where it then ignores the share.
            gpu_memory_utilization=0.01 if cache else own.gpu_memory_utilization,
            kv_cache_memory_bytes=cache,
            enable_sleep_mode=own.sleep and on_gpu,
            disable_log_stats=True,
            seed=0,
            tensor_parallel_size=own.tensor_parallel,
            distributed_executor_backend="mp" if own.tensor_parallel > 1 else None,
            **lora,
        )
        self._engine.apply_model(fill_with_nan)
        self._prompt, self._dtype = prompt, getattr(torch, settings.dtype)

    def share(self, index: int, layout: Layout, path: str, parts: Parts) -> None:
        """Map the shared memory that weights `index` will be in."""
        self._engine.collective_rpc(share, args=(index, layout, path, parts))

    def load_base(self, layout: Layout, path: str, parts: Parts) -> None:
        """Load the weights that adapters are added to from shared memory."""
        self._engine.collective_rpc(load_base, args=(layout, path, parts))

    def sleep(self) -> None:
        """Give memory back until weights are pushed; those that adapters are added to wait in memory of the CPU."""
        self._engine.sleep(level=1 if self._adapters else 2)
        self._asleep = True

    def push(self, indices: Sequence[int], exact: int) -> list[Evidence]:
        """Load weights into vLLM, at most one for each slot; returns the evidence that it computes with each.

        Only the evidence of weights `exact` has sums, since reading all tensors takes as long as a pass or two.
        """
        self._fill(indices)
        sums = {}
        if exact in indices and self._adapters:
            sums[exact] = added_up(self._engine.collective_rpc(sums_of_slot, args=(indices.index(exact),)))
        elif exact in indices:
            sums[exact] = added_up(self._engine.apply_model(partial(sums_here, dtype=self._dtype)))
        # Asks first, before the reading fills the prefix cache anew.
        asked = [(slot, self._prompt, how) for how in (asking(self._prompt), READING) for slot in range(len(indices))]
        outputs = self._run(asked)
        evidence = []
        for index, after, read in zip(indices, outputs, outputs[len(indices) :], strict=False):
            following = [after.outputs[0].logprobs[0][token].logprob for token in followers(self._prompt)]
            prompt = _logprobs(read.prompt_logprobs[1:], self._prompt[1:])
            evidence.append(Evidence(sums.get(index, {}), Logprobs(prompt, following)))
        return evidence

    def _fill(self, indices: Sequence[int]) -> None:
        """Load weights into slots, and empty the prefix cache, which holds keys and values of the old ones."""
        self._loaded = list(indices)
        if self._asleep:
            self._engine.wake_up(["weights"])
            if not self._adapters:  # what no push reaches is to be NaN again
                self._engine.apply_model(fill_with_nan)
        for slot, index in enumerate(indices):
            if self._adapters:
                self._engine.collective_rpc(adapt, args=(slot, self._adapters, index))
            else:
                self._engine.collective_rpc(reload, args=(index,))
            self._report()
        if self._asleep:  # now that loading needs no more memory
            self._engine.wake_up(["kv_cache"])
            self._asleep = False
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not flush its prefix cache")

    def decode(
        self,
        rows: Mapping[int, Seeded],
        sampling: SamplingConfig,
        stop_tokens: Sequence[int],
        most: float,
        least: int = 1,
    ) -> tuple[dict[int, Generated], int]:
        """Decode, together with these rows of loaded weights, for at most so many steps, or until `least` have ended.

        Returns the rows that have finished, and the number of steps.
        """
        parameters = decoding_parameters(sampling, stop_tokens)
        names = self._enqueue(
            [(self._loaded.index(index), prompt, {**parameters, "seed": seed}) for index, prompt, seed in rows.values()]
        )
        self._unfinished |= dict(zip(names, rows, strict=True))
        finished: dict[int, Generated] = {}
        steps = 0
        while self._unfinished and len(finished) < least and steps < most:
            finished |= {self._unfinished.pop(name): _generated(output) for name, output in self._step()}
            steps += 1
        return finished, steps

    def _run(self, rows: Sequence[Asked]) -> list[Any]:
        """A vLLM `RequestOutput` for each row."""
        names = self._enqueue(rows)
        outputs: dict[str, Any] = {}
        while len(outputs) < len(names):
            outputs.update(self._step())
        return [outputs[name] for name in names]

    def _enqueue(self, rows: Sequence[Asked]) -> list[str]:
        """Give rows to vLLM; returns its names for them."""
        import vllm
        from vllm.lora.request import LoRARequest

        named = [LoRARequest(f"slot {slot}", slot + 1, "pushed from memory") for slot, _, _ in rows]
        names = self._engine.enqueue(
            [{"prompt_token_ids": list(prompt)} for _, prompt, _ in rows],
            [vllm.SamplingParams(**parameters) for _, _, parameters in rows],
            lora_request=named if self._adapters else None,
            use_tqdm=False,
        )
        return [name.partition("-")[0] for name in names]  # outputs lack what vLLM adds to its numbers

    def _step(self) -> list[tuple[str, Any]]:
        """Decode one more token of all rows; returns the name and the `RequestOutput` of those that have finished."""
        outputs = [output for output in self._engine.llm_engine.step() if output.finished]
        self._report()
        return [(output.request_id, output) for output in outputs]


def _generated(row: Any) -> Generated:
    (output,) = row.outputs
    assert output.finish_reason in ("stop", "length"), output.finish_reason
    return list(output.token_ids), _logprobs(output.logprobs, output.token_ids)


def _logprobs(found: Sequence[Mapping[int, Any]], tokens: Sequence[int]) -> list[float]:
    """The log-prob of each token, from what vLLM returns at each position."""
    return [at_position[token].logprob for at_position, token in zip(found, tokens, strict=True)]


def share(worker: Any, index: int, layout: Layout, path: str, parts: Parts) -> None:
    """Map shared memory, in a vLLM worker."""
    shared = SharedTensors(layout, path)
    shared.register()
    _mapped[index] = dict(cut(shared.tensors.items(), parts))


def load_base(worker: Any, layout: Layout, path: str, parts: Parts) -> None:
    """Load a vLLM worker's part of the weights that adapters are added to."""
    worker.reload_weights(weights_iterator=cut(SharedTensors(layout, path).tensors.items(), parts))


def reload(worker: Any, index: int) -> None:
    """Load a vLLM worker's part of weights `index`."""
    worker.reload_weights(weights_iterator=iter(_mapped[index].items()))
    torch.cuda.empty_cache()  # a trainer may share the GPU


def sums_here(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, int]:
    """`sums_in_engine`, in a vLLM worker."""
    found = sums_in_engine(model, dtype)
    torch.cuda.empty_cache()  # a trainer may share the GPU
    return found


def adapt(worker: Any, slot: int, settings: dict[str, Any], index: int) -> None:
    """Put adapters `index` into a slot of a vLLM worker.

    It follows vLLM's own `_load_adapter` (lora/worker_manager.py of 0.32), which reads files. The slot is emptied
    first, since vLLM ignores a second adapter under a known number, and gets a copy, which vLLM scales in place.
    """
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker.model_runner.lora_manager
    inner, helper = manager._adapter_manager, PEFTHelper.from_dict(settings)
    helper.validate_legal(manager.lora_config)
    mapper = getattr(inner.model, "hf_to_vllm_mapper", None)
    adapters = manager._lora_model_cls.from_lora_tensors(
        lora_model_id=slot + 1,
        tensors={name: value.clone() for name, value in _mapped[index].items()},
        peft_helper=helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=mapper and mapper.get_rename_mapper(),
    )
    inner.remove_adapter(slot + 1)
    inner.add_adapter(adapters)
    inner.activate_adapter(slot + 1)


def sums_of_slot(worker: Any, slot: int) -> dict[str, int]:
    """The sums of the adapters in a slot of a vLLM worker, by their names in peft; B is scaled."""
    inner, found = worker.model_runner.lora_manager._adapter_manager, dict[str, int]()
    place = inner.lora_index_to_id.index(slot + 1)
    for path, module in inner.modules.items():
        *above, last = path.split(".")
        parts = inner.packed_modules_mapping.get(last, [last])
        for part, a, b in zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True):
            name = ".".join(["base_model.model", *above, part])
            found |= {f"{name}.lora_A.weight": bit_sum(a[place]), f"{name}.lora_B.weight": bit_sum(b[place])}
    return found


@torch.no_grad()
def fill_with_nan(model: torch.nn.Module) -> None:
    """Overwrite the floating-point parameters of a model in place."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.fill_(math.nan)
