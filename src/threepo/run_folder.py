"""A run's folder on disk: one owner, one format, nothing half written.

config.json                  the resolved recipe
problems.json                RLVR: source, number and digest of the problems
conversations.json           SFT: conversations kept and left out, and a digest of their tokens
metrics.jsonl                a row per step: the source of truth
completions/step-N.parquet   every rollout of step N, with its problem, draw, reward and log-probs
evaluations/step-N.json      the share of right answers to each held-out problem after N steps
checkpoints/step-N/          a Hugging Face model directory, plus posterior.safetensors and the train state
summary.json                 the run's result, once it has one
inputs/                      objects of Python that the run reads (inputs.py)
trackers.json                the run's ids in trackers

Imports nothing heavy, so anyone may look into a folder.
"""

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from threepo.config.records import first_difference, must, to_dict
from threepo.errors import UserError
from threepo.files import (
    UNFINISHED,
    append_line,
    atomic_file,
    disk_errors,
    finite,
    json_digest,
    lock,
    read_json,
    read_json_as,
    read_lines_as,
    sweep,
    write_json,
    write_text,
)
from threepo.types import Completion

CONFIG, METRICS, SUMMARY, LOCK = "config.json", "metrics.jsonl", "summary.json", "run.lock"
COMPLETIONS, EVALUATIONS, CHECKPOINTS, INPUTS = "completions", "evaluations", "checkpoints", "inputs"
REPORT = "report"
PROBLEMS, CONVERSATIONS, JOURNAL = "problems.json", "conversations.json", "journal.jsonl"
EVALUATION = "evaluation.json"
"""The settings in an evaluation's folder (evaluation/records.py)."""
POSTERIOR_FILE, OPTIMIZER_FILE, STATE_FILE = "posterior.safetensors", "optimizer.safetensors", "train_state.json"
REFERENCE_FILE, ROLLOUTS_FILE = "reference.safetensors", "rollouts.json"
ADAPTERS, CONTENTS = "adapter_config.json", "files.json"
"""Files of a checkpoint (training/checkpoint.py), with those above; `ADAPTERS` is peft's."""
FOR_RESUMING = (CONTENTS, OPTIMIZER_FILE, STATE_FILE, REFERENCE_FILE, ROLLOUTS_FILE)
"""Files of a checkpoint that are no part of the model."""
_INPUT_SETTINGS = {"model": ("path", "tokenizer"), "data": ("train", "eval"), "conversations": ("source", "eval")}
"""Settings that may name what `threepo.train` and `threepo.fine_tune` have written into the folder."""
_MetricsRow = Annotated[dict[str, int | float | None], must(lambda row: type(row.get("step")) is int, "has no step")]


def read_config(run: Path) -> dict[str, Any]:
    """The contents of config.json; objects in the folder are named where they are now, also if it has moved."""
    config: dict[str, Any] = read_json(run / CONFIG)
    for table, keys in _INPUT_SETTINGS.items():
        settings = config.get(table) or {}
        for key in keys:
            then = Path(settings.get(key, ""))
            now = run.absolute() / INPUTS / then.name
            if then.parent.name == INPUTS and now.exists():
                settings[key] = str(now)
    return config


def read_evaluation(run: Path, done: int) -> dict[str, float]:
    """The share of right answers to each held-out problem after so many steps; empty if it was not kept."""
    file = run / EVALUATIONS / f"step-{done:06d}.json"
    return read_json(file) if file.is_file() else {}


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a last line that a killed process left unfinished is ignored."""
    rows: list[dict[str, Any]] = read_lines_as(run / METRICS, _MetricsRow)
    return rows


def last_row(run: Path) -> dict[str, Any]:
    """The last row of metrics.jsonl, without the time that reading all of them takes; empty if there is none."""
    rows: list[dict[str, Any]] = read_lines_as(run / METRICS, _MetricsRow, first=-1)
    return rows[0] if rows else {}


def metrics_digest(run: Path) -> str:
    """Digest of all metrics except times: equal for a run that is repeated on the same machine with as many threads."""
    rows = [{name: value for name, value in row.items() if not name.startswith("time/")} for row in read_metrics(run)]
    return json_digest(rows)


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints of a run as (training steps done, folder), oldest first."""
    return sorted(by_step(run / CHECKPOINTS, suffix="").items())


