"""A run's model on the Hugging Face hub, with a model card that is made from the run.

    threepo push RUN ORG/NAME [--evaluations EVAL ...] [--public | --dry-run FOLDER]

What is uploaded is the newest checkpoint as others load it: weights or adapters, tokenizer, posterior; and the card,
with the curves. What only a resumed run needs stays here, and so do the names of folders on this machine.
"""

import io
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from threepo.config.records import shown
from threepo.config.sources import is_file, is_local, split_source
from threepo.errors import ThreepoWarning, UserError
from threepo.files import atomic_folder, read_json
from threepo.lab.curves import curves
from threepo.lab.report import RunReport, read_run
from threepo.models.adapters import CONFIG as ADAPTERS
from threepo.posterior.gaussian import FILE_NAME as POSTERIOR
from threepo.run_folder import CONFIG, SUMMARY, model_folder
from threepo.training.checkpoint import CONTENTS, OPTIMIZER_FILE

CARD, CURVES = "README.md", "curves.png"
NOT_THE_MODEL = (CONTENTS, OPTIMIZER_FILE, "reference.safetensors", "train_state.json")
SHOWN = (
    "model",
    "data",
    "conversations",
    "demonstrations",
    "reward",
    "method",
    "optimizer",
    "noise",
    "sampling",
    "run",
)
"""Tables of the configuration that the card has."""
INTERVAL = 1.96
"""Standard errors on each side of a 95 % interval."""


def push(run: Path, repo: str, evaluations: Sequence[Path] = (), public: bool = False) -> str:
    """Upload a run's model with its card; a new repository is private unless `public`. Returns its address."""
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if not get_token():
        raise UserError(f"push {repo}: no token of the Hugging Face hub; run `hf auth login`, or set HF_TOKEN")
    files = contents(run, repo, evaluations)
    operations = [CommitOperationAdd(name, part if isinstance(part, bytes) else str(part)) for name, part in files]
    try:
        api = HfApi()
        address = api.create_repo(repo, private=not public, exist_ok=True)
        api.create_commit(repo, operations, commit_message=f"threepo {version('threepo')}: {run.name}")
    except Exception as error:  # that of an HTTP library, which changes with the version of the hub's
        reason = " ".join(str(error).split())[:300]
        fix = "check the name, the token's rights and the connection; --dry-run FOLDER needs none of them"
        raise UserError(f"push {repo}: {type(error).__name__}: {reason}; {fix}") from error
    return str(address)


def write(run: Path, repo: str, folder: Path, evaluations: Sequence[Path] = ()) -> None:
    """Write what would be uploaded into a new folder."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--dry-run {folder}: is not empty; choose another folder")
    files = contents(run, repo, evaluations)
    with atomic_folder(folder) as temporary:
        for name, part in files:
            if isinstance(part, bytes):
                (temporary / name).write_bytes(part)
            else:
                shutil.copyfile(part, temporary / name)


def contents(run: Path, repo: str, evaluations: Sequence[Path] = ()) -> list[tuple[str, Path | bytes]]:
    """The files of the repository: where they are, or what is in them."""
    report = read_run(run)
    found = model_folder(run)
    if found == run:
        raise UserError(f"push {run}: holds no checkpoint yet")
    files = [path for path in sorted(found.iterdir()) if path.is_file() and path.name not in NOT_THE_MODEL]
    if (found / ADAPTERS).is_file() and is_local(base := read_json(found / ADAPTERS)["base_model_name_or_path"]):
        fix = "nobody else has it; push a merged model (`threepo merge`), or train from a model on the hub"
        warnings.warn(f"push {run}: the base model of these adapters is the folder {base}: {fix}", ThreepoWarning, 2)
    image = io.BytesIO()
    curves([report]).savefig(image, format="png", dpi=110)
    scores = [(folder, read_json(_summary(folder))) for folder in evaluations]
    text = card(report, repo, {path.name for path in files}, scores)
    return [*((path.name, path) for path in files), (CURVES, image.getvalue()), (CARD, text.encode())]


def _summary(folder: Path) -> Path:
    if not (folder / SUMMARY).is_file() or "benchmarks" not in read_json(folder / SUMMARY):
        raise UserError(f"--evaluations {folder}: holds no finished evaluation; name what `threepo eval` wrote")
    return folder / SUMMARY


def card(report: RunReport, repo: str, files: set[str], evaluations: Sequence[tuple[Path, Mapping[str, Any]]]) -> str:
    """The model card: metadata that the hub reads, then what the run was, what it did, and how to use it."""
    from huggingface_hub import ModelCardData

    config, has_adapters = report.config, ADAPTERS in files
    method = config["method"]["name"] if "method" in config else "supervised fine-tuning"
    base = base_model(report.path)
    metadata = ModelCardData(
        base_model=base,
        datasets=[name for name in map(hub_name, sources(config)) if name] or None,
        library_name="peft" if has_adapters else "transformers",
        pipeline_tag="text-generation",
        tags=["threepo", "rlvr" if "method" in config else "sft", method.replace(" ", "-")],
    )
    summary = report.summary()
    name = repo.rpartition("/")[2]
    parts = [f"---\n{metadata.to_yaml()}\n---", f"# {name}"]
    kind = "Low-rank adapters for" if has_adapters else "Trained from"
    parts.append(
        f"{kind} {f'`{base}`' if base else 'a model that is not on the hub'}, with {method}: {summary['steps']} steps "
        f"on {', '.join(f'`{public(name)}`' for name in sources(config))}, by threepo {version('threepo')}."
    )
    parts += ["## Training", f"![Training curves]({CURVES})", _table("measured", dict(_results(summary)))]
    if evaluations:
        parts.append("## Evaluation")
        parts += ["\n\n".join(_evaluation(scores)) for _, scores in evaluations]
    if POSTERIOR in files:
        parts += ["## The posterior", _how_to_draw(repo)]
    settings = {f"{table}.{key}": value for table in SHOWN for key, value in _flat(config.get(table) or {})}
    table = _table("setting", {key: _cell(value) for key, value in settings.items()})
    parts += ["## Settings", "<details><summary>All settings of the run</summary>", table, "</details>"]
    return "\n\n".join(parts) + "\n"


def _results(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The numbers of a run's summary in words."""
    for at in ("before", "after"):
        if (score := summary.get(f"pass_at_1_{at}")) is not None:
            yield f"held-out pass@1 {at} training", percent(score, summary.get(f"se_{at}"))
    for key in ("reward_first", "reward_last", "loss_first", "loss_last", "eval_loss", "steps", "rollouts"):
        if (value := summary.get(key)) is not None:
            what, _, at = key.partition("_")
            yield f"{what} of the {at} step" if at in ("first", "last") else key.replace("_", " "), f"{value:.4g}"


