"""Studies as they are read: everything that can be refused is refused before the first run, in one line."""

from functools import cache
from pathlib import Path

import pytest

from runs import RLVR, TUNED_STUDY
from threepo.config import SFTConfig
from threepo.config.recipes import STUDIES, load, recipes_folder
from threepo.config.records import to_dict
from threepo.errors import UserError
from threepo.files import write_json
from threepo.lab.study_config import Cell, Study, load_study
from threepo.lab.study_state import known_runs, refuse_changes

STUDY = f"""
[study]
folder = "FOLDER/study"
baseline = "grpo"
seeds = [0, 1]
smoothing = 2
settings = {[*RLVR[:-2], "eval.problems=4", "eval.samples=2", "eval.every=2", "run.steps=4"]}

{TUNED_STUDY}""".replace("'run.threads=1', ", "")

START = """
[start]
recipe = "warm.toml"
per_seed = true
"""
WARM = """
[model]
path = "tiny-qwen2"
[demonstrations]
tasks = ["sorting"]
seed = 5
"""


def study(folder: Path, *changes: tuple[str, str], more: str = "") -> Study:
    """The study of this page, with texts in it replaced."""
    text = STUDY.replace("FOLDER", str(folder)) + more
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "warm.toml").write_text(WARM)
    (folder / "tiny.toml").write_text(text)
    return load_study(str(folder / "tiny.toml"))


def test_a_seed_moves_data_draws_and_sampling_alike_for_all_methods(tmp_path: Path) -> None:
    found = study(tmp_path, ("'data.levels=[2, 3]'", "'data.levels=[2, 3]', 'data.seed=7'"))
    for seed in (0, 1):
        configs = [found.reported(Cell("", method), ())[seed].config() for method in ("grpo", "c3po")]
        assert [(c.run.seed, c.data.seed) for c in configs] == [(seed, 7 + seed)] * 2


def test_names_of_runs(tmp_path: Path) -> None:
    found = study(tmp_path, more="[variants.K2]\nsettings = ['data.levels=[2]']\n[variants.K3]\n")
    assert [cell.name for cell in found.cells] == ["K2/grpo", "K2/c3po", "K3/grpo", "K3/c3po"]
    assert [run.name for run in found.reported(found.cells[1], ())] == ["runs/K2/c3po/seed-0", "runs/K2/c3po/seed-1"]
    assert [run.name for runs in found.tuning(found.cells[0]) for run in runs] == [
        "tuning/K2/grpo/point-0/seed-100",
        "tuning/K2/grpo/point-1/seed-100",
    ]
    assert found.reported(found.cells[0], ())[0].config().data.levels == (2,)
    assert found.reported(found.cells[2], ())[0].config().data.levels == (2, 3)


def test_each_seed_may_have_a_warm_start_of_its_own(tmp_path: Path) -> None:
    found = study(tmp_path, ("'model.path=tiny-qwen2', ", ""), more=START)
    starts = {run.name: run for run in found.starts()}
    assert list(starts) == ["start/seed-0", "start/seed-1", "start/seed-100"]
    config = starts["start/seed-1"].config()
    assert (config.run.seed, config.demonstrations.seed) == (1, 6)
    run = found.reported(found.cells[0], ())[1]
    assert run.start == starts["start/seed-1"]
    assert run.config().model.path == str(starts["start/seed-1"].folder)
    shared = study(tmp_path, ("'model.path=tiny-qwen2', ", ""), more=START.replace("per_seed = true", ""))
    assert [run.name for run in shared.starts()] == ["start"]
    assert shared.starts()[0].config().demonstrations.seed == 5


def test_settings_may_name_the_warm_start(tmp_path: Path) -> None:
    found = study(tmp_path, ("'model.path=tiny-qwen2'", "'model.tokenizer={start}/tokens'"), more=START)
    run = found.reported(found.cells[0], ())[1]
    assert run.config().model.tokenizer == str(found.folder / "start/seed-1/tokens")


