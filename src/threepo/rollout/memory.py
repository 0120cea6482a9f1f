"""How much memory a rollout engine needs, and how much there is."""

from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30
SPARED = 0.1
"""Share of the free memory that is left for activations and everything else."""


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers of a Hugging Face decoder."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * dtype.itemsize)


def sampling_bytes(vocabulary: int) -> int:
    """Peak memory to sample a row's next token: its logits and up to eight float32 arrays of their size."""
    return 9 * 4 * vocabulary


def available_bytes(device: torch.device) -> int:
    """Free memory of a device, less a tenth; on a CPU within the limits of the control group (version 2)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * (1 - SPARED))
    free = _numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.is_file() and (most := limit.read_text().strip()) != "max":
        used = int((group / "memory.current").read_text())
        cached = _numbers(group / "memory.stat")["inactive_file"]  # files that the kernel drops when memory is short
        free = min(free, max(int(most) - used + cached, 0))
    return int(free * (1 - SPARED))


def _numbers(file: Path) -> dict[str, int]:
    """The numbers of a file with lines such as `MemFree: 123 kB`, by the first word."""
    return {words[0]: int(words[1]) for line in file.read_text().splitlines() if (words := line.split())}
