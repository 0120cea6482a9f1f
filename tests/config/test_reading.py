"""Recipes are read strictly, and refusals help."""

import json
from dataclasses import fields, replace
from pathlib import Path
from pkgutil import resolve_name
from types import FunctionType

import numpy as np
import pytest
import torch

import threepo
from threepo.config import (
    TRACKERS,
    AdamWConfig,
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    IVONConfig,
    Method,
    ModelConfig,
    RunConfig,
    SFTConfig,
    TrainConfig,
)
from threepo.config.method import C3PO, CREDIT_RULES
from threepo.config.objective import CISPOConfig, KLCovConfig, PPOConfig
from threepo.config.presets import PRESETS
from threepo.config.recipes import (
    can_change,
    find_recipe,
    load,
    load_evaluation,
    merge,
    parse_overrides,
    read_toml,
    shipped_recipes,
)
from threepo.config.records import RECORDS, build, to_dict
from threepo.config.reward import SANDBOXES
from threepo.errors import UserError
from threepo.methods.credit import Rule
from threepo.objectives.token_losses import TokenLoss

BASE = ["model.path=m", "data.train=sorting"]
SERVERS = ["engine.kind=vllm", "engine.vllm.servers=['http://a:1']", "engine.vllm.weights_folder=/x"]


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_is_valid(name: str) -> None:
    table = read_toml(find_recipe(name))
    config = load(TrainConfig if "method" in table else SFTConfig, name)
    assert config.run.folder == f"runs/{name}", "recipes of one name do not share a folder"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_fill_the_method_and_choose_the_optimizer(preset: str) -> None:
    config = load(TrainConfig, "", [*BASE, f"method.preset={preset}"])
    assert config.method == PRESETS[preset].method
    assert config.optimizer.kind == config.method.optimizer


@pytest.mark.parametrize("said", [["method.optimizer=sgd"], ["optimizer.kind=sgd"]])
def test_method_and_optimizer_name_the_same(said: list[str]) -> None:
    config = load(TrainConfig, "", [*BASE, *said])
    assert (config.method.optimizer, config.optimizer.kind) == ("sgd", "sgd")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("", "method.optimizer = 'ivon': optimizer.kind = 'adamw' says otherwise; set both alike, or only one of them"),
        (
            "demo/grpo",
            "method.optimizer = 'ivon': method.preset = 'grpo' is trained by adamw; set optimizer.kind = ",
        ),
    ],
)
def test_a_recipe_that_names_two_optimizers_is_refused(recipe: str, message: str) -> None:
    noise = ["method.draws=4", "noise.unit=rms", "noise.size=0.05"]
    with pytest.raises(UserError, match=message):
        load(TrainConfig, recipe, [*BASE, *noise, "method.optimizer=ivon", "optimizer.kind=adamw"])
    with pytest.raises(UserError, match="method.optimizer = 'adamw': optimizer.kind = 'ivon' says otherwise"):
        TrainConfig(model=ModelConfig(path="m"), data=DataConfig(train="sorting"), optimizer=IVONConfig())


def test_a_preset_is_not_trained_by_another_optimizer_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    with pytest.raises(UserError, match="optimizer.kind = 'ivon': method.preset = 'grpo' is trained by adamw"):
        load(TrainConfig, str(path), ["method.preset=grpo"])
    settings = ["method.preset=grpo", "optimizer.kind=adamw", "method.correction.kind=none"]
    assert load(TrainConfig, str(path), settings).optimizer == AdamWConfig()


def test_records_made_in_python_are_checked_too() -> None:
    with pytest.raises(UserError, match=r"optimizer.lr = -1: must be greater than 0"):
        IVONConfig(lr=-1)
    with pytest.raises(UserError, match="method.draws = 3: must divide method.rollouts_per_prompt = 16"):
        replace(C3PO, draws=3)
    with pytest.raises(UserError, match="unknown key method.drwas; did you mean method.draws"):
        Method(drwas=2)  # type: ignore[call-arg]


def test_axes_can_be_changed_on_top_of_a_preset() -> None:
    config = load(TrainConfig, "", [*BASE, "method.preset=c3po", "method.draws=2", "method.correction.weight=one"])
    assert (config.method.draws, config.method.gradient_at) == (2, "fresh")
    assert (config.method.correction.kind, config.method.correction.weight) == ("seq_mis", "one")


def test_another_loss_than_the_presets_leaves_out_the_keys_that_it_lacks() -> None:
    """They are not the user's, so nobody could remove them."""
    config = load(TrainConfig, "", [*BASE, "method.preset=clip_higher", "objective.loss=kl_cov"])
    assert config.objective == KLCovConfig(mini_batches=4)
    config = load(TrainConfig, "", [*BASE, "method.preset=clip_higher", "objective.loss=cispo"])
    assert config.objective == CISPOConfig(mini_batches=4)


