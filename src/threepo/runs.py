"""Reading run folders (training.run_folder writes them). Imports nothing heavy, so anyone may look."""

import json
import re
from pathlib import Path
from typing import Any

from threepo.errors import UserError

CONFIG, METRICS, COMPLETIONS, CHECKPOINTS, SUMMARY, CONVERSATIONS, PROBLEMS = (
    "config.json",
    "metrics.jsonl",
    "completions",
    "checkpoints",
    "summary.json",
    "conversations.json",
    "problems.json",
)
_CHECKPOINT = re.compile(r"step-(\d+)")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; `UserError` if it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); the file is damaged") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return value


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a last line that a killed process left unfinished is ignored."""
    path = run / "metrics.jsonl"
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints of a run as (training steps done, folder), oldest first."""
    found = []
    for path in (run / CHECKPOINTS).glob("step-*"):
        match = _CHECKPOINT.fullmatch(path.name)
        if match:
            found.append((int(match.group(1)), path))
    return sorted(found)


def model_folder(path: Path) -> Path:
    """The model directory that `path` stands for: a run folder means its newest checkpoint."""
    if not (path / CHECKPOINTS).is_dir():
        return path
    found = checkpoints(path)
    if not found:
        raise UserError(f"run folder {path}: holds no complete checkpoint yet")
    return found[-1][1]