def newest_checkpoint(run: Path) -> Path | None:
    """The folder of a run's newest complete checkpoint; None if there is none."""
    found = checkpoints(run)
    return found[-1][1] if found else None


def model_folder(path: Path) -> Path:
    """The newest checkpoint if `path` is a run folder; otherwise `path`."""
    if not (path / CHECKPOINTS).is_dir():
        return path
    if newest := newest_checkpoint(path):
        return newest
    raise UserError(f"run folder {path}: holds no complete checkpoint yet")


def refuse_taken(path: Path, config: Any) -> None:
    """Raise `UserError` if the folder `path` holds a run, of this config or of another one, or an evaluation."""
    if not (path / CONFIG).is_file():
        if (path / EVALUATION).is_file():
            raise UserError(f"run folder {path}: holds an evaluation; choose another run.folder")
        return
    lock(path / LOCK).close()  # refuses a run that another process has open
    difference = first_difference(read_json(path / CONFIG), to_dict(config))
    other = f"a run of another config ({difference});"
    run = other if difference else f"this run already; continue it with --resume {path}, or"
    raise UserError(f"run folder {path}: holds {run} choose another run.folder")


def folder_of_run(path: Path) -> Path | None:
    """The run folder that a folder is or is inside of; None if there is none. Somebody else may have made it."""
    holds_run = (at for at in (path, *path.parents) if (at / CONFIG).is_file())  # so does a model directory
    return next((at for at in holds_run if (at / LOCK).is_file() or (at / CHECKPOINTS).is_dir()), None)


def refuse_no_run(path: Path) -> None:
    """Raise `UserError` if the folder `path` holds no run."""
    if not (path / CONFIG).is_file():
        raise UserError(f"run folder {path}: holds no run (no config.json); check the path")
    if "model_type" in read_json(path / CONFIG):
        run = folder_of_run(path.absolute())
        fix = f"name its run, {run}" if run else "name the folder of a run"
        raise UserError(f"run folder {path}: holds a model and no run; {fix}")


@dataclass(frozen=True)
class SavedMaterial:
    """Entry of problems.json or conversations.json on the problems or conversations of one part of a run."""

    source: str
    digest: str
    problems: int = 0
    kept: int = 0
    file: str = ""
    """The tokens of conversations."""


def read_material(run: Path, name: str) -> dict[str, SavedMaterial]:
    """The contents of problems.json or conversations.json by part; empty if there is none."""
    fix = "restore it, or delete it to resume without a comparison"
    return read_json_as(run / name, dict[str, SavedMaterial], fix) if (run / name).is_file() else {}


def refuse_changed(run: Path, name: str, now: Mapping[str, Mapping[str, Any]]) -> None:
    """`UserError` if its problems or conversations have changed: `now`, its file `name` would hold something else."""
    for part, then in read_material(run, name).items():
        if part in now and then.digest != now[part]["digest"]:
            count = now[part].get("problems", now[part].get("kept"))
            raise UserError(
                f"the {Path(name).stem} of {now[part]['source']} have changed since the run began ({count:,} now, "
                f"{then.problems or then.kept:,} then); restore the old ones, or start a new run (with model.path = "
                f"{str(run)!r} it goes on from what this one has learned)"
            )