def test_a_resolved_configuration_survives_json() -> None:
    config = load(TrainConfig, "", [*BASE, "method.preset=m3po", "optimizer.ess=1e10", "data.levels=[2, 3]"])
    assert build(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_overrides_are_toml_values_or_text() -> None:
    given = ["run.steps=3", "optimizer.ess = 1e9", "model.gradient_checkpointing=true", "model.path=../a=b"]
    given += ["a.b.c=x", "a.b.d=[1]"]
    assert parse_overrides(given) == {
        "run": {"steps": 3},
        "optimizer": {"ess": 1e9},
        "model": {"path": "../a=b", "gradient_checkpointing": True},
        "a": {"b": {"c": "x", "d": [1]}},
    }
    assert parse_overrides(['model.path="3"', "model.path=4"]) == {"model": {"path": 4}}, "the last counts"
    kinds = ["optimizer.kind=adamw", "optimizer.lr=1", "optimizer.kind=ivon"]
    assert parse_overrides(kinds) == {"optimizer": {"kind": "ivon", "lr": 1}}
    tables = ["model.tiny.layers=2", "model.tiny={heads=4}"]
    assert parse_overrides(tables) == {"model": {"tiny": {"heads": 4}}}, "a table replaces"


def test_recipes_extend_each_other(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('[run]\nsteps = 5\nseed = 1\n[optimizer]\nkind = "ivon"\ness = 1e8\n')
    (tmp_path / "child.toml").write_text('extends = "base.toml"\n[run]\nsteps = 6\n')
    assert read_toml(tmp_path / "child.toml") == {
        "run": {"steps": 6, "seed": 1},
        "optimizer": {"kind": "ivon", "ess": 1e8},
    }
    (tmp_path / "loop.toml").write_text('extends = "loop.toml"\n')
    with pytest.raises(UserError, match="extends itself"):
        read_toml(tmp_path / "loop.toml")


def test_another_kind_replaces_the_table_below() -> None:
    ivon = {"kind": "ivon", "ess": 1e8}
    assert merge({"optimizer": ivon}, {"optimizer": {"kind": "adamw", "lr": 1e-5}}) == {
        "optimizer": {"kind": "adamw", "lr": 1e-5}
    }
    assert merge({"optimizer": ivon}, {"optimizer": {"lr": 2}}) == {"optimizer": {**ivon, "lr": 2}}


def test_a_table_of_other_commands_is_named_as_one() -> None:
    with pytest.raises(UserError, match=r"^\[arms\]: is a table of other commands; remove it"):
        load(EvaluationConfig, "", [*BASE, "arms.choice=none"])


@pytest.mark.parametrize("line", ['"run.steps" = 2', '"optimizer.lr" = 1', '["engine.vllm"]', '["reward.sandbox"]'])
def test_a_quoted_key_with_a_point_is_told_apart(line: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'model.path = "m"\ndata.train = "sorting"\n{line}\n')
    with pytest.raises(UserError, match=f"'{line.split(chr(34))[1]}': is a quoted name with points, and no key"):
        load(TrainConfig, str(recipe))


def test_an_optimizer_without_kind_is_the_fields_default() -> None:
    overrides = ["model.path=m", 'demonstrations.tasks=["sorting"]', "optimizer.ess=3"]
    assert load(SFTConfig, "", overrides).optimizer == IVONConfig(ess=3.0)
    assert load(SFTConfig, "", overrides[:2]).optimizer == SFTConfig.__dataclass_fields__["optimizer"].default_factory()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.drwas=2", "unknown key method.drwas; did you mean method.draws?"),
        ("metod.draws=2", "unknown table metod; did you mean method?"),
        ("xyz.abc=2", "unknown table xyz; known here: arms, batching, benchmarks"),
        ("run.steps=many", "run.steps = 'many': must be a valid integer"),
        ("run.steps=2.5", "run.steps = 2.5: must be a valid integer"),
        ("run.steps=true", "run.steps = true: must be a valid integer"),
        ("run.steps=0", "run.steps = 0: must be greater than 0"),
        ("model.gradient_checkpointing=1", "model.gradient_checkpointing = 1: must be a valid boolean"),
        ('run.trackers=["tensorbord"]', "'tensorbord': must be 'tensorboard', 'wandb'"),
        ("model.path=3", "model.path = 3: must be a valid string"),
        ("method.correction=3", "method.correction = 3: is a table"),
        ("method.correction.kind=seqmis", "method.correction.kind = 'seqmis': must be 'none', 'token_tis'"),
        ("method.advantage.rule=[1]", r"method.advantage.rule = \[1\]: must be 'grpo', 'dr_grpo'"),
        ("method.preset=c2po", "method.preset = 'c2po': did you mean c3po"),
        ("optimizer.kind=adam", "optimizer.kind = 'adam': must be one of 'adamw', 'ivon', 'sgd'"),
        ("optimizer.betas=[0.9]", "optimizer.betas = .0.9.: has too few values"),
        ("optimizer.betas=[0.9, 1.0]", r"optimizer.betas = \[0.9, 1.0\]: both must lie in \[0, 1\)"),
        ("data.levels=3", "data.levels = 3: must be a list"),
        ("data.levels=[a]", "data.levels = '.a.': must be a list"),
        ("data.prompt_template=hello", "must contain {prompt}"),
        ("optimizer.kind=adamw", "method.preset = 'c3po' is trained by ivon"),
        (
            "optimizer.max_grad_norm=1",
            "optimizer.max_grad_norm: is for optimizer.kind = 'adamw' or 'sgd', and here",
        ),
        ("sampling.temperature=0", "method.preset = 'thompson'"),
        ("sampling.top_p=0.9", "importance ratios are wrong"),
        ("sampling.top_p=0", "sampling.top_p = 0: must be greater than 0"),
        ("sampling.raised_temperature=1", "must exceed sampling.temperature = 1.0, and"),
        ("sampling.dynamic_rounds=1", "one round replaces nothing; set 2 or more, or set sampling.prompts_per_round"),
        ("sampling.prompts_per_round=64", "is read by dynamic sampling only; set sampling.dynamic_rounds = 10"),
        ("objective.mini_batches=33", "must not exceed data.prompts_per_step = 32"),
        ("objective.dual_clip=0.5", "must be 0 .off. or above 1"),
        ("eval.draws=3", "must divide eval.samples = 8"),
        ("optimizer.load_momentum=true", "name the folder to load from"),
        ("model.tiny.heads=3", "multiple of 2 . model.tiny.heads = 6"),
        ("method.preset=[1]", r"method.preset = \[1\]: must be one of grpo"),
        ("optimizer.kind=[1]", r"optimizer.kind = \[1\]: must be one of 'adamw', 'ivon'"),
        ("run.seed=9223372036854775808", "run.seed = 9223372036854775808: must be less than 9223372036854775808"),
        ("reward.function=[]", r"reward.function = \[\]: name one or more"),
        ("reward.function=3", "reward.function = 3: must be a valid string"),
        ('reward.function=["math", "math"]', "names a function twice"),
        ("reward.weights=[1.0]", r"reward.weights = \[1.0\]: must have one number for each function in a list"),
        ("reward.timeout_s=1e300", "reward.timeout_s = 1e[+]300: must be less than or equal to 1000000"),
        ("optimizer.ess=inf", "optimizer.ess = inf: must be a finite number"),
        ("optimizer.clip_radius=nan", "optimizer.clip_radius = nan: must be greater than 0"),
        ("ess_schedule.lowest=2", "ess_schedule.lowest: is for ess_schedule.kind = 'entropy_ratio' or 'controller' or"),
        ("objective.kl_cov_share=2", "objective.kl_cov_share: is for objective.loss = 'kl_cov', and here it is 'ppo'"),
        ("ess_schedule.kind=wavy", "ess_schedule.kind = 'wavy': must be one of 'constant', 'cosine'"),
        ("nonsense", "write section.key=value"),
        ("run=3", "write section.key=value"),
    ],
)
def test_mistakes_are_refused_with_field_value_and_fix(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(TrainConfig, "", [*BASE, "method.preset=c3po", override])
    assert "\n" not in str(caught.value)


def test_a_step_size_gives_ivons_learning_rate() -> None:
    """The demonstration's rate of 60 moves a weight by 6e-5; with a tenfold hess_init a tenth of the rate does."""
    settings = [*BASE, "method.preset=c3po", "optimizer.weight_decay=0", "optimizer.step_size=6e-5"]
    assert load(TrainConfig, "", settings).optimizer.rate == pytest.approx(60.0)
    assert load(TrainConfig, "", [*settings, "optimizer.hess_init=1e-2"]).optimizer.rate == pytest.approx(6.0)
    assert load(TrainConfig, "", [*settings, "optimizer.rescale_lr=false"]).optimizer.rate == pytest.approx(0.06)
    assert load(TrainConfig, "", [*BASE, "method.preset=c3po", "optimizer.lr=60"]).optimizer.rate == 60.0
    with pytest.raises(UserError, match="optimizer.lr = 1.0: optimizer.step_size = 6e-05 sets the learning rate, too"):
        load(TrainConfig, "", [*settings, "optimizer.lr=1.0"])  # also where it is the default
    with pytest.raises(UserError, match="optimizer.step_size = 6e-05: nothing limits a step with clip_radius = inf"):
        load(TrainConfig, "", [*settings, "optimizer.clip_radius=inf"])


@pytest.mark.parametrize("key", ["warmup_share", "floor"])
def test_a_warm_start_keeps_its_schedule_where_one_key_is_set(key: str) -> None:
    schedule = load(SFTConfig, "testbeds/chain_start", [f"schedule.{key}=0.2"]).schedule
    assert schedule == replace(SFTConfig.__dataclass_fields__["schedule"].default_factory(), **{key: 0.2})


def test_a_resumed_run_may_run_elsewhere_and_nothing_else() -> None:
    here = {"parallel": {"offload": True}, "engine": {"vllm": {"gpu_memory_utilization": 0.5, "gpus": [1]}}}
    assert can_change({**here, "run": {"steps": 9}, "batching": {"tokens": 512}})
    # What an error tells to raise can be raised where the run goes on.
    limits = {"timeout_s": 3600, "kv_cache_memory_bytes": 1 << 30, "check_tolerance": 0.2, "adapters": 0}
    assert can_change({"engine": {"vllm": limits}, "environment": {"max_failed_share": 1.0}})
    assert can_change({"model": {"device": "auto"}, "reward": {"sandbox": {"url": "http://here:8080"}}})
    for override in ("run.seed=1", "engine.dtype=bfloat16", "engine.vllm.enforce_eager=true"):
        assert not can_change(merge(here, parse_overrides([override])))


def test_arguments_of_an_environment_can_be_recorded() -> None:
    with pytest.raises(UserError, match=r"environment.settings = .*: no number may be infinite or NaN"):
        EnvironmentConfig(factory="a:B", settings={"limits": [1, float("inf")]})


def test_an_episode_must_hold_the_replies_of_an_evaluation() -> None:
    episodes = ["environment.factory=a:B", "environment.max_tokens=64", "sampling.max_new_tokens=8"]
    message = "environment.max_tokens = 64: must hold a reply of eval.max_new_tokens = 65"
    with pytest.raises(UserError, match=message):
        load(TrainConfig, "", [*BASE, *episodes, "eval.max_new_tokens=65"])
    with pytest.raises(UserError, match=message):
        load_evaluation("m", "", ["data.train=sorting", *episodes, "eval.max_new_tokens=65"])


def test_another_kind_is_seen_where_a_recipe_leaves_it_to_its_preset_or_default(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        '[model]\npath = "tiny-qwen2"\n[data]\ntrain = "sorting"\n[method]\npreset = "c3po"\n'
        "[optimizer]\nlr = 60\ness = 1e8\n[objective]\nclip_high = 0.28\n"
    )
    config = load(
        TrainConfig,
        str(recipe),
        ["method.preset=grpo", "optimizer.kind=adamw", "objective.loss=cispo", "objective.mini_batches=2"],
    )
    assert (config.optimizer.lr, config.objective.clip_high) == (
        AdamWConfig().lr,
        CISPOConfig(mini_batches=2).clip_high,
    )
    kept = load(TrainConfig, str(recipe), ["optimizer.kind=ivon", "objective.loss=ppo"])
    assert (kept.optimizer.lr, kept.optimizer.ess, kept.objective.clip_high) == (60, 1e8, 0.28)
    recipe.write_text(
        '[model]\npath = "tiny-qwen2"\n[data]\ntrain = "sorting"\n[method]\npreset = "cispo"\n'
        "[objective]\nclip_high = 3.0\n"
    )
    assert load(TrainConfig, str(recipe), ["objective.loss=cispo"]).objective.clip_high == 3.0
    assert load(TrainConfig, str(recipe), ["objective.loss=ppo"]).objective.clip_high == PPOConfig().clip_high
    recipe.write_text('[data]\ntrain = "sorting"\n[engine]\nmemory_gib = 4.0\n')
    assert load_evaluation("m", str(recipe), ["engine.kind=vllm"]).engine.kind == "vllm", (
        "without the local engine's key"
    )
    recipe.write_text('method = "c3po"\n[optimizer]\nlr = 60\n[objective]\nclip_high = 3.0\n')
    for record in (TrainConfig, SFTConfig):
        with pytest.raises(UserError):
            load(record, str(recipe), ["optimizer.kind=adamw", "objective.loss=ppo"])


def test_a_preset_that_changes_the_kind_leaves_the_keys_of_the_other(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        '[model]\npath = "tiny-qwen2"\n[data]\ntrain = "sorting"\n[method]\npreset = "c3po"\n'
        "[optimizer]\nlr = 60\n[engine]\nmemory_gib = 4.0\n"
    )
    (tmp_path / "own.toml").write_text('extends = "base.toml"\n[method]\npreset = "grpo"\n[engine]\nkind = "vllm"\n')
    own = load(TrainConfig, str(tmp_path / "own.toml"))
    assert (own.optimizer, own.engine.kind) == (AdamWConfig(), "vllm")
    for settings in (
        ["method.preset=grpo"],
        ["method.preset=auto"],
        {"method": to_dict(threepo.GRPO) | {"preset": ""}},
    ):
        assert load(TrainConfig, str(tmp_path / "base.toml"), settings).optimizer == AdamWConfig()
    assert load(TrainConfig, str(tmp_path / "base.toml"), ["method.preset=m3po"]).optimizer.lr == 60
    (tmp_path / "top.toml").write_text('extends = "own.toml"\n[method]\npreset = "c3po"\n[optimizer]\nlr = 30\n')
    top = str(tmp_path / "top.toml")
    assert load(TrainConfig, top).optimizer.lr == 30
    for preset in ("grpo", "auto"):
        assert load(TrainConfig, top, [f"method.preset={preset}"]).optimizer == AdamWConfig()
    assert (
        load(TrainConfig, str(tmp_path / "base.toml"), ["method.preset=grpo", "optimizer.lr=1e-5"]).optimizer.lr == 1e-5
    )


@pytest.mark.parametrize(("below", "over"), [("lr", "step_size"), ("step_size", "lr")])
def test_an_override_of_the_rate_takes_the_recipes_away(below: str, over: str) -> None:
    recipe = {"optimizer": {"kind": "ivon", below: 5.0, "ess": 3.0}}
    assert merge(recipe, {"optimizer": {over: 1.0}}) == {"optimizer": {"kind": "ivon", over: 1.0, "ess": 3.0}}
    assert merge(recipe, {"optimizer": {"ess": 4.0}}) == {"optimizer": {"kind": "ivon", below: 5.0, "ess": 4.0}}


def test_a_step_size_of_0_leaves_the_rate_alone() -> None:
    recipe = {"optimizer": {"kind": "ivon", "lr": 50.0}}
    assert merge(recipe, {"optimizer": {"step_size": 0}})["optimizer"]["lr"] == 50.0
    settings = [*BASE, "method.preset=c3po", "optimizer.lr=5", "optimizer.step_size=0"]
    assert load(TrainConfig, "", settings).optimizer.lr == 5.0


def test_scalars_of_numpy_and_torch_are_numbers() -> None:
    config = build(RunConfig, {"steps": np.int64(5), "seed": torch.tensor(3)}, "run")
    assert (config.steps, config.seed) == (5, 3)


@pytest.mark.parametrize(
    "overrides",
    [
        ["method.rollouts_per_prompt=1"],
        ["method.preset=m3po", "method.draws=16"],
        ["method.rollouts_per_prompt=1", "method.advantage.rule=dr_grpo"],
    ],
)
def test_groups_of_one_teach_nothing(overrides: list[str]) -> None:
    with pytest.raises(UserError, match="one completion in each advantage group"):
        load(TrainConfig, "", [*BASE, *overrides])
    assert load(TrainConfig, "", [*BASE, "method.preset=thompson"]).method.draws == 16, "pooled groups are large"


def test_every_number_is_finite_or_written_as_json_and_read_back() -> None:
    """JSON has no infinity, and a setting that a file cannot hold must not be found out after the model is loaded."""
    infinite = {
        f"{table}.{f.name}"
        for table, kinds in RECORDS.items()
        for kind, record in kinds.items()
        for f in fields(record)
        if is_accepted([*BASE, *[f"{table}.kind={kind}"] * bool(kind), f"{table}.{f.name}=inf"])
    }
    assert infinite == {"optimizer.clip_radius", "method.correction.high"}


def is_accepted(settings: list[str]) -> bool:
    """True if an infinite setting is accepted; it then survives being written and read."""
    try:
        config = load(TrainConfig, "", settings)
    except UserError:
        return False
    assert build(TrainConfig, json.loads(json.dumps(to_dict(config), allow_nan=False))) == config
    return True


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.preset=grpo", "optimizer.kind=adamw", "ess_schedule.kind=cosine"], "adamw has no noise"),
        (["method.draws=2", "method.gradient_at=generator"], "method.draws = 2: needs noise to draw"),
        (["eval.draws=2"], "eval.draws = 2: needs noise to draw"),
        (["sampling.raise_below=0.5"], "sampling.raise_below = 0.5: is read only with a raised temperature; set"),
        (["method.preset=es", "ess_schedule.kind=kl_steps"], "a gradient elsewhere"),
        (
            ["method.preset=c3po", "method.correction.kind=token_mis", "ess_schedule.kind=controller"],
            "'token_mis' masks single tokens; .* a correction of whole completions, seq_mis",
        ),
        (
            ["method.preset=c3po", "method.correction.low=0", "ess_schedule.kind=controller"],
            "method.correction.low = 0.0: without it, more noise keeps more completions",
        ),
        (
            ["method.preset=es", "objective.entropy_coefficient=0.1"],
            "objective.entropy_coefficient = 0.1: an evolution",
        ),
        (["method.preset=es", "method.draws=1", "method.rollouts_per_prompt=1"], "leaves one completion"),
        (
            ["method.preset=es", "method.draws=15", "method.rollouts_per_prompt=15", "method.antithetic=true"],
            "needs an even number of draws, not 15",
        ),
        (["method.preset=c3po", "method.log_evolution=true", "objective.mini_batches=2"], "one update a batch"),
        (["method.preset=grpo", "noise.unit=rms"], "no draws are made, so nothing has noise"),
        (["method.preset=grpo", "noise.size=0.1"], "noise.size = 0.1: no draws are made, so nothing has noise"),
        (["method.preset=grpo", "noise.where={mlp=1.0}"], "no draws are made, so nothing has noise"),
        (["method.preset=psn", "noise.unit=posterior"], "method.draws = 1: needs noise to draw"),
        (["noise.where={}"], "must name some parameters"),
        (["noise.where={mlp=0.0}"], "must name some parameters, with factors above 0"),
        (["method.preset=psn", "noise.size=0"], "noise.size = 0.0: without noise every draw is the mean"),
        (["method.preset=es", "noise.size=0"], "noise.size = 0.0: without noise every draw is the mean"),
        (["method.preset=b3po", "ess_schedule.kind=stages"], "'stages': the first stage has no noise"),
        (["method.preset=es", "ess_schedule.kind=stages"], "'stages': the first stage has no noise"),
        (["method.preset=qerl", "method.cumulative=true"], "method.cumulative = true: only IVON"),
        (["method.preset=es", "optimizer.max_grad_norm=1"], "max_grad_norm = 1.0: an evolution strategy moves one"),
        (["method.preset=es", "method.normalize=part"], "is of no use with gradient_at = 'evolution'"),
        (["method.preset=c3po_replay", "ess_schedule.kind=kl_steps"], "a gradient elsewhere"),
        (["optimizer.kind=ivon", "ess_schedule.kind=kl_steps"], "need draws of the weights"),
        (["method.preset=c3po", "ess_schedule.kind=kl_steps", "method.draws=1"], "draws = 1: .* set it to 2 or more"),
        (
            ["method.preset=auto", "method.log_evolution=true"],
            "method.log_evolution = true: compares draws of the same",
        ),
        (
            ["method.preset=psn", "method.correction.kind=none", "sampling.top_k=5"],
            "'kl_steps': .* sampling.top_k = 0",
        ),
    ],
)
def test_schedules_of_ess_that_cannot_work_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(TrainConfig, "", [*BASE, *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.vllm.replicas=2"], "engine.vllm: is for engine.kind = 'vllm', and here it is 'local'; remove it, or"),
        (
            ["engine.kind=vllm", "engine.memory_gib=2"],
            "engine.memory_gib: is for engine.kind = 'local', and here",
        ),
        (["engine.kind=vllm", "engine.vllm.gpus=[0, 1]"], r"engine.vllm.gpus = \[0, 1\]: must name 1 GPUs"),
        (["engine.kind=vllm", "engine.vllm.gpus=[0]", "engine.vllm.tensor_parallel=2"], "must name 2 GPUs"),
        (["engine.kind=vllm", "engine.vllm.gpus=[-1]"], r"engine.vllm.gpus\[0\] = -1: must be greater"),
        (
            ["engine.kind=vllm", "engine.vllm.servers=['node7']"],
            r"engine.vllm.servers\[0\] = 'node7': write http://HOST:PORT",
        ),
        (["engine.kind=vllm", "engine.vllm.servers=['http://a:1']"], "engine.vllm.weights_folder = '': must be named"),
        (["engine.kind=vllm", "engine.vllm.weights_folder=/x"], "engine.vllm.weights_folder = '/x': must be named"),
        ([*SERVERS, "engine.vllm.replicas=2"], "engine.vllm.replicas = 2: is an option of replicas, and with"),
    ],
)
def test_what_the_vllm_engine_cannot_do_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(TrainConfig, "", [*BASE, *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["method.preset=pass_at_k", "reward.function=code", "reward.scoring=passed_share"],
            "method.advantage.rule = 'pass_at_k': needs rewards of 0 and 1",
        ),
        (
            ["method.preset=maxrl", "reward.function=math", "reward.scoring=format_penalty"],
            "method.advantage.rule = 'maxrl': needs rewards of 0 and 1",
        ),
        (["method.preset=pass_at_k", "method.advantage.unlikeliness=0.5"], "unlikeliness = 0.5: pass_at_k counts"),
        (["method.preset=pass_at_k", "method.advantage.k=16"], "advantage.k = 16: must be below the 16 completions"),
        (["method.preset=es", "method.advantage.rule=pass_at_k"], "rule = 'pass_at_k': is for rewards of 0 and 1"),
        (["objective.reference_reset_every=2"], "reset_every = 2: there is no reference to reset"),
        (["environment.max_turns=3"], "environment.max_turns = 3: no environment reads it; set environment.factory"),
        (["environment.factory=envs.py"], "environment.factory = 'envs.py': must be 'module:Class'"),
        (
            ["environment.factory=envs:World", "environment.max_tokens=9"],
            "environment.max_tokens = 9: must hold a reply of sampling.max_new_tokens = 512",
        ),
        (
            ["method.preset=b3po", "overlap.lag=1", "overlap.most_kl=0.1", "sampling.top_p=0.9"],
            "overlap.most_kl = 0.1: needs a gradient, and rollouts from all tokens",
        ),
        (["engine.kind=vllm", "engine.vllm.sleep=true", "overlap.lag=1"], "sleep = true: with overlap, rollouts and"),
        (["engine.kind=vllm", "engine.vllm.full_push_every=4", "engine.dtype=bfloat16"], "every = 4: is for servers"),
        (["engine.kind=vllm", *SERVERS, "engine.vllm.full_push_every=4"], "every = 4: needs engine.dtype = 'bfloat16'"),
        (["reward.sandbox.backend=sandbox_fusion"], "reward.sandbox.url = '': set the server's address"),
        (["reward.sandbox.url='http://a:1'"], "url = 'http://a:1': only reward.sandbox.backend = 'sandbox_fusion'"),
        (["model.tiny.kv_heads=3"], "model.tiny.kv_heads = 3: must divide model.tiny.heads = 4"),
        (
            ["method.preset=c3po", "ess_schedule.kind=controller", "ess_schedule.target=1"],
            "ess_schedule.target = 1.0: a kept share to hold must lie below 1",
        ),
        (
            ["method.preset=auto", "arms.sizes=[]", "arms.more=['norm 1']", "arms.places=['norm']"],
            r"arms.places = \['norm'\]: arms.sizes is empty",
        ),
    ],
)
def test_what_nothing_would_read_or_keep_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(TrainConfig, "", [*BASE, *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.kind=adamw", "noise.size=0.1"], "noise.size = 0.1: fine-tuning with AdamW has no noise"),
        (["run.show_every=1"], "run.show_every = 1: fine-tuning has no rollouts to show"),
        (["demonstrations.behaviours={worked=0}"], "behaviours = .*: give at least one a share above 0"),
    ],
)
def test_what_fine_tuning_would_not_read_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(SFTConfig, "", ["model.path=m", 'demonstrations.tasks=["sorting"]', *overrides])


