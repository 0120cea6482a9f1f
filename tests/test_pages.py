"""Every code block of README and docs/ is run, or checked as what it is; pages explain all warnings; docstrings run."""

import ast
import dataclasses
import doctest
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import threepo
from runs import RLVR
from threepo.cli import build_parser, main
from threepo.config import EnvironmentConfig, SFTConfig, TrainConfig
from threepo.config.recipes import load, load_evaluation, merge, shipped_recipes
from threepo.config.records import build
from threepo.environment import Turn
from threepo.lab.probe_config import load_probing
from threepo.lab.study_config import load_study
from threepo.rollout.environments import Environments
from threepo.run_folder import read_metrics
from threepo.types import Problem

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n+)?^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(\.\.\.)?")
OWN = {"model": {"path": "my-model"}, "data": {"train": "sorting"}}
"""Lies under a recipe that a page shows in part, or only names."""
PROGRAMS = (
    "tutorials/own_model.md",
    "analysis.md",
    "guides/optimizer.md",
    "reproducibility.md",
    "python.md",
    "trl.md",
    "certificate.md",
    "episodes.md",
)
"""Pages under docs/ whose Python, with all that it needs, is run below, or by the tests of what they are about."""


class Block(NamedTuple):
    skipped: bool
    kind: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page."""
    return [Block(bool(why), kind, text) for why, kind, text in BLOCK.findall(page.read_text(encoding="utf-8"))]


def words(text: str) -> Iterator[list[str]]:
    """The commands of a block, as words."""
    for line in text.replace("\\\n", " ").splitlines():
        for command in re.split(r" && ", line):
            if found := shlex.split(command, comments=True):
                yield found


study = cache(load_study)
"""Resolving a study takes a second, and several pages name the same one."""


def check_command(command: list[str]) -> None:
    """A `threepo` command exists with these arguments, its recipe is shipped or a name, and its settings resolve."""
    options, rest = build_parser().parse_known_args([word for word in command if word != "..."])
    assert not [word for word in rest if word.startswith("-")], rest
    more = options.command.more
    assert more or not rest, rest
    if more:
        setattr(options, more, [*getattr(options, more), *rest])
    settings = [text for text in getattr(options, "settings", None) or () if not PLACEHOLDER.fullmatch(text)]
    recipe = getattr(options, "recipe", "") or ""
    if "=" in recipe:  # settings alone
        settings, recipe = [recipe, *settings], ""
    shipped = recipe in shipped_recipes() or (ROOT / recipe).is_file()
    own = recipe if recipe and shipped else ""
    assert shipped or not recipe or recipe.endswith(".toml") or PLACEHOLDER.fullmatch(recipe), recipe
    if command[0] == "study":
        if not options.study.endswith(".toml"):
            study(options.study, tuple(settings))
    elif command[0] == "eval" and options.model:
        names = {"names": options.benchmarks.split(",")} if options.benchmarks else {}
        data = [] if own or names or any(text.startswith("data.train") for text in settings) else ["data.train=sorting"]
        load_evaluation("my-model", own, [*data, *settings], names)
    elif command[0] == "probe":
        data = [] if own else ["data.train=sorting"]
        load_probing("my-model", own, [*data, *settings], {})
    elif command[0] in ("train", "sft") and (settings or recipe) and not options.resume:
        record: Any = TrainConfig if command[0] == "train" else SFTConfig
        if command[0] == "train" and not own:
            kind = "adamw" if "method.preset=grpo" in settings else "ivon"
            below = ["model.path=my-model", "data.train=sorting", f"optimizer.kind={kind}"]
            preset = ["method.preset=c3po"] if kind == "ivon" else []
            settings = [*below, *preset, *settings]
        elif not own:
            settings = ["model.path=my-model", 'demonstrations.tasks=["sorting"]', *settings]
        load(record, own, settings)


def check_console(text: str) -> None:
    """Every command of a block is one that there is."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for command in words(text):
        name = command[0]
        if name == "threepo" and command[1:] != ["--version"]:
            check_command(command[1:])
        elif name in ("torchrun", "srun") or "-m" in command[:3]:
            if "threepo" in command:
                check_command(command[command.index("threepo") + 1 :])
        elif name == "make":
            assert re.search(rf"^{command[1]}:", makefile, re.MULTILINE), command
        elif name == "pip":
            wanted = re.findall(r"\[([\w,-]+)\]", command[-1])
            assert all(extra in extras for group in wanted for extra in group.split(",")), command
        elif name == "python":
            assert (ROOT / command[1]).is_file(), command