class LockedFolder:
    """A folder that one process writes, made if it is not there, and locked until the end of the context or process.

    If a `UserError` ends the context of a new folder without results, its files are deleted again, so that the
    corrected command can use the same folder.
    """

    files: tuple[str, ...]
    """Files to delete then. The first is in every folder that was begun; the last is the lock."""
    results: tuple[str, ...]
    """Files and folders, one of which exists once there is anything to keep."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fresh = not (path / self.files[0]).is_file()
        self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        self._lock = lock(path / self.files[-1])
        sweep(path, besides=REPORT)  # `threepo report --live` writes there without a lock

    @property
    def is_lost(self) -> bool:
        """True if the folder was deleted, moved or replaced since it was opened."""
        try:
            return not os.path.samestat(os.stat(self.path / self.files[-1]), os.fstat(self._lock.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return True

    def file(self, name: str) -> Path:
        """The path of a file to write; `UserError` if this is no longer the folder that was opened.

        Writing makes folders that are missing: without this, a deleted one would come back without its config and lock.
        """
        if self.is_lost:
            raise UserError(f"folder {self.path}: was deleted, moved or replaced while it was in use")
        return self.path / name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, *__: object) -> None:
        kept = not self._fresh or self.is_lost or any((self.path / name).exists() for name in self.results)
        if isinstance(error, UserError) and not kept:
            for name in self.files:
                (self.path / name).unlink(missing_ok=True)
            if self._made:
                shutil.rmtree(self.path, ignore_errors=True)
            for folder in self._made[1:]:
                with suppress(OSError):  # another process has put something there
                    folder.rmdir()
        self.close()

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


class RunFolder(LockedFolder):
    """An open run folder."""

    files = (CONFIG, PROBLEMS, CONVERSATIONS, JOURNAL, LOCK)
    results = (METRICS,)

    @classmethod
    def create(cls, path: Path, config: Any, problems: Mapping[str, Any] | None = None) -> "RunFolder":
        """A folder for a new run; `UserError` if there is a run in it already."""
        refuse_taken(path, config)
        with ExitStack() as stack:
            folder = stack.enter_context(cls(path))
            if problems:
                write_json(path / PROBLEMS, problems)
            write_json(path / CONFIG, to_dict(config))  # last: a folder with a config is a run
            stack.pop_all()
        return folder

    def refuse_fewer(self, steps: int) -> None:
        """Raise `UserError` for another number of steps than the run has, if more are done already."""
        if steps == read_json(self.path / CONFIG)["run"]["steps"]:  # in fine-tuning, 0 may stand for whole epochs
            return
        done = max((row["step"] + 1 for row in read_metrics(self.path)), default=0)
        if steps < done:
            raise UserError(f"run.steps = {steps}: the run has done {done} steps; set {done} or more")

    def extend(self, steps: int, done: int) -> None:
        """Write another number of steps into config.json; the run, of which so many are done, is then not finished."""
        config = read_json(self.path / CONFIG)
        if steps == config["run"]["steps"]:
            return
        config["run"]["steps"] = steps
        if config.get("conversations"):  # whose epochs may have given the length until now
            config["conversations"]["epochs"] = 0
        write_json(self.path / CONFIG, config)
        if steps > done:
            (self.path / SUMMARY).unlink(missing_ok=True)

    def log(self, row: Mapping[str, float]) -> None:
        """Append a row to metrics.jsonl. NaN and infinity become null."""
        # On disk, so that after a power cut no checkpoint is ahead of the log.
        append_line(self.file(METRICS), json.dumps(finite(row)))

    def add_to_row(self, row: Mapping[str, float]) -> None:
        """Add metrics to the last row of metrics.jsonl, or append a row if that is another step's."""
        last = last_row(self.path)
        if last.get("step") != row["step"]:
            self.log(row)
            return
        earlier = self.file(METRICS).read_text(encoding="utf-8").splitlines(keepends=True)[:-1]
        write_text(self.file(METRICS), "".join([*earlier, json.dumps(last | finite(row)) + "\n"]))

    def forget_after(self, step: int) -> None:
        """Delete what was logged of training steps `step` and later: they will be made again."""
        rows = [row for row in read_metrics(self.path) if row["step"] < step]
        write_text(self.path / METRICS, "".join(json.dumps(row) + "\n" for row in rows))
        made = {at: file for at, file in by_step(self.path / COMPLETIONS).items() if at >= step}
        scored = {at: file for at, file in by_step(self.path / EVALUATIONS, ".json").items() if at > step}
        for file in (*made.values(), *scored.values()):
            file.unlink()

    def write_completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write all rollouts of a step as one parquet file."""
        write_parquet(self.file(f"{COMPLETIONS}/step-{step:06d}.parquet"), rows)

    def write_evaluation(self, done: int, right: Mapping[str, float]) -> None:
        """Write the share of right answers to each held-out problem after so many steps."""
        write_json(self.file(f"{EVALUATIONS}/step-{done:06d}.json"), right)

    def checkpoint_path(self, step: int) -> Path:
        """The path of the checkpoint after `step` training steps."""
        return self.file(f"{CHECKPOINTS}/step-{step:06d}")

    def prune_checkpoints(self, keep: int) -> None:
        """Delete all but the newest `keep` checkpoints (0 keeps all)."""
        for _, path in checkpoints(self.path)[:-keep] if keep else []:
            os.rename(path, path.with_name(f".{path.name}{UNFINISHED}"))  # half of one must not look like one
        sweep(self.path / CHECKPOINTS)  # elsewhere in the folder a report may be about to be written


class FollowedFolder(RunFolder):
    """The folder of a run, on a rank that leaves lock and writing to the first."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __exit__(self, *_: object) -> None:
        """The first rank has the lock."""

    close = __exit__