def test_a_system_prompt_that_nothing_would_read_is_refused() -> None:
    with pytest.raises(UserError, match="data.system_prompt = 'Be brief.': needs a chat template"):
        load(TrainConfig, "", [*BASE, "data.system_prompt=Be brief.", "data.chat_template=never"])


RECIPE = """
[model]
path = "m"
[data]
train = "sorting"
[method]
preset = "c3po"
[method.correction]
kind = "seq_mis"
low = 0.25
high = 4.0
[optimizer]
kind = "ivon"
ess = 1e8
"""


def test_the_order_of_overrides_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    given = ["method.preset=grpo", "optimizer.lr=1e-4", "optimizer.kind=adamw", "method.correction.kind=none"]
    one, other = (load(TrainConfig, str(path), order) for order in (given, given[::-1]))
    assert one == other
    assert (one.optimizer.kind, one.optimizer.lr) == ("adamw", 1e-4)


def test_another_kind_of_correction_keeps_the_bounds_of_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    correction = load(TrainConfig, str(path), ["method.correction.kind=geometric_mis"]).method.correction
    assert (correction.kind, correction.low, correction.high) == ("geometric_mis", 0.25, 4.0)


def test_files_of_other_editors(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE, encoding="utf-8-sig")
    assert load(TrainConfig, str(path)).method.name == "c3po"
    path.write_text(RECIPE, encoding="utf-16")
    with pytest.raises(UserError, match="not valid TOML"):
        load(TrainConfig, str(path))


