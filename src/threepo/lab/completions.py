"""Saved completions as groups by step and problem: from threepo, TRL, verl, or any tool with such columns.

docs/analysis.md lists the columns. Files are read one after the other, and only figures of a text are kept.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import scipy

from threepo.errors import UserError
from threepo.evaluation.scores import normalised
from threepo.run_folder import COMPLETIONS

NAMES = {
    "step": ("step",),
    "problem": ("problem_id", "prompt", "input"),
    "completion": ("completion", "output"),
    "correct": ("correct", "acc"),
    "reward": ("reward", "score"),
    "answer": ("parsed_answer", "pred"),
    "status": ("status",),
    "tokens": ("tokens",),
    "episode": ("episode",),
}
"""Names of our columns, each with the names under which a file may have it; the first that is there counts.

TRL: `_logs` in trl/trainer/grpo_trainer.py (f2cd577) is written as step, prompt, completion, a column for each reward
function, the columns of `log_extra`, advantage. verl: `_dump_generations` in verl/trainer/ppo/ray_trainer.py (b178a3c)
has input, output, gts, score, step and what the reward function returned, such as acc and pred.
"""
DRAW = ("draw_seed", "draw_step", "draw_index", "draw_mirrored")
NO_ANSWER = (None, "", "[INVALID]")
"""Answers that are none; the last is how verl/utils/reward_score/math_dapo.py says so."""
Table = dict[str, Any]
"""Columns of a file by name, each a sequence."""


@dataclass(frozen=True)
class PromptGroup:
    """The completions of a problem at a step, in the order of the file; G values each."""

    right: tuple[bool, ...]
    no_answer: tuple[bool, ...] | None
    """No answer was found in them; None: not recorded."""
    answers: tuple[str | None, ...] | None
    """Answers, spelled alike if they are equal; None: not recorded."""
    text_distance: float
    """Mean distance of two texts; NaN for a single completion."""


Groups = dict[tuple[int, str], PromptGroup]
"""Groups by step and problem."""


def read_completions(path: Path, verdict: str = "", above: float | None = None) -> Groups:
    """The groups of a run, from its folder, a folder of files, or a file.

    The column `verdict` says what is right, or else `correct`, or else the reward. Right is a value above `above`; if
    that is None, 1 is right, and 0 and -1 are wrong. Completions without a verdict are left out. `UserError` names the
    file, what is wrong with it, and the fix.
    """
    folder = path / COMPLETIONS if (path / COMPLETIONS).is_dir() else path
    files = [path] if path.is_file() else sorted(folder.glob("*.parquet")) or sorted(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"{path}: holds no completions (no .parquet or .jsonl file); check the path")
    groups: Groups = {}
    last: Any = None
    for file in files:
        table = _table(file, verdict, above)
        by_another_tool = not any(name in table for name in DRAW)
        texts = (table["problem"], table["completion"]) if by_another_tool else None
        if texts is not None and texts == last:
            continue  # TRL writes its last batch at every logging step, also if no other was generated since
        last = texts
        rows = defaultdict(list)
        for i, problem in enumerate(table["problem"]):
            rows[int(table["step"][i]), str(problem)].append(i)
        if twice := rows.keys() & groups.keys():
            step, problem = min(twice)
            raise UserError(f"{file}: problem {problem[:60]!r} of step {step} is in another file too; keep it in one")
        groups |= {key: _group(table, chosen) for key, chosen in rows.items()}
    if not groups:
        raise UserError(f"{path}: its files have no rows; name a run that has finished a step")
    return groups


def read_file(file: Path, columns: Sequence[str] | None = None) -> Any:
    """A parquet file of completions as pyarrow's table; `UserError` if it is damaged."""
    try:
        return pyarrow.parquet.read_table(file, columns=columns)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{file}: cannot be read as parquet ({error}); remove the damaged file") from error


def saved_groups(files: Sequence[Path], columns: Sequence[str] | None = None) -> Iterator[list[dict[str, Any]]]:
    """The completions of each problem of each step, as rows with these columns; None: with all but the tokens."""
    for file in files:
        table = read_file(file, columns)
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in (table if columns else table.drop_columns("tokens")).to_pylist():
            groups[row["problem_id"]].append(row)
        yield from groups.values()


