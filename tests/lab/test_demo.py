"""The demonstration: stages side by side, failing, resumed; and what it says about their numbers."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from runs import TINY
from threepo import api
from threepo.config import TrainConfig
from threepo.config.recipes import load
from threepo.errors import UserError
from threepo.lab.demo import FIRST_ACT, demonstrate, discovery, tie
from threepo.lab.report import RunReport
from threepo.run_folder import metrics_digest

SMALL = ["run.steps=2", "eval.every=1", "eval.problems=4", "eval.samples=2", "data.prompts_per_step=2"]
WARM = [*TINY, "run.steps=2", "demonstrations.batch_size=4"]


def test_the_demonstration_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = tmp_path / "demo"
    (demo / "c3po").mkdir(parents=True)
    (demo / "c3po" / "config.json").write_text("{")
    with pytest.raises(UserError, match="first act: c3po failed; the logs named above say why"):
        demonstrate(demo, Console(width=120), SMALL, WARM)
    assert "config.json: not valid JSON" in (error := capsys.readouterr().err), error
    assert f"; its log is {demo / 'c3po.log'}\n" in error
    finished = {stage: metrics_time(demo / stage) for stage in ("warm_start", "choices/warm_start", *FIRST_ACT[:-1])}
    (demo / "c3po" / "config.json").unlink()

    summary = demonstrate(demo, Console(width=120), SMALL, WARM)
    assert {stage: metrics_time(demo / stage) for stage in finished} == finished, "a finished stage is left alone"
    second = summary["second_act"]
    assert tuple(summary["methods"]) == FIRST_ACT == ("grpo", "b3po", "m3po", "c3po")
    assert tuple(second["methods"]) == ("grpo", "entreg", "auto")
    written = json.loads((demo / "summary.json").read_text())
    assert written == summary
    for act in (written, second):
        for method in act["methods"].values():
            assert {"pass_at_1_after", "se_after", "zero_advantage_share", "seconds_per_step"} <= method.keys()
            assert method["rollouts"] == 2 * 2 * 16
        assert len({m["pass_at_1_before"] for m in act["methods"].values()}) == 1, "the same warm start"
    out, err = capsys.readouterr()
    said = " ".join(out.split())
    assert "pass@1 after" in said
    for words in (summary["conclusion"], second["probe"]["verdict"], second["conclusion"]):
        assert " ".join(words.split()) in said
    assert second["conclusion"].startswith("Second act (choices, levels 10): of 64 rollouts each, GRPO finds nothing")
    for name in ("first_act", "second_act"):
        assert f"report: file://{demo}/{name}/index.html\n" in out
        assert (demo / name / "index.html").is_file()
        assert (demo / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert f"{demo / 'choices/auto'}: 2 steps in " in err

    for name, start in (("c3po", "warm_start"), ("choices/auto", "choices/warm_start")):
        alone = [f"model.path={demo / start}", f"run.folder={tmp_path / name}", "run.threads=1"]
        api.train(load(TrainConfig, f"demo/{name}", [*SMALL, *alone]))
        assert metrics_digest(demo / name) == metrics_digest(tmp_path / name), "not what it is when it is run alone"


def metrics_time(run: Path) -> int:
    """When a run's metrics were written last."""
    return (run / "metrics.jsonl").stat().st_mtime_ns


def report(name: str, *rewards: float, before: float = 0.0, **more: float) -> RunReport:
    """A run with these rewards, of which the last is its pass@1, too."""
    config = {
        "method": {"rollouts_per_prompt": 16},
        "data": {"prompts_per_step": 16, "train": "choices", "levels": [10]},
    }
    steps = [{"step": i, "reward/mean": reward, "time/step": 1.0} | more for i, reward in enumerate(rewards)]
    measured = {"groups/zero_advantage_share": 0.0, "eval/pass_at_1": rewards[-1]}
    rows = [{"step": -1, "eval/pass_at_1": before}, *(step | measured for step in steps)]
    return RunReport(Path(name), name, config, rows)


def test_methods_tie_if_their_ends_are_near() -> None:
    ends = {"grpo": 0.813, "b3po": 0.809, "m3po": 0.75, "c3po": 0.819}
    runs = [report(name, end, before=0.26) for name, end in ends.items()]
    assert tie(runs) == (
        "an easy task. All methods begin with 26.0 % of the held-out problems right and end with 75.0 to 81.9 %, so "
        "they tie. Over ten seeds, none was better than GRPO: docs/studies.md."
    )
    assert "end with 70.0 to 81.9 %, so here they do not tie. Over" in tie([*runs, report("late", 0.7)])


def test_the_discovery_is_made_of_the_numbers() -> None:
    norm = {"arms/share/mean": 0.125, "arms/share/norm 0.2": 0.875}
    runs = [report("grpo", 0.0, 0.0), report("entreg", 0.0, 0.5), report("auto", 3 / 256, 0.75, **norm)]
    assert discovery(runs) == (
        "of 512 rollouts each, GRPO finds nothing (0 right, pass@1 0.0 %), an entropy bonus (entreg) finds something "
        "(128 right, pass@1 50.0 %), noise that finds its own place and size (auto) learns the task (195 right, pass@1 "
        "75.0 %). Arms of auto: norm 0.2 led from step 0. The task was made for noise; how both ways to "
        "explore fare as it gets harder: docs/consistent_choice.md."
    )