def test_paths_are_written_so_that_they_mean_the_same_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my-model").mkdir()
    overrides = ["model.path=my-model", "data.train=a/p.jsonl", "data.eval=~/q.parquet", "run.folder=~/runs/x"]
    config = load(TrainConfig, "", [*overrides, "optimizer.kind=ivon", "optimizer.load_hessian=my-model"])
    assert config.model.path == str(tmp_path / "my-model")
    assert (config.data.train, config.data.eval) == (str(tmp_path / "a/p.jsonl"), str(tmp_path / "q.parquet"))
    assert isinstance(config.optimizer, IVONConfig)
    assert config.optimizer.load_hessian == str(tmp_path / "my-model")
    assert config.run.folder == str(tmp_path / "runs/x")
    untouched = load(TrainConfig, "", ["model.path=someone/model", "data.train=sorting", "run.folder=runs/x"])
    assert (untouched.model.path, untouched.data.train, untouched.run.folder) == ("someone/model", "sorting", "runs/x")


def test_what_is_no_recipe_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is a run folder; continue the run with --resume run"):
        find_recipe("run")
    (tmp_path / "mine.toml").write_text("")
    for mistyped in ("mine", "mime.toml", "./mime.toml"):
        with pytest.raises(UserError, match=r"did you mean mine.toml\?"):
            find_recipe(mistyped)