def test_a_variant_may_have_other_settings_of_the_warm_start(tmp_path: Path) -> None:
    both = '[variants.a]\n[variants.b]\nstart_settings = ["demonstrations.seed=8", "run.steps=3"]\n'
    start = START.replace("per_seed = true", 'settings = ["demonstrations.seed=7"]')
    found = study(tmp_path, ("'model.path=tiny-qwen2', ", ""), more=start + both)
    configs = {run.name: run.config() for run in found.starts()}
    assert {name: config.demonstrations.seed for name, config in configs.items()} == {"start": 7, "start/b": 8}
    assert configs["start/b"].run.steps == 3 != configs["start"].run.steps
    paths = {run.name: run.config().model.path for cell in found.cells for run in found.reported(cell, ())}
    assert paths["runs/b/grpo/seed-0"] == str(found.folder / "start/b")
    assert paths["runs/a/grpo/seed-0"] == str(found.folder / "start")


def test_a_study_may_be_moved_but_not_begin_from_another_start(tmp_path: Path) -> None:
    unlike = ("'model.path=tiny-qwen2', ", "")
    shared = START.replace("per_seed = true", "")
    before = study(tmp_path, unlike, more=shared)
    for run in known_runs(before):
        write_json(run.folder / "config.json", to_dict(run.config()))
    refuse_changes(before)
    with pytest.raises(UserError, match=r"began \(model.path = '.*/start' then, '.*/start/seed-\d+' now"):
        refuse_changes(study(tmp_path, unlike, more=START))
    moved = study(tmp_path, unlike, ("/study", "/elsewhere"), more=shared)
    (tmp_path / "study").rename(tmp_path / "elsewhere")
    refuse_changes(moved)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = [100]", "seeds = [1, 100]", r"tuning.seeds = .*\[1\] are reported, so nothing may be chosen on them"),
        ("seeds = [0, 1]", "seeds = [0, 0]", "study.seeds = .*must all differ"),
        ("seeds = [0, 1]", "seeds = [0]", "study.seeds = .*name two or more"),
        ("trials = 2", "trials = 3", "methods.grpo.grid = .*has 2 different points; tuning.trials = 3 is the budget"),
        (', ["optimizer.ess=1e9"]]', "]", "methods.c3po.grid = .*has 1 different points"),
        ('["optimizer.ess=1e9"]', '["optimizer.ess=1e8"]', "methods.c3po.grid = .*has 1 different points"),
        ('baseline = "grpo"', 'baseline = "gpro"', "study.baseline = 'gpro': must be one of grpo, c3po"),
        ('"optimizer.lr=1e-4"', '"optimizer.rl=1e-4"', "did you mean optimizer.lr"),
        ('"method.preset=c3po"', '"method.draws=3"', "method.draws = 3"),
        ('"method.preset=c3po"', '"method.preset=c3po", "run.seed=3"', "methods.c3po: run.seed = .*set by the study"),
        ('"method.preset=c3po"', '"method.preset=c3po", "data.seed=3"', "methods.c3po differs from grpo: data.seed"),
        ('"method.preset=c3po"', '"method.preset=c3po", "eval.samples=4"', "eval.samples = 2 there, 4 here"),
        ('baseline = "grpo"', 'baseline = "grpo"\nmetric = "eval/passat1"', "passat1': not measured .* eval/pass_at_1"),
        ('baseline = "grpo"', 'baseline = "grpo"\nmetric = "pass_at_1"', "'pass_at_1': not measured .* eval/pass_at_1"),
        ("[methods.grpo]", "[method.grpo]", "a study has a table .methods.NAME. for each method"),
        (
            "'eval.every=2'",
            "'eval.every=0'",
            "eval.every = 0: methods.grpo: study.metric = 'eval/pass_at_1' is measured",
        ),
        (
            '"method.preset=c3po"',
            '"method.preset=c3po", "data.prompts_per_step=2"',
            "data.prompts_per_step = 4 there, 2",
        ),
        (
            '"method.preset=c3po"',
            '"method.preset=c3po", "data.system_prompt=Hi"',
            "data.system_prompt = '' there, 'Hi'",
        ),
        (
            '"method.preset=c3po"',
            '"method.preset=c3po", "reward.function=exact"',
            "reward.function = 'task' there, 'exac",
        ),
        (
            '"method.preset=c3po"',
            '"method.preset=c3po", "model.path=tiny-llama"',
            "model.path = 'tiny-qwen2' there, 'tiny",
        ),
        (
            '"method.preset=c3po"',
            '"method.preset=c3po", "sampling.max_new_tokens=3"',
            "eval.max_new_tokens = [0-9]+ there, 3 here",
        ),
        (
            '"method.preset=c3po"',
            '"method.preset=c3po", "environment.factory=worlds:Counter"',
            "environment.factory = '' there, 'worlds:Counter' here",
        ),
        ("smoothing = 2", "smoothing = 3", "study.smoothing = 3: must be half of run.steps = 4 at most"),
        ("smoothing = 2", 'target = "best"', "study.target = 'best': must be a number, or 'baseline'"),
        ("smoothing = 2", "smooth = 2", "did you mean study.smoothing"),
        ("[methods.c3po]", "[methods.c3po]\nrecipee = ''", "did you mean methods.c3po.recipe"),
        ("[methods.c3po]", '[methods."c/3"]', "letters, digits"),
        ("[methods.c3po]", "[variants.a]\nstart_settings = ['run.steps=3']\n[methods.c3po]", "no .start."),
    ],
)
def test_mistakes_are_refused_in_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        study(tmp_path, (old, new))
    assert "\n" not in str(error.value)


