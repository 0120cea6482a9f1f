"""The documents say what is so: README lines run, metrics and settings are explained, links lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pyarrow.parquet
import pytest

import threepo
from runs import sft_config, train_config
from threepo import api
from threepo.cli import build_parser, main
from threepo.config import SFTConfig
from threepo.config.recipes import load
from threepo.run_folder import read_metrics

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def section(title: str) -> str:
    """The text of a README section."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_readmes_recipe_and_reward_are_those_of_the_tutorial() -> None:
    """Which test_pages.py runs."""
    pages = (section("Your own model and reward"), (ROOT / "docs/tutorials/own_model.md").read_text(encoding="utf-8"))
    for start in ("[model]", "def reward"):
        ours, theirs = (re.search(rf"```\w+\n({re.escape(start)}.*?)```", page, re.DOTALL) for page in pages)
        assert ours is not None
        assert theirs is not None
        assert ours[1] == theirs[1]


def test_python_in_the_page_about_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, as one program."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 5
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    exec(compile("\n".join(blocks), "docs/python.md", "exec"), {"__name__": "__main__"})
    upload = (
        f"push {tmp_path}/runs/first org/name --evaluations {tmp_path}/runs/first-scores --dry-run {tmp_path}/upload"
    )
    assert main(upload.split()) == 0


def test_the_readmes_tree_names_what_is_there() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## What is where\n")[1].split("\n## ")[0]
    for name in re.findall(r"(\w+\.py)\b", tree):
        assert list((ROOT / "src" / "threepo").rglob(name)), name
    for record in re.findall(r"types\.py .*: ([\w, ]+)", tree)[0].split(", "):
        assert hasattr(threepo.types, record), record
    for folder in re.findall(r"^  (\w+)/", tree, re.MULTILINE):
        assert (ROOT / "src" / "threepo" / folder).is_dir(), folder
    for package in (path.name for path in (ROOT / "src" / "threepo").iterdir() if (path / "__init__.py").is_file()):
        assert f"  {package}/" in tree, package


def test_the_size_of_the_noise_is_advised_in_one_place_with_what_studies_found() -> None:
    advised = [page.name for page in PAGES if "0.05" in page.read_text() and "aim for" in page.read_text()]
    assert advised in ([], ["log.md"])
    section = (ROOT / "docs" / "guides" / "settings.md").read_text().split("### Which size\n")[1].split("\n## ")[0]
    assert "no gain at 5 %" in section
    linked = [page.name for page in PAGES if "settings.md#which-size" in page.read_text()]
    assert {"metrics.md", "not_learning.md", "own_model.md", "adapters.md", "the_posterior.md"} <= set(linked)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Also on GitHub, which keeps a hyphen for each blank of a heading; tests/test_site.py has the site's anchors."""
    for target, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)]+))?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            leads_to = page.parent / target if target else page
            assert leads_to.exists(), target
            assert not anchor or anchor in github_anchors(leads_to), f"{target}#{anchor}"


def github_anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_stability_page_lists_the_commands_and_names_that_there_are() -> None:
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")

    def listed(part: str) -> list[str]:
        text = page.split(f"<!-- {part} -->")[1].split(f"<!-- end of {part} -->")[0]
        return re.findall(r"`(?:threepo )?(\w+)`", text)

    (commands,) = (action for action in build_parser()._actions if action.dest == "==SUPPRESS==" and action.choices)
    assert listed("commands") == list(commands.choices or ())
    assert listed("names") == threepo.__all__


def test_the_versions_of_the_package_and_its_citation_agree() -> None:
    versions = [
        re.findall(r"^version\W+([\d.]+)", (ROOT / name).read_text(), re.MULTILINE)
        for name in ("pyproject.toml", "CITATION.cff")
    ]
    assert versions[0] == versions[1] == [threepo.__version__]


def test_the_configuration_page_is_what_the_source_says() -> None:
    specification = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert specification is not None
    assert specification.loader is not None
    generate = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generate)
    for page, text in generate.pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page}: run `make docs`"


def test_every_field_that_a_page_names_exists() -> None:
    """`table.key` in backticks, in the pages that map settings to fields."""
    known = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    tables: dict[str, set[str]] = {}
    for title, body in re.findall(r"^## \[([\w.]+)\][^\n]*\n(.*?)(?=^## |\Z)", known, re.DOTALL | re.MULTILINE):
        tables.setdefault(title, set()).update(re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE))
    tables["method"].add("preset")
    for page in ("paper_index.md", "method.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for table, key in re.findall(r"`((?:\w+\.)*\w+)\.(\w+)(?: = [^`]*)?`", text):
            if table in tables and key not in ("correction", "advantage"):
                assert key in tables[table], f"{page}: {table}.{key}"


def test_every_metric_is_explained_and_nothing_else_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: set[str] = set()
    settings, compared = (
        ["run.steps=1", "eval.every=1"],
        ["model.tiny.tied=false", "method.log_evolution=true", "ess_schedule.kind=kl_steps"],
    )
    episodes = ["reward.function=environment", "environment.factory=worlds:Echo", "sampling.max_new_tokens=400"]
    overlap = ["overlap.lag=1", "overlap.stream=true", "method.correction.kind=seq_mis"]
    compared += ["objective.loss=clip_cov", "objective.reference_kl=0.1", 'reward.function=["exact", "task"]']
    for name, config in (
        ("grpo", train_config(tmp_path / "grpo", *settings, "sampling.dynamic_rounds=2")),
        ("c3po", train_config(tmp_path / "c3po", *settings, "method.preset=c3po", *compared)),
        ("auto", train_config(tmp_path / "auto", *settings, "method.preset=auto", *overlap)),
        ("episodes", train_config(tmp_path / "episodes", *settings, *episodes)),
    ):
        api.train(config)
        logged |= {key for row in read_metrics(tmp_path / name) for key in row}
    api.train(sft_config(tmp_path / "sft", "run.steps=1"))
    logged |= {key for row in read_metrics(tmp_path / "sft") for key in row}
    monkeypatch.chdir(ROOT)
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text('{"prompt": "What?", "completion": "That."}\n')
    chats = [f"conversations.eval={heldout}", f"conversations.cache={tmp_path / 'cache'}"]
    chats += [f"run.folder={tmp_path / 'chats'}", "conversations.epochs=1", "conversations.batch_size=12"]
    api.train(load(SFTConfig, "examples/conversations.toml", chats))
    logged |= {key for row in read_metrics(tmp_path / "chats") for key in row}
    logged.discard("step")
    logged.add("compute/pushed_bytes")  # with vLLM alone; test_vllm_servers.py sees it
    text, _, completions = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition("## Completions")
    explained = re.findall(r"^\| `([\w/<>]+)` \|", text, re.MULTILINE)
    patterns = {name: re.compile(re.sub(r"<\w+>", r"[\\w .]+", name)) for name in explained}
    for key in sorted(logged):
        assert any(pattern.fullmatch(key) for pattern in patterns.values()), f"{key} is not explained"
    for name, pattern in patterns.items():
        assert any(pattern.fullmatch(key) for key in logged), f"{name} is explained, but not logged"
    columns = {name for cell in re.findall(r"^\| (`.*?) \|", completions, re.MULTILINE) for name in cell.split(", ")}
    written = pyarrow.parquet.read_table(tmp_path / "episodes" / "completions" / "step-000000.parquet").column_names
    assert columns == {f"`{name}`" for name in written}