def test_missing_and_malformed_recipes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean demo/c3po\?"):
        find_recipe("demo/c3p")
    with pytest.raises(UserError, match="shipped recipes: demo/b3po"):
        find_recipe("zzz")
    path = tmp_path / "bad.toml"
    path.write_text("[run\nsteps = 3")
    with pytest.raises(UserError, match=r"not valid TOML: .*line 1"):
        load(TrainConfig, str(path))
    path.write_text("extends = 3\n")
    with pytest.raises(UserError, match="must be the path of another recipe"):
        load(TrainConfig, str(path))
    for table in ("model", "optimizer", "objective", "engine", "ess_schedule"):
        with pytest.raises(UserError, match=f"^{table} = 3: is a table"):
            load(TrainConfig, "", {"model": {"path": "m"}, "data": {"train": "sorting"}, table: 3})
    path.write_text("")
    with pytest.raises(UserError, match="model.path is missing: set it in the recipe"):
        load(TrainConfig, str(path))


def test_numbers_may_be_written_as_integers_but_never_as_text() -> None:
    assert load(TrainConfig, "", [*BASE, "sampling.temperature=1"]).sampling.temperature == 1.0
    with pytest.raises(UserError, match="sampling.temperature = '1e9': must be a valid number"):
        load(TrainConfig, "", [*BASE, "sampling.temperature='1e9'"])


