"""A run's model on the Hugging Face hub, with a model card that is made from the run.

    threepo push RUN ORG/NAME [--evaluations EVAL ...] [--public | --dry-run FOLDER]

What is uploaded is the newest checkpoint as others load it: weights or adapters, tokenizer, posterior; and the card,
with the curves. What only a resumed run needs stays here, and so do the names of folders on this machine.
"""

import io
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from threepo.config.sources import is_local
from threepo.errors import ThreepoWarning, UserError
from threepo.evaluation.tables import markdown
from threepo.files import atomic_folder, read_json
from threepo.lab.curves import curves
from threepo.lab.report import RunReport, read_run, shown_score, tables
from threepo.run_folder import ADAPTERS, CHECKPOINTS, CONFIG, FOR_RESUMING, LOCK, POSTERIOR_FILE, SUMMARY, model_folder

CARD, CURVES = "README.md", "curves.png"
TEMPLATE = Path(__file__).with_name("templates") / "model_card.md"
OF_THE_MACHINE = ("engine", "parallel")
"""Tables of the configuration that the card does not show."""
PATH = re.compile(r"(\w[\w.-]*:)?((~|\.\.?)?/[^/\n{][^\n{]*|[^\s/:{]+(/[^\s/{]+){2,}/?)")
"""A path, or SET:PATH; neither a template, which has lines or braces, nor an address such as hf://. A name on the hub
has one slash; relative paths with two or more are those of a journal, or of an environment's settings."""


def push(run: Path, repo: str, evaluations: Sequence[Path] = (), public: bool = False) -> str:
    """Upload a run's model with its card; a new repository is private unless `public`. Returns its address."""
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if not get_token():
        raise UserError(f"push {repo}: no token of the Hugging Face hub; run `hf auth login`, or set HF_TOKEN")
    files = contents(run, repo, evaluations)
    operations = [CommitOperationAdd(name, part) for name, part in files]
    try:
        api = HfApi()
        address = api.create_repo(repo, private=not public, exist_ok=True)
        api.create_commit(repo, operations, commit_message=f"threepo {version('threepo')}: {run.name}")
    except Exception as error:  # of an HTTP library, which differs between versions of huggingface_hub
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
            (temporary / name).parent.mkdir(exist_ok=True)
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
    # Also those in folders: a tokenizer has one for further chat templates.
    files = [path for path in sorted(found.rglob("*")) if path.is_file() and path.name not in FOR_RESUMING]
    base = base_model(run)
    if (found / ADAPTERS).is_file():  # they fit what they were trained on, and not the model that this began with
        own = read_json(found / ADAPTERS)["base_model_name_or_path"]
        base = None if is_local(own) else own
        if base is None:
            fix = "upload a merged model (`threepo merge`, `hf upload`), or train from a model on the hub"
            message = f"push {run}: the base model of these adapters is the folder {own}, which nobody else has: {fix}"
            warnings.warn(message, ThreepoWarning, stacklevel=2)
    image = io.BytesIO()
    curves([report]).savefig(image, format="png", dpi=110)
    text = card(report, repo, base, {path.name for path in files}, evaluations)
    return [
        *((path.relative_to(found).as_posix(), path) for path in files),
        (CURVES, image.getvalue()),
        (CARD, text.encode()),
    ]


def card(report: RunReport, repo: str, base: str | None, files: set[str], evaluations: Sequence[Path]) -> str:
    """The model card: metadata that the hub reads, then what the run was, what it did, and how to use it.

    `base`: the hub id of the base model, if it is on the hub.
    """
    from huggingface_hub import ModelCard, ModelCardData

    config, measured = report.config, tables([replace(report, name="this model")])[0]
    chose_arms = config.get("arms", {}).get("choice", "none") != "none" and config["optimizer"]["kind"] != "ivon"
    method = config["method"]["name"] if "method" in config else "supervised fine-tuning"
    metadata = ModelCardData(
        base_model=base,
        library_name="peft" if ADAPTERS in files else "transformers",
        pipeline_tag="text-generation",
        tags=["threepo", "rlvr" if "method" in config else "sft", method.replace(" ", "-")],
    )
    shown_tables = {name: table for name, table in config.items() if name not in OF_THE_MACHINE}
    written = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        repo=repo,
        adapters=ADAPTERS in files,
        base=base,
        method=method,
        steps=len(report.steps),
        sources=", ".join(f"`{public(name)}`" for name in sources(config)),
        version=version("threepo"),
        curves=CURVES,
        results=f"{measured.title}\n\n{markdown(measured)}",
        evaluations=[_evaluation(folder) for folder in evaluations],
        posterior=POSTERIOR_FILE if POSTERIOR_FILE in files and not chose_arms else "",
        settings=json.dumps(_settings(shown_tables), indent=1),
    )
    return f"{str(written).rstrip()}\n"


def _evaluation(folder: Path) -> dict[str, Any]:
    """The scores of a finished evaluation."""
    summary = read_json(folder / SUMMARY) if (folder / SUMMARY).is_file() else {}
    if "benchmarks" not in summary:
        raise UserError(f"--evaluations {folder}: holds no finished evaluation; name what `threepo eval` wrote")
    scores = {
        public(label): shown_score((scores["pass_at"]["1"], scores["standard_errors_of_pass_at_1"]["between"]))
        for label, scores in summary["benchmarks"].items()
    }
    model = Path(summary["model"])
    name = f"{model.parents[1].name}, {model.name}" if model.parent.name == CHECKPOINTS else public(summary["model"])
    return {"model": name, "samples": summary["config"]["eval"]["samples"], "scores": scores}


def base_model(run: Path) -> str | None:
    """The hub id of the model that a run began with, through runs that it began with; None: it is not on the hub."""
    path = read_json(run / CONFIG)["model"]["path"]
    if not is_local(path):
        return path if path.count("/") == 1 else None
    is_run = (Path(path) / CONFIG).is_file() and (Path(path) / LOCK).exists()
    return base_model(Path(path)) if is_run else None


def sources(config: Mapping[str, Any]) -> list[str]:
    """Data sources of a run, as its recipe names them."""
    if conversations := config.get("conversations"):
        return [conversations["source"]]
    return [config["data"]["train"]] if "data" in config else list(config["demonstrations"]["tasks"])


def public(name: str) -> str:
    """A path, or SET:PATH, without its folders; all else as it is."""
    path = PATH.fullmatch(name)
    return f"{path[1] or ''}{os.path.basename(path[2].rstrip('/'))}" if path else name


def _settings(value: Any) -> Any:
    """All settings of a run, without folders of this machine."""
    if isinstance(value, Mapping):
        return {key: _settings(inner) for key, inner in value.items() if key != "folder"}
    if isinstance(value, list):
        return [_settings(inner) for inner in value]
    return public(value) if isinstance(value, str) else value
