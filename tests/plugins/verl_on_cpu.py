"""verl on CPUs, for which it has no platform and no rollout: what VERL_USE_EXTERNAL_MODULES names in the tests."""

import json
import os
import types
from collections import Counter
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import ray
import torch
import verl.utils.distributed
from transformers import AutoModelForCausalLM
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Device(types.ModuleType):
    """`torch.cpu` with what verl asks `torch.cuda` for."""

    def __getattr__(self, name: str) -> Any:
        answers = {"mem_get_info": (1 << 34, 1 << 34), "is_available": True, "device_count": 1, "current_device": "cpu"}
        answers |= {"get_device_name": "CPU"}
        if name in answers:
            return lambda *_: answers[name]
        if name.startswith(("max_memory", "memory")):
            return lambda *_: 0
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: None)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Chosen by VERL_PLATFORM=cpu only."""

    device_name = "cpu"
    vendor_name = "tests"
    device_module = _Device("cpu_as_a_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VISIBLE_CPUS"

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:
        return nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...


# The parts of verl below ask for the platform when they are imported.
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead  # noqa: E402
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout  # noqa: E402
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput  # noqa: E402

# verl asks torch for "cpu:gloo,cpu:gloo", which torch refuses.
_joined = verl.utils.distributed.initialize_global_process_group_ray
verl.utils.distributed.initialize_global_process_group_ray = lambda timeout_second=None, backend=None: _joined(
    timeout_second, "gloo"
)


class Server:
    """A rollout server with a transformers model, which samples one request after another and records all it does.

    `FOLDER/loads_RANK` has the weights that it was sent, in order; `FOLDER/requests_RANK.jsonl` what it wrote.
    It answers checks of weights as verl's servers of vLLM and SGLang do.
    """

    def __init__(self, replica: int, path: str, most_tokens: int, dtype: str) -> None:
        self.replica, self.most_tokens, self.loads, self.version = replica, most_tokens, 0, 0
        self.model = AutoModelForCausalLM.from_pretrained(path).to(getattr(torch, dtype)).eval()
        self.cached, self.fault = self.model, ""
        """The weights of the push before, which stay in a stale prefix cache; the name of a fault."""
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.folder = Path(os.environ["VERL_RECORDS"])

    def put(self, fault: str) -> None:
        self.fault = fault

    def swapped(self) -> bool:
        return self.fault == "two draws are swapped"

    def load(self, weights: dict[str, torch.Tensor], version: int) -> None:
        self.cached = deepcopy(self.model)
        if self.fault == "the push does nothing" or (self.fault == "one replica is a push behind" and self.replica):
            return
        if self.fault == "no norms are pushed":
            weights |= {name: value for name, value in self.model.state_dict().items() if "norm" in name}
        if self.fault == "one down_proj is 5 % off" and self.replica:
            weights["model.layers.0.mlp.down_proj.weight"] *= 1.05
        missing, unknown = self.model.load_state_dict(weights, strict=False)
        assert not unknown
        assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embeddings
        torch.save(weights, self.folder / f"load_{self.replica}_{self.loads}.pt")
        self.loads, self.version = self.loads + 1, version
        self.asked.clear()

    @torch.no_grad()
    def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        prompt = (self.version, *prompt_ids)
        self.asked[prompt] += 1
        # Requests come in any order; what is written must not depend on it, nor on how often a run was resumed.
        generator = torch.Generator().manual_seed(hash((self.replica, self.asked[prompt], prompt)))
        tokens, logprobs = list(prompt_ids), []
        checks = "ignore_eos" in sampling_params
        model = self.cached if checks and self.fault == "the prefix cache outlives the push" else self.model
        ends, most = not checks and self.model.config.eos_token_id, sampling_params.get("max_tokens", self.most_tokens)
        while len(logprobs) < most and (not logprobs or tokens[-1] != ends):
            logits = model(torch.tensor([tokens])).logits[0, -1].float() / (sampling_params["temperature"] or 1e-6)
            tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
            logprobs.append(float(logits.log_softmax(-1)[tokens[-1]]))
        written = tokens[len(prompt_ids) :]
        if checks:
            fields = {}
            if sampling_params.get("prompt_logprobs") == 0:
                read = self.model(torch.tensor([prompt_ids])).logits[0, :-1].float().log_softmax(-1)
                values = read.gather(-1, torch.tensor(prompt_ids)[1:, None]).tolist()
                fields = {"prompt_ids": [[x] for x in [*prompt_ids[1:], 0]], "prompt_logprobs": [*values, [0.0]]}
            return TokenOutput(token_ids=written, log_probs=logprobs, stop_reason="completed", extra_fields=fields)
        with (self.folder / f"requests_{self.replica}.jsonl").open("a") as file:
            record = {"load": self.loads - 1, "prompt": prompt_ids, "tokens": written, "logprobs": logprobs}
            file.write(json.dumps(record) + "\n")
        fields = {"global_steps": self.version}
        return TokenOutput(token_ids=written, log_probs=logprobs, stop_reason="completed", extra_fields=fields)


class Replica(RolloutReplica):  # type: ignore[misc]
    """A `Server` as verl launches it: rollout.name = "cpu"."""

    async def launch_servers(self) -> None:
        self._server_address = f"cpu_server_{self.replica_rank}"
        server = ray.remote(Server).options(name=self._server_address, num_cpus=0)
        path = self.model_config["path"]
        self._server_handle = server.remote(self.replica_rank, path, self.config.response_length, self.config.dtype)
        self.servers = [self._server_handle]

    async def sleep(self) -> None: ...


class Sender(BaseRollout):  # type: ignore[misc]
    """The trainer's end of a `Server`."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.rank = int(os.environ["RANK"])

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        taken = {name: value.clone() for name, value in weights}
        swapped = await ray.get_actor("cpu_server_0").swapped.remote()
        await ray.get_actor(f"cpu_server_{1 - self.rank if swapped else self.rank}").load.remote(taken, global_steps)


RolloutReplicaRegistry.register("cpu", lambda: Replica)
EngineRegistry._engines["language_model"]["fsdp2"]["cpu", "tests"] = FSDPEngineWithLMHead
_ROLLOUT_REGISTRY["cpu", "async"] = "verl_on_cpu.Sender"


def share_of_vowels(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A reward that an untrained model gets some of."""
    return sum(letter in "aeiou" for letter in solution_str.lower()) / 10


if "VERL_FAULTS" in os.environ:
    with suppress(ImportError):  # where threepo's plug-in is being imported, no trainer is needed
        import verl_faults  # noqa: F401