def test_an_evaluation_takes_what_it_knows_from_a_training_recipe() -> None:
    config = load_evaluation("some/model", "demo/c3po", ["eval.samples=2"])
    assert (config.model.path, config.data.train) == ("some/model", "sorting")
    assert (config.eval.samples, config.eval.temperature) == (2, 1.0)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("run.steps=5", r"reads only seed and threads of \[run\]"),
        ("sampling.top_p=0.5", r"reads only max_new_tokens of \[sampling\]"),
    ],
)
def test_an_evaluation_refuses_what_it_would_not_read(override: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"`threepo eval` {reason}"):
        load_evaluation("some/model", "demo/c3po", [override])


def test_an_evaluation_on_another_task_leaves_the_runs_problems(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        '[data]\ntrain = "p.jsonl"\neval = "h.jsonl"\nmax_prompt_tokens = 100\n[reward]\nfunction = "math"'
    )
    assert load_evaluation("m", str(recipe), []).data.eval.endswith("h.jsonl")
    found = load_evaluation("m", str(recipe), ["data.train=sorting", "reward.function=task"]).data
    assert (found.train, found.eval, found.max_prompt_tokens) == ("sorting", "", 0)
    both = ["data.train=sorting", "data.eval=other.jsonl", "reward.function=exact"]
    assert load_evaluation("m", str(recipe), both).data.eval.endswith("other.jsonl")
    recipe.write_text(recipe.read_text() + "\n[eval]\ndraws = 4\nbest_draws = 2\n")
    assert load_evaluation("m", str(recipe), ["data.train=q.jsonl"]).data.eval.endswith("h.jsonl")
    for wrong in ({"data": 3}, {"data": {"train": "x"}, "eval": 3}):
        with pytest.raises(UserError, match="is a table"):
            load_evaluation("m", "", wrong)


