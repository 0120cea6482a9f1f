"""threepo.train, fine_tune, evaluate and Run: the same as the command line, with objects of Python."""

import functools
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig

import threepo
from chats import ENDLESS
from runs import RLVR, outcome
from threepo.cli import main
from threepo.config import EnvironmentConfig, Method, ModelConfig, TinyConfig, TrainConfig
from threepo.config.recipes import load
from threepo.errors import Interrupted, UserError
from threepo.inputs import SavedInputs
from threepo.library import _method, _new_config
from threepo.models.policy import Policy, load_policy
from threepo.ranks.world import ALONE
from threepo.run_folder import COMPLETIONS, CONFIG, SUMMARY, checkpoints
from threepo.training import completion_log
from threepo.user_code import functions_from_python, own_code

ROWS = [{"prompt": f"{n}: ", "answer": str(n)} for n in range(8)]
HELDOUT = [{"prompt": f"{n}: ", "answer": str(n)} for n in range(10, 13)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]} for n in range(6)
]
SMALL: dict[str, Any] = {
    "data.prompts_per_step": 4,
    "method.rollouts_per_prompt": 4,
    "sampling.max_new_tokens": 4,
    "run.threads": 1,
}


def by_name(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """A reward that can be imported."""
    return [float(bool(text) and ord(text[0]) % 2 == int(a) % 2) for text, a in zip(completions, answer, strict=True)]


def closure() -> Any:
    """The same one, which cannot."""
    return lambda completions, answer, **columns: by_name(completions, answer, **columns)


def trained(model: Any, folder: Path, steps: int = 2, reward: Any = by_name, **more: Any) -> threepo.Run:
    return threepo.train(model, ROWS, reward, "grpo", folder=folder, **(SMALL | {"run.steps": steps} | more))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model directory."""
    shape = TinyConfig(hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1, context=64)
    folder = tmp_path_factory.mktemp("model")
    load_policy(ModelConfig(path="tiny-qwen2", tiny=shape), seed=7).save(folder)
    return str(folder)


def test_no_bars_of_datasets_are_shown(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = datasets.Dataset.from_list([{"prompt": f"{n}= ", "answer": str(n)} for n in range(8)])
    threepo.train(model, rows, by_name, "grpo", folder=tmp_path / "run", **(SMALL | {"run.steps": 1}))
    assert "it/s" not in (said := capfd.readouterr().err)
    assert "examples" not in said
    assert "parquet" not in said


def test_it_is_the_command_line_bit_for_bit(tmp_path: Path) -> None:
    texts = [*RLVR, "run.steps=2", "method.preset=c3po", "eval.every=2"]
    assert main(["train", *texts, f"run.folder={tmp_path / 'shell'}"]) == 0
    settings = {
        "model.tiny": {"hidden_size": 32, "intermediate_size": 64, "layers": 1, "heads": 2, "kv_heads": 1},
        "run": {"steps": 2, "threads": 1},
        "data.levels": (2, 3),
        "data.prompts_per_step": 4,
        "method": {"preset": "c3po", "rollouts_per_prompt": 8},
        "sampling": {"max_new_tokens": 8},
        "eval": {"problems": 4, "samples": 2, "every": 2},
    }
    method = settings.pop("method")
    run = threepo.train("tiny-qwen2", "sorting", method=method, folder=tmp_path / "python", **settings)
    assert outcome(run.folder) == outcome(tmp_path / "shell")
    recorded = {name: threepo.Run(tmp_path / name).config for name in ("shell", "python")}
    for config in recorded.values():
        del config["run"]["folder"]
    assert recorded["shell"] == recorded["python"]


def test_a_warm_start_is_that_of_the_command_line_and_c3po_starts_from_it(
    model: str, policy: Policy, tmp_path: Path
) -> None:
    for part, rows in (("chats", CHATS[2:]), ("held", CHATS[:2])):
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "chat.jinja").write_text(ENDLESS.replace("\\n", "<|endoftext|>"))
    shared = {"batch_size": 2, "chat_template": str(tmp_path / "chat.jinja"), "eval_every": 2}
    texts = [f"conversations.{name}={value}" for name, value in shared.items()]
    texts += [f"conversations.source={tmp_path / 'chats.jsonl'}", f"conversations.eval={tmp_path / 'held.jsonl'}"]
    texts += [f"model.path={model}", "run.steps=4", "run.threads=1", f"run.folder={tmp_path / 'shell'}"]
    seen: list[Mapping[str, Any]] = []

    def stop(row: Mapping[str, Any]) -> bool:
        seen.append(row)
        return row["step"] == 2

    assert main(["sft", *texts]) == 0
    start = threepo.fine_tune(
        AutoModelForCausalLM.from_pretrained(model),
        CHATS[2:],
        heldout=datasets.Dataset.from_list(CHATS[:2]),
        tokenizer=policy.tokenizer,
        folder=tmp_path / "before",
        callbacks=[stop],
        conversations=shared,
        run={"steps": 4, "threads": 1},
    )
    assert start.summary["steps"] == 3
    assert [row["step"] for row in seen if "sft/loss" in row] == [0, 1, 2]
    start.folder.rename(tmp_path / "after")
    start = threepo.fine_tune(resume=tmp_path / "after")
    assert outcome(start.folder) == outcome(tmp_path / "shell")
    with pytest.raises(UserError, match=r"is a run of `threepo sft`, or `threepo.fine_tune`; resume"):
        threepo.train(resume=start)

    prior = {"optimizer.load_hessian": start.folder, "run.steps": 1}
    run = threepo.train(start, ROWS, by_name, threepo.C3PO, folder=tmp_path / "run", **SMALL, **prior)
    assert run.posterior().step == 1
    with pytest.raises(UserError, match=r"is a run of `threepo train`, or `threepo.train`; resume"):
        threepo.fine_tune(resume=run)


@pytest.mark.parametrize("method", [threepo.C3PO, "c3po", {"preset": "c3po"}])
def test_a_method_is_a_value_a_name_or_a_table(method: Any) -> None:
    tables = {"model": {"path": "m"}, "data": {"train": "sorting"}, "run": {"folder": "run"}}
    config = _new_config(TrainConfig, "", {"method": _method(method), **tables}, {})
    assert (config.method, config.optimizer.kind) == (threepo.C3PO, "ivon")


def test_an_optimizer_that_is_asked_for_wins_over_a_methods_own(model: str, tmp_path: Path) -> None:
    """A method made in Python names an optimizer always, also where nobody wrote one."""
    method = Method(rollouts_per_prompt=4, draws=2, gradient_at="generator")
    chosen = {**SMALL, "optimizer": {"kind": "ivon"}, "run": {"steps": 1}}
    run = threepo.train(model, ROWS, by_name, method, folder=tmp_path / "run", **chosen)
    assert run.config["optimizer"]["kind"] == run.config["method"]["optimizer"] == "ivon"


def test_a_method_of_ones_own_replaces_that_of_the_recipe(model: str, tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('[method]\npreset = "c3po"\n[run]\nsteps = 1\nthreads = 1\n')
    own = Method(name="own", rollouts_per_prompt=2)
    settings = {"data.prompts_per_step": 4, "sampling.max_new_tokens": 4, "run.folder": str(tmp_path / "run")}
    run = threepo.train(model, ROWS, by_name, own, recipe=tmp_path / "base.toml", **settings)
    assert (run.config["method"]["name"], run.config["method"]["draws"]) == ("own", 0)
    assert run.config["optimizer"]["kind"] == "adamw"
    with pytest.raises(UserError, match="posterior"):
        run.posterior()
    (tmp_path / "more.toml").write_text('[method]\npreset = "m3po"\ndraws = 8\nrollouts_per_prompt = 32\n')
    tables = {"model": {"path": model}, "data": {"train": "sorting"}, "run": {"folder": str(tmp_path)}}
    known = _new_config(TrainConfig, tmp_path / "more.toml", {"method": _method(threepo.C3PO), **tables}, {})
    assert known.method == threepo.C3PO, "and not the recipe's draws under its name"


def test_objects_are_written_where_a_shell_can_resume_from(policy: Policy, tmp_path: Path) -> None:
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    train, heldout = datasets.Dataset.from_list(ROWS), HELDOUT
    settings = {**SMALL, "eval.every": 1, "eval.problems": 3, "eval.samples": 2, "run.steps": 1}
    run = threepo.train(
        policy.model, train, by_name, tokenizer=policy.tokenizer, heldout=heldout, folder=tmp_path / "run", **settings
    )
    assert all(torch.equal(before[name], p) for name, p in policy.model.named_parameters()), "it is only read"
    assert main(["train", "--resume", str(run.folder), "run.steps=2"]) == 0
    whole = threepo.train(
        policy.model,
        train,
        by_name,
        tokenizer=policy.tokenizer,
        heldout=heldout,
        folder=tmp_path / "whole",
        **settings | {"run.steps": 2},
    )
    assert list(run.metrics["reward/mean"])[1:] == list(whole.metrics["reward/mean"])[1:]
    trained, _ = run.policy()
    assert any(not torch.equal(before[name], p) for name, p in trained.named_parameters())


def test_a_model_object_may_have_a_tokenizer_by_name(policy: Policy, model: str, tmp_path: Path) -> None:
    run = trained(policy.model, tmp_path / "run", 1, tokenizer=model)
    assert run.policy()[1]("1: ")["input_ids"] == policy.tokenizer("1: ")["input_ids"]


def test_a_folder_that_has_moved_is_as_good(policy: Policy, tmp_path: Path) -> None:
    settings = {"tokenizer": policy.tokenizer, "heldout": HELDOUT, "eval.problems": 3, "eval.samples": 2}
    before = trained(policy.model, tmp_path / "before", 1, **settings)
    shutil.copytree(before.folder, tmp_path / "copy")
    before.folder.rename(tmp_path / "after")
    assert main(["train", "--resume", str(tmp_path / "after"), "run.steps=2"]) == 0
    run = threepo.train(resume=tmp_path / "copy", run={"steps": 2})
    assert outcome(run.folder) == outcome(tmp_path / "after")
    assert run.evaluate(folder=tmp_path / "scores")["benchmarks"]["eval"]["problems"] == 3
    for look in (lambda: before.metrics, lambda: before.config):
        with pytest.raises(UserError, match="holds no run"):
            look()


def test_adapters_of_peft_are_trained(policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path / "base")
    base = load_policy(ModelConfig(path=str(tmp_path / "base"))).model
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    settings = SMALL | {
        "run.steps": 1,
        "model.lora.rank": 2,
        "model.lora.targets": ["q_proj"],
        "model.lora.alpha": 8.0,
        "model.lora.init": "usual",
    }
    run = threepo.train(adapted, ROWS, by_name, tokenizer=policy.tokenizer, folder=tmp_path / "run", **settings)
    assert (checkpoints(run.folder)[-1][1] / "adapter_config.json").is_file()
    half = get_peft_model(
        load_policy(ModelConfig(path=str(tmp_path / "base"))).model.half(),
        LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )
    threepo.train(half, ROWS, by_name, tokenizer=policy.tokenizer, folder=tmp_path / "half", **settings)
    with torch.no_grad():
        adapted.get_base_model().model.embed_tokens.weight.mul_(1.1)  # as after merging earlier adapters
    with pytest.raises(UserError, match="its adapters' training.*; a base that was changed in memory has to be saved"):
        threepo.train(adapted, ROWS, by_name, tokenizer=policy.tokenizer, folder=tmp_path / "other", **settings)


def test_a_function_that_no_name_can_import(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(model, tmp_path / "run", 1, reward=closure())
    name = run.config["reward"]["function"]
    assert name == "<python>:closure.<locals>.<lambda>"
    capsys.readouterr()
    assert main(["train", "--resume", str(run.folder), "run.steps=2"]) == 2
    said = capsys.readouterr().err
    assert f"reward.function = {name!r}: is an object of Python that no name can import" in said
    assert said.count("\n") == 1
    with pytest.raises(UserError, match="give it again"):
        threepo.train(resume=run, run={"steps": 2})
    threepo.train(resume=run, reward=closure(), run={"steps": 2})
    assert outcome(run.folder)["tensors"] == outcome(trained(model, tmp_path / "whole").folder)["tensors"]
    with pytest.raises(UserError, match=r"the run's reward is .*by_name"):
        threepo.train(resume=tmp_path / "whole", reward=closure())


def test_functions_of_the_same_name_are_numbered(model: str, tmp_path: Path) -> None:
    def paying(value: float) -> Any:
        return lambda completions, **_: [value] * len(completions)

    half, one = paying(0.5), paying(1.0)
    run = trained(model, tmp_path / "run", 1, reward=[half, one])
    first, second = run.config["reward"]["function"]
    assert (first.rpartition(".")[2], second.rpartition(".")[2]) == ("<lambda>", "<lambda>-2")
    assert list(run.metrics["reward/mean"]) == [1.5]
    threepo.train(resume=run, reward=[half, one], run={"steps": 2})
    assert list(run.metrics["reward/mean"]) == [1.5, 1.5]
    with pytest.raises(UserError, match="names a function twice"):
        trained(model, tmp_path / "twice", 1, reward=[half, half])


def test_an_evaluation_in_a_callback_has_a_function_of_its_own(model: str, tmp_path: Path) -> None:
    def paying(value: float) -> Any:
        return lambda completions, **_: [value] * len(completions)

    def evaluate(row: Mapping[str, Any]) -> None:
        few = {"eval.samples": 2, "sampling.max_new_tokens": 2}
        summary = threepo.evaluate(model, HELDOUT, paying(1.0), folder=tmp_path / f"eval-{row['step']}", **few)
        assert summary["average"]["pass_at"]["1"] == 1

    run = trained(model, tmp_path / "run", 2, reward=paying(0.5), callbacks=[evaluate])
    assert list(run.metrics["reward/mean"]) == [0.5, 0.5]


def test_callbacks_get_each_row_and_can_stop(model: str, tmp_path: Path) -> None:
    rows: list[Mapping[str, Any]] = []
    heldout = {"heldout": HELDOUT, "eval": {"every": 2, "problems": 2, "samples": 2}}
    run = trained(model, tmp_path / "run", 5, callbacks=[rows.append, lambda row: np.equal(row["step"], 2)], **heldout)
    assert [row["step"] for row in rows] == [-1, 0, 1, 1, 2]
    assert [("reward/mean" in row, "eval/pass_at_1" in row) for row in rows[2:4]] == [(True, False), (False, True)]
    assert checkpoints(run.folder)[-1][0] == 3
    assert not (run.folder / SUMMARY).exists()
    assert run.summary["steps"] == 3
    threepo.train(resume=run, callbacks=[rows.append])
    assert [row["step"] for row in rows[5:]] == [3, 3, 4, 4]
    assert (run.folder / SUMMARY).is_file()
    assert outcome(run.folder)["tensors"] == outcome(trained(model, tmp_path / "whole", 5, **heldout).folder)["tensors"]


def test_a_callback_finds_the_completions_of_its_step(model: str, tmp_path: Path, monkeypatch: Any) -> None:
    def late(*args: Any) -> None:
        time.sleep(0.5)
        write(*args)

    def found(row: Mapping[str, Any]) -> None:
        files.append(len(list((tmp_path / "run" / COMPLETIONS).glob("step-*.parquet"))))

    files: list[int] = []
    write = completion_log.write_completions
    monkeypatch.setattr(completion_log, "write_completions", late)
    trained(model, tmp_path / "run", 3, callbacks=[found])
    assert files == [1, 2, 3]


def test_a_callback_that_fails_keeps_what_was_learned(model: str, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        trained(model, tmp_path / "run", 5, callbacks=[lambda row: 1 / (row["step"] - 2)])
    assert checkpoints(tmp_path / "run")[-1][0] == 3


def test_a_run_shows_what_it_holds(model: str, tmp_path: Path) -> None:
    trained(model, tmp_path / "run")
    run = threepo.Run(str(tmp_path / "run"))
    assert list(run.metrics["step"]) == [0, 1]
    completions = run.completions(1)
    assert len(completions) == 16
    assert completions["reward"].mean() == pytest.approx(run.metrics["reward/mean"][1])
    with pytest.raises(UserError, match=r"completions\(7\): .* has those of steps from 0 to 1"):
        run.completions(7)
    assert run.summary["steps"] == 2
    assert [axis.get_title() for axis in run.plot().axes if axis.lines]
    assert run.plot()._repr_png_().startswith(b"\x89PNG"), "as a notebook shows it"  # type: ignore[attr-defined]
    trained_model, tokenizer = run.policy()
    assert trained_model(**tokenizer("1: ", return_tensors="pt")).logits.isfinite().all()
    with pytest.raises(UserError, match="holds no run"):
        threepo.Run(tmp_path)
    with pytest.raises(UserError, match=rf"holds a model and no run; name its run, {re.escape(str(run.folder))}$"):
        threepo.Run(run.folder / "checkpoints" / "step-000002")


def test_evaluation(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = trained(model, tmp_path / "run", 1, reward=closure())
    settings = {"eval.problems": 3, "eval.samples": 2}
    summary = run.evaluate(HELDOUT, closure(), folder="scores", **settings)
    assert summary["benchmarks"]["eval"]["problems"] == 3
    assert json.loads(Path("scores/summary.json").read_text()) == summary
    before = threepo.evaluate(model, HELDOUT, closure(), folder="before", **settings, **{"sampling.max_new_tokens": 4})
    assert before["average"] != {}
    with pytest.raises(UserError, match="folder is missing: objects are written into it"):
        run.evaluate(HELDOUT, closure())
    for data, said in ((HELDOUT, "no name can import"), ([], "has no rows")):
        with pytest.raises(UserError, match=said):
            run.evaluate(data, folder="refused")
        assert not Path("refused").exists()
    with pytest.raises(UserError, match="model.path = '': name a model directory"):
        threepo.evaluate(None, HELDOUT, closure(), folder="refused")
    with pytest.raises(UserError, match="samples = 4: is no argument"):
        run.evaluate(HELDOUT, closure(), folder="refused", samples=4)
    with pytest.raises(UserError, match="holds a run already"):
        run.evaluate(HELDOUT, closure(), folder=run.folder)
    given = Path("scores/inputs/eval.jsonl").read_bytes()
    with pytest.raises(UserError, match="holds an evaluation with another eval; choose another folder"):
        run.evaluate(HELDOUT[:-1], closure(), folder="scores", **settings)
    assert Path("scores/inputs/eval.jsonl").read_bytes() == given
    assert run.evaluate(HELDOUT, closure(), folder="scores", **settings) == summary


def test_an_evaluation_notices_another_function_of_the_same_name(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps(row) + "\n" for row in HELDOUT))
    settings = {"eval.problems": 2, "sampling.max_new_tokens": 2}

    def paying(value: float) -> Any:
        return lambda completions: [value for _ in completions]

    def score(reward: Any) -> float:
        return float(
            threepo.evaluate(model, HELDOUT, reward, folder=tmp_path / "scores", **settings)["average"]["pass_at"]["1"]
        )

    assert score(paying(1.0)) == score(paying(1.0)) == 1.0, "the same is only read"
    with pytest.raises(UserError, match="of other code of .*, which changed since it began.*; choose another folder"):
        score(paying(0.0))
    monkeypatch.chdir(tmp_path)
    found = [
        threepo.evaluate(model, str(held), paying(pay), **settings)["average"]["pass_at"]["1"]
        for pay in (1.0, 0.0, 1.0)
    ]
    assert found == [1.0, 0.0, 1.0], "where no folder is named, each has its own"
    assert len(list(Path("runs").iterdir())) == 2


def code_digest(function: Any) -> str:
    """What an evaluation records of a reward that is an object of Python."""
    config = load(TrainConfig, "", ["data.train=sorting", "model.path=m", "reward.function=<python>:reward"])
    with functions_from_python({"<python>:reward": function}):
        return own_code(config)["code of <python>:reward"]


class Judge:
    """A reward as an object, which remembers."""

    def __init__(self, pay: float) -> None:
        self.pay, self.seen, self.calls = pay, list[str](), 0

    def __call__(self, completions: list[str]) -> list[float]:
        self.seen.extend(completions)
        self.calls += 1
        return [self.pay for _ in completions]

    def less(self, completions: list[str]) -> list[float]:
        return [self.pay - 1 for _ in completions]


def test_rewards_are_told_apart_by_what_they_do() -> None:
    def reward(completions: list[str], pay: float = 1.0) -> list[float]:
        return [pay for _ in completions]

    def paying(value: float) -> Any:
        return lambda completions: [value for _ in completions]

    def decorated(inner: Any) -> Any:
        return lambda *arguments: inner(*arguments)

    different = [
        reward,
        functools.partial(reward, pay=0.0),
        functools.partial(reward, pay=2.0),
        *(lambda completions, pay=pay: [pay for _ in completions] for pay in (3.0, 4.0)),
        paying(1.0),
        paying(2.0),
        decorated(lambda completions: [1.0 for _ in completions]),
        decorated(lambda completions: [2.0 for _ in completions]),
        Judge(1.0),
        Judge(2.0),
        Judge(1.0).less,
        np.add,
    ]
    assert len({code_digest(function) for function in different}) == len(different)


def test_a_reward_that_counts_is_the_same_after_it_was_called() -> None:
    def counting() -> Any:
        calls = 0

        def reward(completions: list[str]) -> list[float]:
            nonlocal calls
            calls += 1
            return [1.0 for _ in completions]

        return reward

    for made in (counting, functools.partial(Judge, 1.0)):
        reward = made()
        reward(["a", "b"])
        assert code_digest(reward) == code_digest(made())


def test_variables_of_a_cell_of_a_notebook_count() -> None:
    """A cell need not have a source, and may run again on other lines."""

    def made(pay: float = 1.0, helper: str = "len(c)", above: str = "") -> str:
        cell: dict[str, Any] = {"__name__": "__main__", "PAY": pay}
        source = f"{above}def paid(c): return {helper}\n"
        source += "def reward(completions): return [PAY * paid(c) * (c in {'a', 'b'}) for c in completions]"
        exec(source, cell)
        return code_digest(cell["reward"])

    assert made() == made(above="import re\n\n")
    assert len({made(), made(pay=2.0), made(helper="1 + len(c)")}) == 3


def test_code_that_a_plug_in_plays_is_named_too() -> None:
    theirs = {"factory": "worlds:Counter", "step": 2, "action": "go: left"}
    config = EnvironmentConfig(factory="threepo.plugins.trl_environment:TRLEnvironment", settings=theirs)
    assert config.own_names == (["worlds:Counter"], "environment.settings")
    assert EnvironmentConfig(factory="worlds:Echo", settings=theirs).own_names == (
        ["worlds:Echo"],
        "environment.factory",
    )
    gem = EnvironmentConfig(factory="threepo.plugins.gem:Gem", settings={"factory": "x:y"})
    assert gem.own_names == ([], "environment.settings")


def test_threads_of_a_run_are_those_of_its_own(model: str, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen: list[int] = []

        def watch(row: Mapping[str, Any]) -> None:
            seen.append(torch.get_num_threads())

        run = trained(model, tmp_path / "run", 1, reward=closure(), callbacks=[watch], **{"run.threads": 2})
        run.evaluate(HELDOUT, closure(), folder=tmp_path / "scores", **{"eval.problems": 2, "run.threads": 1})
        assert (set(seen), torch.get_num_threads()) == ({2}, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"folder": ""}, "folder is missing: objects are written into it"),
        ({"folder": "", "data": "sorting"}, "folder is missing: name the folder of the run"),
        ({"reward": "<python>:f"}, "is an object of Python that no name can import; give it again"),
        ({"model": None}, "model is missing: give it as an argument, or name a recipe"),
        ({"data": None}, "data is missing: give it as an argument"),
        ({"data": []}, "data.train = list: has no rows"),
        ({"heldout": datasets.Dataset.from_list([])}, "data.eval = Dataset: has no rows"),
        ({"data": 3}, "data.train = int: must be a name, rows as dictionaries, or a Dataset"),
        ({"data": [{"prompt": object()}]}, "data.train: a row cannot be written as JSON"),
        ({"reward": 3}, "reward = 3: must be a name"),
        ({"method": "c2po"}, "method.preset = 'c2po': did you mean c3po"),
        ({"optimizer": {"lrr": 1.0}}, "optimizer.lrr; did you mean optimizer.lr"),
        ({"optimiser": {"lr": 1.0}}, "optimiser; did you mean optimizer"),
        ({"fodler": "run", "folder": ""}, "fodler = 'run': is no argument, nor a table of settings such as run="),
        ({"optimizer.lr": -1}, "optimizer.lr = -1: must be greater than 0"),
        ({"model": "no/such/model"}, "model.path = .*: no such folder"),
        ({"reward": lambda words: words}, "needs the argument 'words'"),
        ({"model": torch.nn.Linear(1, 1)}, "model = Linear: must be a directory, a hub id or an object"),
        ({"tokenizer": 3}, "tokenizer = int: must be a directory, a hub id or an object"),
        ({"method": 3}, "method = 3: must be a Method"),
        ({"data": [{"prompt": "\ud800"}]}, "data.train: a row cannot be written as JSON: .*surrogates"),
        ({"callbacks": print}, "callbacks = <built-in function print>: must be a list of functions"),
        ({"callbacks": [3]}, r"callbacks = \[3\]: must be a list of functions"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    arguments: dict[str, Any], said: str, model: str, tmp_path: Path
) -> None:
    given = {"model": model, "data": ROWS, "reward": by_name, "folder": tmp_path / "run", **SMALL}
    with pytest.raises(UserError, match=said) as error:
        threepo.train(**given | arguments)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"data": None}, "data is missing: give it as an argument"),
        ({"data": []}, "conversations.source = list: has no rows"),
        ({"heldout": 3}, "conversations.eval = int: must be a name"),
        ({"model": None}, "model is missing"),
        ({"folder": ""}, "folder is missing: objects are written into it"),
        ({"demonstrations": {"tasks": ["sorting"]}}, "both given; set one of the two"),
        ({"method": "c3po"}, "method = 'c3po': is no argument"),
        ({}, "the tokenizer has no chat template; set model.tokenizer to one that has"),
    ],
)
def test_mistakes_of_a_warm_start_are_one_line(
    arguments: dict[str, Any], said: str, model: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said) as error:
        threepo.fine_tune(**{"model": model, "data": CHATS, "folder": tmp_path / "run"} | arguments)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_demonstrations_of_a_task_need_no_data(tmp_path: Path) -> None:
    settings = {"demonstrations": {"tasks": ["sorting"], "batch_size": 2}, "run.steps": 1}
    assert threepo.fine_tune("tiny-qwen2", folder=tmp_path / "run", **settings).summary["steps"] == 1


def test_a_run_that_is_there_is_not_written_over(model: str, policy: Policy, tmp_path: Path) -> None:
    run = trained(model, tmp_path / "run", 1)
    kept = (run.folder / "inputs" / "train.jsonl").read_bytes()
    with pytest.raises(UserError, match="holds"):
        threepo.train(policy.model, ROWS[:2], by_name, tokenizer=policy.tokenizer, folder=run.folder, **SMALL)
    assert (run.folder / "inputs" / "train.jsonl").read_bytes() == kept
    assert (run.folder / CONFIG).is_file()
    with pytest.raises(UserError, match="tokenizer is missing"):
        threepo.train(policy.model, ROWS, by_name, folder=tmp_path / "other")
    with pytest.raises(UserError, match="resume takes callbacks, run="):
        threepo.train(model, resume=run)


def test_settings_of_generation_that_cannot_be_saved_are_kept(policy: Policy, tmp_path: Path) -> None:
    """As Qwen2.5-Instruct's, once sampling is switched off."""
    settings = policy.model.generation_config = GenerationConfig(do_sample=False, temperature=0.6, top_p=0.9)
    inputs = SavedInputs(tmp_path / "run")
    inputs.tables(policy.model, policy.tokenizer, "data", {})
    with inputs.written(ALONE):
        found = json.loads((tmp_path / "run" / "inputs" / "model" / "generation_config.json").read_text())
    assert found["temperature"] == 0.6
    assert policy.model.generation_config is settings


def test_a_folder_of_inputs_that_is_there_stays(model: str, tmp_path: Path) -> None:
    mine = tmp_path / "run" / "inputs"
    mine.mkdir(parents=True)
    (mine / "train.jsonl").write_text("mine")
    with pytest.raises(UserError, match="has a folder inputs already; choose another folder, or delete that one if a"):
        trained(model, tmp_path / "run")
    assert (mine / "train.jsonl").read_text() == "mine"


def test_inputs_go_with_a_run_that_did_not_begin(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for error in (UserError("mistake"), OSError("failure"), KeyboardInterrupt()):
        inputs = SavedInputs(folder)
        inputs.tables(model, None, "data", {"train": ROWS})
        with pytest.raises(type(error)), inputs.written(ALONE):
            assert (folder / "inputs" / "train.jsonl").is_file()
            raise error
        assert not folder.exists()


def test_a_resume_that_failed_can_be_corrected_at_once(model: str, tmp_path: Path) -> None:
    """A notebook keeps the error, and with it what the call had open."""

    def local(completions: Sequence[str], **_: Any) -> list[float]:
        return [0.0 for _ in completions]

    run = trained(model, tmp_path / "run", 1, local)
    with pytest.raises(UserError, match="give it again, as threepo.train") as error:
        threepo.train(resume=run, run={"steps": 9})
    assert json.loads((run.folder / CONFIG).read_text())["run"]["steps"] == 1, "what is refused changes nothing"
    assert run.summary["steps"] == 1
    assert threepo.train(resume=run, reward=local, run={"steps": 2}).summary["steps"] == 2
    assert error


def test_several_rewards_have_weights_and_a_curve_each(model: str, tmp_path: Path) -> None:
    def brief(completions: Sequence[str], **_: Any) -> list[float | None]:
        return [len(text) / 4 if index % 2 else None for index, text in enumerate(completions)]

    weights = {"reward.weights": (1.0, 0.5)}
    run = trained(model, tmp_path / "run", 1, [by_name, brief], **weights)
    name = f"<python>.{brief.__qualname__}"
    row = run.metrics.iloc[0]
    first, second = row["reward/function/test_python_api.by_name"], row[f"reward/function/{name}"]
    assert row["reward/mean"] == pytest.approx(first + 0.5 * second / 2), "the second judges every other completion"
    resumed = threepo.train(resume=run, reward=[by_name, brief], run={"steps": 2})
    assert len(resumed.metrics) == 2


def test_an_environment_is_given_as_its_class(tmp_path: Path) -> None:
    from worlds import Echo

    class Local(Echo):
        """In no module."""

    Local.__module__ = "__main__"
    with pytest.raises(UserError, match=r"environment.factory = .*Local.: is not in a module"):
        threepo.train("tiny-qwen2", "sorting", "environment", environment={"factory": Local}, folder=tmp_path / "no")
    run = threepo.train(
        "tiny-qwen2",
        "sorting",
        "environment",
        environment={"factory": Echo},
        folder=tmp_path / "run",
        run={"steps": 1},
        method={"rollouts_per_prompt": 4, "preset": "grpo"},
        **{"data.prompts_per_step": 2, "sampling.max_new_tokens": 60, "model.tiny.layers": 1},
    )
    assert run.config["environment"]["factory"] == "worlds:Echo"
    assert run.metrics["episodes/turns_mean"][0] >= 1


def test_ctrl_c_saves_the_state_and_is_raised(model: str, tmp_path: Path) -> None:
    def press(row: Mapping[str, Any]) -> None:
        if row["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="SIGINT after step 2 of 5"):
        trained(model, tmp_path / "run", 5, callbacks=[press])
    assert checkpoints(tmp_path / "run")[-1][0] == 2