def _table(file: Path, verdict: str, above: float | None) -> Table:
    """The columns of a file by our names; `right` is always among them."""
    columns = _columns(file)
    if not columns:
        raise UserError(f"{file}: is empty; remove it, or write the step's completions again")
    wanted = {name: next((c for c in names if c in columns), "") for name, names in NAMES.items()}
    wanted |= {name: name for name in DRAW if name in columns}
    if verdict or not wanted["correct"]:
        wanted["correct"] = verdict or wanted["reward"] or _only_reward(file, columns)
    for name in ("step", "problem", "completion", "correct"):
        if wanted[name] not in columns:
            names = " or ".join([verdict] if verdict and name == "correct" else NAMES[name])
            raise UserError(f"{file}: has no column {names}, but {', '.join(columns)}; rename the one that has it")
    read = {name: columns[column] for name, column in wanted.items() if column and name != "reward"}
    for name, column in read.items():
        if name != "tokens" and not isinstance(column, list):
            read[name] = column.to_pylist()
    # TRL leaves a reward of None, which a table of pandas has as NaN, out of the comparison of its group.
    judged = [i for i, value in enumerate(read["correct"]) if value is not None and value == value]
    read = {name: [column[i] for i in judged] for name, column in read.items()}
    read["right"] = _right(file, wanted["correct"], read["correct"], above)
    return read | _answers(read)


def _columns(file: Path) -> dict[str, Any]:
    """The columns of a parquet file (lazy) or of a JSONL file, whose rows have the same keys."""
    if file.suffix == ".parquet":
        found = read_file(file)
        return dict(zip(found.column_names, found.columns, strict=True))
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    except (OSError, ValueError, TypeError, LookupError) as error:
        said = f"({type(error).__name__}: {error}); check the file"
        raise UserError(f"{file}: cannot be read as JSON lines with the same keys {said}") from error


def _only_reward(file: Path, columns: Mapping[str, Any]) -> str:
    """TRL's column of the reward, where there is one reward function and nothing else was logged, but draws."""
    names = list(columns)
    between = names[names.index("completion") + 1 : names.index("advantage")] if "advantage" in names else []
    between = [name for name in between if not name.startswith("draw_")]
    if len(between) > 1:
        raise UserError(f"{file}: has the columns {', '.join(between)}; say which one is the verdict with --verdict")
    return between[0] if between else ""


def _right(file: Path, column: str, values: Sequence[Any], above: float | None) -> list[bool]:
    """Returns for each completion whether it is right."""
    for i, value in enumerate(values):
        if not isinstance(value, bool | int | float):
            raise UserError(f"{file}: {column} of row {i} is {value!r}; it must be a number, or true or false")
        if above is None and value not in (-1, 0, 1):
            raise UserError(f"{file}: {column} of row {i} is {value}; say from where on it is right with --right-above")
    return [bool(value == 1 if above is None else value > above) for value in values]


def _answers(table: Table) -> Table:
    """The answers in one spelling, None where there is none, and which completions have none; as far as recorded."""
    found: Table = {"answer": [None if a in NO_ANSWER else normalised(str(a)) for a in table.get("answer", ())]}
    statuses = table.get("status")
    judged = table["right"] if statuses is None else [status in ("right", "wrong") for status in statuses]
    if not found["answer"] or any(j and a is None for j, a in zip(judged, found["answer"], strict=True)):
        found = {"answer": None}  # not all are reported, as by a user's own function
    if statuses is not None:
        found["no_answer"] = [status == "no_answer" for status in statuses]
    elif found["answer"] is not None:
        found["no_answer"] = [answer is None for answer in found["answer"]]
    return found


def _group(table: Table, rows: Sequence[int]) -> PromptGroup:
    def column(name: str) -> tuple[Any, ...] | None:
        return tuple(table[name][i] for i in rows) if table.get(name) is not None else None

    distance = text_distance([_tokens(table, i) for i in rows])
    return PromptGroup(column("right") or (), column("no_answer"), column("answer"), distance)


def _tokens(table: Table, row: int) -> np.ndarray:
    """The tokens that the policy wrote; without tokens, the words of the completion, and its end as one more."""
    if "tokens" not in table:
        return np.array([*str(table["completion"][row]).split(), ""])
    tokens = table["tokens"][row]
    found: np.ndarray = np.asarray(tokens if isinstance(tokens, list) else tokens.values)
    if DRAW[0] in table and (episode := table.get("episode") and table["episode"][row]):  # of ours, so it is JSON
        mine = [found[first:end] for first, end in json.loads(episode)["own"]]
        return np.concatenate([found[:0], *mine])
    return found


def text_distance(texts: Sequence[np.ndarray]) -> float:
    """Mean of 1 - cosine of the token counts over pairs of texts; one without tokens is at 1 from all, NaN: no pair."""
    if len(texts) < 2:
        return math.nan
    vocabulary, tokens = np.unique(np.concatenate(texts), return_inverse=True)
    parts = np.split(tokens, np.cumsum([len(text) for text in texts])[:-1])
    counts = np.stack([np.bincount(part, minlength=len(vocabulary)) for part in parts])
    return float(np.nan_to_num(scipy.spatial.distance.pdist(counts, "cosine"), nan=1.0).mean())
