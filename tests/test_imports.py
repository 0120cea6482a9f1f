"""The import rule of the design, and what an import costs."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import threepo
from programs import run_program

SOURCE = Path(threepo.__file__).parent


@cache
def imports_in(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """All imports of a source file, wherever in the file."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


DOORS = {"__init__", "__main__", "cli", "commands", "api", "library", "inputs", "certify"}
"""The command line and Python: through them one gets to every storey, so they import from all of them."""
STOREYS = {"lab", "plugins"}
"""The laboratory reads run folders and uses the core; plug-ins use both. The core imports neither."""
GROUND = {
    *("types", "config", "errors", "files", "run_folder", "compiled", "workers", "progress"),
    *("environment", "user_code"),
}
"""Read by everyone; they import only each other."""
LEVELS = [
    {"posterior", "objectives"},
    {"methods"},
    {"models"},
    {"rollout"},
    {"ranks"},
    {"evaluation"},
    {"training"},
]
"""The rest of the core, from the bottom up; evaluation stands below training because the loop evaluates."""
ASIDE = {"rewards", "data"}
"""Import the ground only; everything from `evaluation` up may use them."""
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


def rooms() -> dict[Path, str]:
    """Every source file with the room it stands in."""
    return {path: path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """Rooms of threepo that a file imports, wherever in the file; type-only imports count too."""
    found = set()
    for node in imports_in(path):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "threepo" else [f"threepo.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("threepo.")}
    return found


def allowed(room: str, imported: str) -> bool:
    """True if a file of `room` may import from the room `imported`."""
    if imported == room or imported in GROUND or room in DOORS:
        return True
    if room == "plugins":
        return True
    if room == "lab":
        return imported != "plugins"
    if imported in STOREYS | DOORS or room in GROUND | ASIDE:
        return False
    if imported in ASIDE:
        return LEVEL_OF[room] >= LEVEL_OF["evaluation"]
    return LEVEL_OF[imported] < LEVEL_OF[room]


def test_every_room_is_known() -> None:
    assert set(rooms().values()) <= DOORS | STOREYS | GROUND | ASIDE | set(LEVEL_OF)


def test_imports_flow_down_only() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports threepo.{imported}"
        for path, room in rooms().items()
        for imported in imports_of(path)
        if not allowed(room, imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rule_itself_can_fail() -> None:
    assert not allowed("training", "lab")
    assert not allowed("data", "plugins")
    assert not allowed("lab", "plugins")
    assert not allowed("training", "api")
    assert not allowed("methods", "training")
    assert not allowed("data", "rewards")
    assert not allowed("config", "methods")
    assert not allowed("posterior", "objectives")
    assert allowed("training", "methods")
    assert allowed("lab", "training")
    assert allowed("plugins", "lab")


@pytest.mark.parametrize(
    ("package", "only"),
    [
        ("vllm", "rollout/vllm_replica.py plugins/vllm.py"),
        ("trl", "plugins/trl.py plugins/trl_settings.py"),
        ("verl", "plugins/verl.py plugins/verl_batches.py plugins/verl_check.py"),
        ("ray", "plugins/verl.py plugins/verl_check.py"),
        *((tracker, "plugins/trackers.py") for tracker in ("tensorboard", "wandb", "trackio", "mlflow")),
        ("verifiers", "plugins/verifiers.py plugins/verifiers_episodes.py"),
    ],
)
def test_optional_packages_are_imported_where_they_are_needed(package: str, only: str) -> None:
    for path in SOURCE.rglob("*.py"):
        for node in imports_in(path):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            foreign = [
                module for module in modules if module.split(".")[0] != "threepo"
            ]  # our own files may be namesakes
            here = path.relative_to(SOURCE).as_posix() in only.split()
            assert here or not any(package in module.split(".") for module in foreign), path


def test_the_hugging_face_trainer_is_imported_by_its_plugins() -> None:
    """It needs accelerate, which is optional; the rest of transformers is not. Callbacks belong to it."""
    importing = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for node in imports_in(path)
        if isinstance(node, ast.ImportFrom) and any(alias.name.startswith("Trainer") for alias in node.names)
    }
    assert importing == {"plugins/transformers.py", "plugins/certificate.py"}


def test_nothing_heavy_is_imported_to_answer_quickly() -> None:
    statement = (
        "import threepo; threepo.Method, threepo.C3PO, threepo.Draw, dir(threepo)\n"
        "from threepo.cli import build_parser; build_parser().format_help()\n"
        "import threepo.config as c; from threepo.config.recipes import load; load(c.TrainConfig, 'demo/c3po')\n"
        "from threepo.data.source import open_training; from threepo.rewards.grading import load_grader"
    )
    assert not imported(statement, "torch", "transformers", "numpy", "matplotlib", "rich", "datasets", "pandas")


def test_commands_that_do_not_train_import_no_torch() -> None:
    """`threepo.Run`, `threepo eval --compare`, and the laboratory without what measures noise or memory."""
    lab = {path.stem for path in (SOURCE / "lab").glob("*.py")} - {"__init__", "probe", "plan", "activations"}
    modules = ["threepo.library", "threepo.evaluation.compare", *(f"threepo.lab.{name}" for name in sorted(lab))]
    assert not imported(f"import {', '.join(modules)}", "torch", "transformers")


def test_a_training_run_imports_nothing_that_it_may_not_use() -> None:
    """Pictures, its plan, each engine; `datasets` takes seconds, and brings pandas."""
    unused = ["matplotlib", "datasets", "pandas", "vllm", "threepo.rollout.vllm", "threepo.rollout.local"]
    unused += ["threepo.lab.figures", "threepo.lab.plan", "threepo.lab.activations"]
    done = run_program(printing("import threepo.api, threepo.lab.show", *unused), SOURCE)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split()


def test_the_certificate_needs_no_trainer() -> None:
    other = ["threepo.config", "threepo.models.policy", "threepo.training.run", "pydantic", "datasets", "trl", "vllm"]
    assert imported("import threepo.certify", "torch", *other, "accelerate", "transformers") == ["torch"]


def imported(statement: str, *modules: str) -> list[str]:
    """The modules among these that a fresh process has imported after the statement."""
    program = [sys.executable, "-c", printing(statement, *modules)]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()


def printing(statement: str, *modules: str) -> str:
    """A program that says which of these modules are imported after the statement."""
    return f"{statement}\nimport sys; print(*(m for m in {modules} if m in sys.modules))"


def test_all_public_names_are_there() -> None:
    for name in threepo.__all__:
        assert getattr(threepo, name) is not None
    assert threepo.__version__ == importlib.metadata.version("threepo")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = threepo.nothing


RANK_OR_SIZE = re.compile(r"world\.(rank|size|gloo)\b|get_(rank|world_size)\(|[\"'](RANK|WORLD_SIZE|LOCAL_RANK)[\"']")
"""Ways to ask which rank a process is, or how many there are."""


def test_only_one_room_knows_how_many_ranks_there_are() -> None:
    """Elsewhere a `World` is passed on, and its verbs are used."""
    asking = [
        f"{path.relative_to(SOURCE)}: {match[0]}"
        for path, room in rooms().items()
        for match in RANK_OR_SIZE.finditer(path.read_text())
        if room != "ranks"
    ]
    assert not asking
    assert RANK_OR_SIZE.search("if self.world.rank == 0:")
    assert RANK_OR_SIZE.search("os.environ['RANK']")