def check_toml(text: str) -> None:
    """A recipe, or a part of one, or a study."""
    table = tomllib.loads(text)
    if "methods" in table or "study" in table:
        return  # test_study_files_are_read writes it to a file
    record: Any = SFTConfig if table.keys() & {"demonstrations", "conversations"} else TrainConfig
    if record is TrainConfig and "preset" in table.get("method", {}):
        settings = [f"{name}={value!r}" for name, value in flat(merge(OWN, table))]
        load(record, "", [text.replace("'", '"').replace("True", "true") for text in settings])
    else:
        own = {name: keys for name, keys in OWN.items() if record is TrainConfig or name == "model"}
        build(record, merge(own, table))


def flat(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of nested tables as settings have them."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python is compiled here and run below; doctests run here, each page in a namespace of its own."""
    files_of(page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # for code that settings name
    session = ""
    for block in blocks(page):
        if block.skipped:
            continue
        if block.kind == "console" or (block.kind == "" and "threepo" in block.text):
            check_console(block.text)
        elif block.kind == "toml":
            check_toml(block.text)
        elif block.kind == "json":
            assert [json.loads(line) for line in block.text.splitlines()]
        elif block.kind == "bash":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        elif block.kind == "python" and block.text.startswith(">>>"):
            session += block.text
        else:
            assert block.kind in ("python", "text", ""), block.kind
            if block.kind == "python":
                ast.parse(block.text)
                at_top = page.name in ("README.md", "CONTRIBUTING.md")
                assert at_top or str(page.relative_to(ROOT / "docs")) in PROGRAMS, "nobody runs it"
    example = doctest.DocTestParser().get_doctest(session, {}, page.name, str(page), 0)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_what_is_not_run() -> None:
    """Blocks marked `<!-- not run: reason -->` are few, and this is how many."""
    skipped = [page.name for page in PAGES for block in blocks(page) if block.skipped]
    assert skipped == ["rewards.md", "verl.md"], f"{len(skipped)} blocks are marked as not run"


def test_study_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study of the page compares methods on the recipe that the README shows."""
    for page, name in (("README.md", "my_run.toml"), ("docs/studies.md", "my_study.toml")):
        [text] = [block.text for block in blocks(ROOT / page) if block.kind == "toml"]
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert len(load_study("my_study.toml").tuned()) == 2 * 2


def files_of(page: Path, folder: Path) -> set[str]:
    """Write the files that a page shows, each under its name in backticks."""
    shown = r"^`([\w.]+)`[^\n]*\n?[^\n]*:\n\n```\w+\n(.*?)```"
    found = re.findall(shown, page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for name, content in found:
        (folder / name).write_text(content)
    return {name for name, _ in found}


def test_the_environments_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Played in their processes: a guess too low, words, the number; a tool that knows a price, and one it lacks."""
    assert files_of(ROOT / "docs" / "episodes.md", tmp_path) >= {"guess.py", "shop.py"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    problem = Problem(id="p", prompt="", answer="42")
    game = Environments(EnvironmentConfig(factory="guess:Guess", settings={"highest": 50}))
    shop = Environments(EnvironmentConfig(factory="shop:Shop"))
    with closing(game), closing(shop):
        game.begin(1)
        assert "between 1 and 50" in game.call({0: ("reset", problem, 1)})[0].value
        turns = [game.call({0: ("step", reply)})[0].value for reply in ("7", "seven", "42")]
        assert turns[0] == Turn("Higher.", metrics={"distance": 35})
        assert turns[1] == Turn("Answer with a number only.", reward=-0.1)
        assert turns[2] == Turn(reward=1.0, done=True)
        assert game.steps
        assert not shop.steps
        assert shop.tools[0]["function"]["parameters"]["properties"]["item"]["type"] == "string"
        shop.begin(1)
        assert shop.call({0: ("reset", problem, 1)})[0].value is None
        calls = [("price", {"item": "pear"}), ("price", {"item": "plum"}), ("buy", {})]
        told = shop.call({0: ("tools", calls)})[0].value
        assert told[:2] == ["4", "error: KeyError: 'plum'"]
        assert told[2].endswith("with one of the names price")


def test_the_own_code_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "CONTRIBUTING.md"
    assert files_of(page, tmp_path) == {"gated.py"}
    monkeypatch.chdir(tmp_path)
    [settings] = [found[3:] for found in words(blocks(page)[-1].text) if found[:2] == ["threepo", "train"]]
    assert main(["train", *RLVR, *settings, "objective.mini_batches=2", "run.steps=1", "run.folder=run"]) == 0


def run_page(page: Path) -> None:
    """Run the Python and the `threepo` commands of a page, in their order, in this folder."""
    for block in blocks(page):
        if block.kind == "python":
            exec(compile(block.text, str(page), "exec"), {"__name__": "__main__"})
        for command in words(block.text) if block.kind == "console" else ():
            assert main(command[1:]) == 0, command


@pytest.mark.filterwarnings("default::threepo.errors.ThreepoWarning")  # which the page explains
def test_your_own_model_and_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tutorial from its lines alone: the policy learns, and so does the baseline."""
    page = ROOT / "docs" / "tutorials" / "own_model.md"
    monkeypatch.chdir(tmp_path)
    assert files_of(page, tmp_path) == {"problems.jsonl", "my_reward.py", "my_run.toml"}
    run_page(page)
    for name in ("my_run", "baseline"):
        rows = read_metrics(Path("runs") / name)
        assert rows[0]["reward/mean"] < 0.2
        assert rows[-1]["reward/mean"] > 0.8, name
    assert read_metrics(Path("runs/my_run"))[0]["posterior/sigma_to_rms"] == pytest.approx(0.051, abs=0.002)
    assert Path("report/index.html").is_file()


def test_runs_of_another_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    run_page(ROOT / "docs" / "analysis.md")
    assert Path("exploration/exploration.png").is_file()


def test_the_optimizer_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(ROOT / "docs" / "guides" / "optimizer.md")
    assert Path("my_model/posterior.safetensors").is_file()


def test_a_digest_is_that_of_the_run(tmp_path: Path) -> None:
    [block] = [block.text for block in blocks(ROOT / "docs" / "reproducibility.md") if block.kind == "python"]
    names: dict[str, Any] = {}
    exec(block, names)
    for name, seconds, reward in (("a", 1.0, 0.5), ("b", 2.0, 0.5), ("c", 1.0, 0.75)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"run": {"folder": name, "seed": 0}}))
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"time/step": seconds, "reward/mean": reward}) + "\n")
    a, b, c = (names["digest"](tmp_path / name) for name in "abc")
    assert a == b != c


def warning_texts() -> Iterator[str]:
    """The text of every `warnings.warn(..., ThreepoWarning)` in the source, without its values.

    Where a message is chosen among a module's constants, these are what it says.
    """
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for call in ast.walk(tree):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "warnings.warn"):
                continue
            if "ThreepoWarning" not in map(ast.unparse, call.args):
                continue
            said = call.args[0]
            if isinstance(said, ast.Name):  # put together before
                assigned = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
                said = next(node.value for node in assigned if ast.unparse(node.targets[0]) == said.id)
            literals = [part.value for part in ast.walk(said) if isinstance(part, ast.Constant)]
            if "{message}" not in ast.unparse(said):
                yield "".join(text for text in literals if isinstance(text, str))
                continue
            for node in tree.body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("_"):
                    yield str(ast.literal_eval(node.value))


def test_every_warning_is_explained_and_nothing_else_is() -> None:
    page = (ROOT / "docs" / "guides" / "warnings.md").read_text(encoding="utf-8")
    quotes = [re.split(r" ?\.\.\.:? ?", quote) for quote in re.findall(r"^> (.*)$", page, re.MULTILINE)]
    texts = list(warning_texts())
    assert len(texts) > 10
    for text in texts:
        assert any(part in text for quote in quotes for part in quote if len(part) > 15), f"not explained: {text}"
    for quote in quotes:
        assert any(part in text for text in texts for part in quote if len(part) > 15), f"not in the source: {quote}"


@pytest.mark.parametrize("name", threepo.__all__)
def test_names_have_examples(name: str) -> None:
    """Every name is on the page of the Python API. Its docstring's examples run; instances show their class's. The
    names of a whole run have theirs in python.md, which test_documents runs."""
    assert f"::: threepo.{name}\n" in (ROOT / "docs" / "python_api.md").read_text(encoding="utf-8")
    value = getattr(threepo, name)
    documented = value if hasattr(value, "__module__") and callable(value) else type(value)
    names = {"threepo": threepo, "torch": torch, "dataclasses": dataclasses}
    example = doctest.DocTestParser().get_doctest(documented.__doc__, names, name, None, 0)
    shown = example.examples or documented.__module__ == "threepo.library"
    assert shown, f"threepo.{name} has no example"
    assert doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL).run(example).failed == 0