def test_a_grid_needs_a_table_of_tuning(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"methods.grpo.grid = .*there is no \[tuning\]"):
        study(tmp_path, ("[tuning]\nseeds = [100]\ntrials = 2\n", ""))


def test_an_unknown_study_names_those_that_are_shipped() -> None:
    with pytest.raises(
        UserError,
        match="study nothing: no such file and no shipped study of that name; shipped: adapters, adapters_choices, ",
    ):
        load_study("nothing")


shipped = cache(load_study)
"""To resolve one takes half a second."""


@pytest.mark.parametrize("name", sorted(path.stem for path in (recipes_folder() / STUDIES).glob("*.toml")))
def test_shipped_studies_resolve(name: str) -> None:
    assert shipped(name).folder == Path("runs/studies").absolute() / name


def test_the_demonstrations_study_gives_all_methods_the_same_rollouts() -> None:
    found = shipped("demo_tuned")
    assert set(found.tables.methods) == {"grpo", "b3po", "m3po", "c3po", "c3po_replay"}
    configs = [found.reported(cell, ())[0].config() for cell in found.cells]
    assert len({c.data.prompts_per_step * c.method.rollouts_per_prompt * c.run.steps for c in configs}) == 1
    assert [run.name for run in found.starts()] == ["start"]
    assert to_dict(found.tables)["tuning"]["trials"] == 4


@pytest.mark.parametrize("name", ["chain", "star"])
def test_no_seed_of_a_testbeds_study_has_the_problems_of_its_warm_start(name: str) -> None:
    study = shipped(f"testbed_{name}")
    tuned = [runs[0] for cell in study.tuned() for runs in study.tuning(cell)]
    trained_on = {run.config().data.seed for cell in study.cells for run in (*study.reported(cell, ()), *tuned)}
    for start in (f"testbeds/{name}_school", f"testbeds/{name}_start"):
        assert load(SFTConfig, start).demonstrations.seed not in trained_on


@pytest.mark.parametrize(("name", "methods"), [("testbed_chain", 11), ("testbed_star", 11), ("testbed_plateau", 6)])
def test_studies_of_testbeds_compare_methods_at_equal_rollouts_and_budgets(name: str, methods: int) -> None:
    found = shipped(name)
    assert len(found.cells) == methods
    configs = [run.config() for cell in found.cells for runs in found.tuning(cell) for run in runs]
    assert len(configs) == methods * 4 * 2
    assert {c.data.prompts_per_step * c.method.rollouts_per_prompt * c.run.steps for c in configs} == {256 * 100}