def _evaluation(summary: Mapping[str, Any]) -> Iterator[str]:
    samples = summary["config"]["eval"]["samples"]
    rows = {
        public(label): percent(scores["pass_at"]["1"], scores["standard_errors_of_pass_at_1"]["between"])
        for label, scores in summary["benchmarks"].items()
    }
    yield f"pass@1 of `{public(summary['model'])}`, {samples} completions a problem, with 95 % intervals over problems:"
    yield _table("problems", rows)


def percent(value: float, error: float | None) -> str:
    """A share with its 95 % interval."""
    if error is None:
        return f"{100 * value:.1f} %"
    low, high = (100 * min(max(value + side * INTERVAL * error, 0), 1) for side in (-1, 1))
    return f"{100 * value:.1f} % [{low:.1f}, {high:.1f}]"


def _how_to_draw(repo: str) -> str:
    return (
        f"`{POSTERIOR}` holds a Gaussian over the weights, whose mean is this model. To write models drawn from it:\n\n"
        f"```console\nhf download {repo} --local-dir model\nthreepo sample model --draws 4 --output drawn\n```"
    )


def base_model(run: Path) -> str | None:
    """The hub id of the model that a run began with, through runs that it began with; None: it is not on the hub."""
    path = read_json(run / CONFIG)["model"]["path"]
    if is_local(path):
        return (
            base_model(Path(path)) if (Path(path) / CONFIG).is_file() and (Path(path) / "run.lock").exists() else None
        )
    return path if path.count("/") == 1 else None


def sources(config: Mapping[str, Any]) -> list[str]:
    """Data sources of a run, as its recipe names them."""
    if conversations := config.get("conversations"):
        return [conversations["source"]]
    return [config["data"]["train"]] if "data" in config else list(config["demonstrations"]["tasks"])


def hub_name(source: str) -> str:
    """ORG/NAME of a source on the hub; empty for others."""
    path, _, _ = split_source(source)
    return "" if is_local(source) or is_file(path) or path.count("/") != 1 else path


def public(name: str) -> str:
    """A path, or SET:PATH, without the folders of this machine; all else as it is."""
    kind, colon, copy = name.partition(":")
    if colon and copy.startswith(("/", "~")) and not copy.startswith("//"):
        return f"{kind}:{public(copy)}"
    is_path = name.startswith(("/", "~")) and not re.search(r"[\n{]", name)  # unlike a template
    return os.path.basename(name.rstrip("/")) if is_path else name


def _cell(value: Any) -> str:
    """A setting in a table: a template may have lines, and code in backticks."""
    text = (public(value) if isinstance(value, str) else shown(value)).replace("|", "\\|").replace("\n", "\\n")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", found) for inner, found in _flat(value))
        elif value not in ("", [], None) and key != "folder":
            yield key, value


def _table(title: str, rows: Mapping[str, str]) -> str:
    return "\n".join([f"| {title} | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows.items())])