def by_step(folder: Path, suffix: str = ".parquet") -> dict[int, Path]:
    """Files or folders named after a step, such as `step-000003.parquet`, by step; all others are left out."""
    found = ((file.name.removeprefix("step-").removesuffix(suffix), file) for file in folder.glob(f"step-*{suffix}"))
    return {int(number): file for number, file in found if number.isdecimal()}


_TYPES = {
    **dict.fromkeys(("draw_seed", "draw_step", "draw_index"), "int64"),
    **dict.fromkeys(("draw_mirrored", "format_ok"), "bool"),
    **dict.fromkeys(("draw_arm", "parsed_answer"), "string"),
    **dict.fromkeys(("rho", "gradient_logprob_sum", "correction_weight", "advantage"), "double"),
}
"""Types of columns that may be empty, so that the files of several steps are one table."""


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to a parquet file, atomically. A column that is empty throughout has a type all the same."""
    import pyarrow as pa
    from pyarrow import Table, parquet

    table = Table.from_pylist(list(rows))
    for index, field in enumerate(table.schema):
        if pa.types.is_null(field.type) and field.name in _TYPES:
            table = table.set_column(index, field.name, table[index].cast(_TYPES[field.name]))
    repeating = [name for name in table.column_names if name != "tokens"]  # a dictionary of a vocabulary costs more
    with atomic_file(path) as temporary:
        parquet.write_table(table, temporary, compression="zstd", use_dictionary=repeating)


def completion_row(step: int, completion: Completion) -> dict[str, Any]:
    """A completion as a row of the parquet file; docs/metrics.md lists the columns."""
    import numpy as np  # here, because commands that only read run folders need none

    prompt, verdict, draw = completion.problem.prompt, completion.verdict, completion.draw
    assert verdict is not None
    episode = completion.episode
    return {
        "step": step,
        "problem_id": completion.problem.id,
        "prompt": prompt if isinstance(prompt, str) else json.dumps([dict(message) for message in prompt]),
        "reference_answer": completion.problem.answer,
        "rollout": completion.rollout,
        "policy_step": completion.policy_step,
        "draw_seed": draw and draw.seed,
        "draw_step": draw and draw.step,
        "draw_index": draw and draw.number,
        "draw_mirrored": draw and draw.sign < 0,
        "draw_arm": draw and draw.arm and str(draw.arm),
        "completion": completion.conversation,
        "tokens": np.asarray(completion.tokens, dtype=np.int64),
        "num_tokens": len(completion.logprobs),
        "finish_reason": completion.finish_reason,
        "parsed_answer": verdict.answer,
        **{name: getattr(verdict, name) for name in ("status", "correct", "reward", "detail", "format_ok")},
        "behaviour_logprob_sum": math.fsum(completion.logprobs),
        **({"episode": json.dumps(finite(asdict(episode)))} if episode else {}),
    }