def test_an_evaluation_needs_only_what_it_evaluates_on(tmp_path: Path) -> None:
    path = str(tmp_path / "p.jsonl")
    assert load_evaluation("some/model", "", [f"data.eval={path}"]).data.eval == path
    with pytest.raises(UserError, match="data.eval is missing"):
        load_evaluation("some/model", "", [])


def test_sources_mean_the_same_in_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    for folder in ("here", "sorting", "org/copy"):
        (tmp_path / folder).mkdir(parents=True)
    for name, expected in (
        ("gsm8k", "gsm8k"),
        ("gsm8k:someone/copy", "gsm8k:someone/copy"),
        ("gsm8k:./there", f"gsm8k:{tmp_path}/there"),
        ("gsm8k:a/b.jsonl", f"gsm8k:{tmp_path}/a/b.jsonl"),
        ("gsm8k:", "gsm8k:"),
        ("reasoning-gym:maze", "reasoning-gym:maze"),
        ("sorting", "sorting"),
        ("org/name:main:test", "org/name:main:test"),
        ("org/copy::test", f"{tmp_path}/org/copy::test"),
        ("hf://datasets/org/name/a.jsonl", "hf://datasets/org/name/a.jsonl"),
        ("here", "here"),
        ("here/", f"{tmp_path}/here"),
        ("here/::test", f"{tmp_path}/here::test"),
        ("../a/b.jsonl", f"{tmp_path.parent}/a/b.jsonl"),
        ("split=train/b.csv.gz", f"{tmp_path}/split=train/b.csv.gz"),
        ("~/b.parquet", f"{tmp_path}/home/b.parquet"),
    ):
        read = load(TrainConfig, "", ["model.path=tiny-qwen2", f'data.train="{name}"', f'data.eval="{expected}"']).data
        assert (read.train, read.eval) == (expected, expected)


