"""Benchmarks from rows written into a local file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from threepo.config import BenchmarksConfig, DataConfig
from threepo.data.source import ProblemSet
from threepo.evaluation.benchmarks import open_benchmark


def opened(folder: Path, name: str, rows: Sequence[Mapping[str, Any]], **settings: Any) -> ProblemSet:
    """The benchmark from a local file of these rows."""
    copy = folder / f"{name}.jsonl"
    copy.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = BenchmarksConfig(names=(name,), **settings)
    return open_benchmark(name, str(copy), chosen, DataConfig(train="benchmarks"))
