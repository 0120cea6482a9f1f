"""What a rollout engine's memory holds, and how much there is."""

from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30
SPARED = 0.1
"""Share of the free memory that is left alone, for activations and whatever else there is."""


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers of a Hugging Face decoder."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * dtype.itemsize)


def choosing_bytes(vocabulary: int) -> int:
    """What choosing a row's next token takes at its peak: its logits, and up to eight float32 arrays of their size."""
    return 9 * 4 * vocabulary


def available_bytes(device: torch.device) -> int:
    """Memory that can be asked for on a device, less a tenth; on a CPU within the limits of the control group."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = min(filter(None, (_free_of_machine(), _free_of_group())), default=1 << 62)
    return int(free * (1 - SPARED))


def _free_of_machine() -> int | None:
    """What Linux counts as available; None elsewhere."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def _free_of_group() -> int | None:
    """What a container may still take (control groups, version 2); None where nothing limits it."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not (limit.is_file() and used.is_file()) or limit.read_text().strip() == "max":
        return None
    cached = 0
    statistics = Path("/sys/fs/cgroup/memory.stat")
    if statistics.is_file():  # files that are held in memory give way
        fields = dict(line.split() for line in statistics.read_text().splitlines())
        cached = int(fields.get("inactive_file", 0))
    return max(int(limit.read_text()) - int(used.read_text()) + cached, 1)