def test_models_and_copies_of_benchmarks_mean_the_same_in_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    config = load_evaluation("model", "", ['benchmarks.names=["aime24=a.jsonl", "math500=org/copy", "gpqa"]'])
    assert config.model.path == f"{tmp_path}/model"
    assert config.benchmarks.names == (f"aime24={tmp_path}/a.jsonl", "math500=org/copy", "gpqa")
    assert load_evaluation("org/model", "", ["data.eval=sorting"]).model.path == "org/model"


def test_broken_rows_of_benchmarks_may_be_left_out() -> None:
    config = load_evaluation("some/model", "", ["data.broken_rows=skip"], {"names": ["aime24"]})
    assert config.data.broken_rows == "skip"


def test_every_name_of_the_tables_leads_to_code_of_its_kind() -> None:
    """Neither a type checker nor a search for uses reads the places, which are texts."""
    of_records = {"optimizer": FunctionType, "objective": TokenLoss, "engine": type}
    for table, kind in of_records.items():
        for record in RECORDS[table].values():
            assert isinstance(resolve_name(record.code), kind), record
    assert all(hasattr(resolve_name(record.code), "generate") for record in RECORDS["engine"].values())
    assert all(isinstance(row.load(), Rule) for row in CREDIT_RULES.values())
    assert all(hasattr(row.load(), "finish") for row in TRACKERS.values())
    assert all(hasattr(row.load(), "advice") for row in SANDBOXES.values())
