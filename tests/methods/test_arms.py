"""Arms: which draw gets which place and size, what counts for them, and that the choice is sound."""

import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import threepo
from factories import completion
from runs import train_config
from threepo import api
from threepo.cli import main
from threepo.config import ArmsConfig, TrainConfig
from threepo.config.arms import CHOICES, MEAN
from threepo.config.method import C3PO_REPLAY, Method
from threepo.config.recipes import load
from threepo.errors import UserError
from threepo.files import read_json
from threepo.methods.arms import PRIOR, Bandit, Outcome, Tally, arm_metrics, outcomes, thompson
from threepo.methods.method import rollout_draws
from threepo.posterior.noise_sizes import root_mean_square
from threepo.run_folder import checkpoints
from threepo.types import Arm, Draw, Group

TWO = ArmsConfig(choice="thompson", places=("mlp",), sizes=(0.1, 0.5), mean_share=0.0, kept=1.0)
NAMES = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"]
NAMES += ["model.norm.weight"]


def bandit(settings: ArmsConfig, tally: Tally | None = None, draws: int = 16, names: Sequence[str] = NAMES) -> Bandit:
    """A bandit for so many draws, each of which writes one completion of a prompt."""
    found = Bandit(settings, Method(rollouts_per_prompt=draws, draws=draws), lambda: names)
    found.begin(tally)
    return found


def choose(settings: ArmsConfig, tally: Tally, seed: int, step: int, draws: int) -> list[Arm | None]:
    """The arms of a step after this tally."""
    return bandit(settings, tally, draws).choose(seed, step)


def counted(settings: ArmsConfig, tally: Tally, groups: Sequence[Sequence[Outcome]]) -> Tally:
    """The tally after a step with these outcomes."""
    after = bandit(settings, tally)
    after.count(groups)
    return after.tally


SMALL, LARGE = bandit(TWO).arms
ALL = bandit(ArmsConfig(choice="thompson")).arms


def group(rewards: dict[Arm | None, Sequence[float]], status: str | None = None) -> list[Outcome]:
    """Outcomes of completions of one prompt, of which each arm (None: the mean) has written some with these rewards."""
    flat = [(arm, value) for arm, values in rewards.items() for value in values]
    rows = [
        completion("p0", i, reward=value, draw=Draw(0, 0, i, arm=arm) if arm else None, status=status)
        for i, (arm, value) in enumerate(flat)
    ]
    return outcomes([Group(tuple(rows), (0.0,) * len(rows))])[0]


def test_arms_are_the_places_at_each_size_and_those_listed_by_hand() -> None:
    settings = ArmsConfig(choice="thompson", places=("all", "norm"), sizes=(0.1, 2), more=("*.0.mlp.* 0.3", "all 2"))
    found = ["all 0.1", "all 2", "norm 0.1", "norm 2", "*.0.mlp.* 0.3"]
    assert list(map(str, bandit(settings).arms)) == found
    assert bandit(ArmsConfig(choice="uniform", sizes=(), more=("all 1e-2",))).arms == [Arm("all", 0.01)]


def test_without_places_they_are_all_and_every_kind_that_has_noise() -> None:
    assert list(dict.fromkeys(arm.place for arm in ALL)) == ["all", "embedding", "norm", "attention", "mlp"]
    adapters = ["model.layers.0.self_attn.q_proj.lora_B.default.weight"]
    of_adapters = bandit(ArmsConfig(choice="thompson"), names=adapters).arms
    assert {arm.place for arm in of_adapters} == {"all", "attention"}
    for settings, words in ((replace(TWO, places=("atention",)), "places"), (replace(TWO, more=("head 1",)), "more")):
        with pytest.raises(UserError, match=f"arms.{words}: no parameter with noise fits '(atention|head)'"):
            bandit(settings)


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False), st.sampled_from(["norm", "*.0.mlp.*", "a b"]))
def test_an_arm_is_read_from_its_text(size: float, place: str) -> None:
    arm = Arm(place, size)
    assert Arm.parse(str(arm)) == arm == Arm.parse(f"  {place}   {size!r} ")


@pytest.mark.parametrize(
    "text", ["norm", "0.3", " 0.3", "norm -1", "norm 0", "norm inf", "norm nan", "norm 1e999", "norm ٣"]
)
def test_what_is_no_arm_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="arm "):
        Arm.parse(text)


def test_the_name_of_an_arm_is_exact() -> None:
    """Two sizes that differ in the ninth digit are two arms, in the tally and in the log."""
    sizes = (0.123456789, 0.123456788)
    assert len(set(map(str, bandit(replace(TWO, places=("all",), sizes=sizes)).arms))) == 2
    assert str(Arm("all", 1.0)) == "all 1"


def test_the_choice_is_a_function_of_recipe_step_and_tally() -> None:
    first, again = (choose(ArmsConfig(choice="thompson"), Tally(), 7, 3, 16) for _ in range(2))
    assert first == again
    assert first[:2] == [None, None], "an eighth is the mean's"
    others = [choose(ArmsConfig(choice="thompson"), Tally(), seed, step, 16) for seed, step in ((7, 4), (8, 3))]
    assert all(other != first for other in others)
    # A draw's choice does not depend on how many others there are.
    assert choose(TWO, Tally(), 7, 3, 16)[:4] == choose(TWO, Tally(), 7, 3, 4)


def test_thompson_chooses_each_arm_as_often_as_it_is_the_best() -> None:
    """Against samples from the Beta distributions by another generator."""
    tally = Tally({MEAN: 3.0, str(SMALL): 4.0, str(LARGE): 1.0}, {MEAN: 9.0, str(SMALL): 6.0, str(LARGE): 1.0})
    count = 20_000
    found = Counter(choose(TWO, tally, 0, 0, count))
    names = (MEAN, str(SMALL), str(LARGE))
    generator = np.random.default_rng(0)
    samples = [generator.beta(PRIOR[0] + tally.earned[n], PRIOR[1] + tally.missed[n], 200_000) for n in names]
    expected = np.bincount(np.argmax(samples, axis=0), minlength=3) / 200_000
    shares = [found[arm] / count for arm in (None, SMALL, LARGE)]
    assert max(abs(a - b) for a, b in zip(shares, expected, strict=True)) < 4 * math.sqrt(0.25 / count)


def test_a_promise_is_a_quantile() -> None:
    promise = thompson(np.array([1.95, 0.0]), np.array([2.0, 0.0]), np.array([[0.5, 0.5]]))
    assert promise[0, 0] == pytest.approx(scipy.stats.beta.median(2, 3))
    assert promise[0, 1] == pytest.approx(0.5**20), "of Beta(a, 1) the quantile u is u^(1 / a)"


def test_what_an_arm_earns_and_what_it_forgets() -> None:
    """Worked by hand: rewards 0 and 1; the mean 1 of 2, small 1 of 1, large 0 of 1; then nothing but a step."""
    tally = counted(replace(TWO, kept=0.5), Tally(), [group({None: [0, 1], SMALL: [1], LARGE: [0]})])
    assert tally.earned == {MEAN: 1, "mlp 0.1": 1, "mlp 0.5": 0}
    assert tally.missed == {MEAN: 1, "mlp 0.1": 0, "mlp 0.5": 1}
    later = counted(replace(TWO, kept=0.5), tally, [group({LARGE: [1, 1]})])
    assert later.earned == {MEAN: 0.5, "mlp 0.1": 0.5, "mlp 0.5": 2}
    assert later.missed == {MEAN: 0.5, "mlp 0.1": 0, "mlp 0.5": 0.5}


@given(st.lists(st.integers(0, 8), min_size=4, max_size=12), st.sampled_from([1, 2, 4]), st.integers(-8, 8))
def test_rewards_of_any_sign_and_scale_count_alike(values: list[int], scale: int, shift: int) -> None:
    """Powers of two and small integers, so that scaling rounds nothing."""

    def after(rewards: list[float]) -> Tally:
        half = len(rewards) // 2
        return counted(TWO, Tally(), [group({None: rewards[:half], SMALL: rewards[half:]})])

    plain, scaled = after([float(v) for v in values]), after([scale * v + shift for v in values])
    assert (scaled.earned, scaled.missed) == (plain.earned, plain.missed)


def test_what_the_verifier_failed_to_judge_counts_for_nobody() -> None:
    before = counted(TWO, Tally(), [group({None: [1], SMALL: [0]})])
    assert counted(TWO, before, [group({None: [0], SMALL: [0]}, status="error")]) == before
    assert counted(TWO, Tally(), [group({SMALL: [0]}, status="error")]) == Tally()
    metrics = arm_metrics([group({None: [1, 0], SMALL: [1]}), group({None: [0], LARGE: [0]}, status="error")])
    assert metrics == {
        "arms/regret": 0.5 - 2 / 3,
        "arms/share/mean": 0.6,
        "arms/share/mlp 0.1": 0.2,
        "arms/share/mlp 0.5": 0.2,
        "arms/reward/mean": 0.5,
        "arms/reward/mlp 0.1": 1,
    }


def test_an_outlier_is_forgotten_with_its_step() -> None:
    """At kept = 0.9 ten steps say what is much: with the outlier among them 0 is nearly all that there is to earn."""
    settings, tally = replace(TWO, kept=0.9), Tally()
    gained = []
    for step in range(12):
        before = tally.missed.get(MEAN, 0.0)
        tally = counted(settings, tally, [group({None: [-999.0 if step == 1 else 0.0], SMALL: [1.0]})])
        gained.append(tally.missed[MEAN] - 0.9 * before)
    assert gained == pytest.approx([1, 1, *[0.001] * 9, 1])


def test_equal_rewards_are_failures_until_others_have_been_seen() -> None:
    dead = counted(TWO, Tally(), [group({None: [0.0], SMALL: [0.0]})])
    assert dead.missed == {MEAN: 1, "mlp 0.1": 1}
    settings = replace(TWO, kept=0.5)  # ranges of two steps
    tally = counted(settings, Tally(), [group({None: [0.0], SMALL: [1.0]})])
    for _ in range(3):
        tally = counted(settings, tally, [group({None: [1.0], SMALL: [1.0]})])
    assert (tally.earned[MEAN], tally.missed[MEAN]) == (1.0, 0.5), "the last two say nothing, so nothing is forgotten"


def played(settings: ArmsConfig, pays: dict[Arm | None, float], steps: int, seed: int) -> list[Arm | None]:
    """The arms of all steps, where an arm's completions are right with its chance."""
    generator, chooser, chosen = np.random.default_rng(seed), bandit(settings), []
    for step in range(steps):
        arms = chooser.choose(seed, step)
        chosen += arms
        rewards = generator.random((8, 16)) < [pays.get(arm, 0.0) for arm in arms]
        groups = [
            [Outcome(str(arm or MEAN), float(ok), True) for arm, ok in zip(arms, row, strict=True)] for row in rewards
        ]
        chooser.count(groups)
    return chosen


def test_one_arm_that_pays_among_twenty_is_found_and_kept() -> None:
    settings = ArmsConfig(choice="thompson")
    good = Arm("attention", 0.65)
    for seed in range(10):
        chosen = played(settings, {good: 0.2}, 25, seed)
        assert Counter(chosen[-5 * 16 :])[good] > 0.7 * 5 * 16, seed


def test_noise_that_only_costs_is_left_for_the_mean() -> None:
    """All arms earn half of what the mean earns, and it gets most draws, from whichever the first ones were."""
    settings = ArmsConfig(choice="thompson")
    pays = {None: 0.6} | dict.fromkeys(ALL, 0.3)
    for seed in range(10):
        chosen = played(settings, pays, 25, seed)
        assert Counter(chosen[-5 * 16 :])[None] > 0.7 * 5 * 16, seed


def test_a_lead_makes_a_tie_the_means() -> None:
    pays = dict.fromkeys([None, *ALL], 0.9)
    shares = []
    for needed in (0.0, 0.1):
        chosen = played(ArmsConfig(choice="thompson", lead=needed), pays, 25, 0)
        shares.append(Counter(chosen[-80:])[None] / 80)
    assert shares[0] < 0.5 < 0.9 < shares[1]


def test_each_rule_spreads_draws_as_it_says() -> None:
    count = 21 * 40
    uniform = Counter(choose(ArmsConfig(choice="uniform", mean_share=0.0), Tally({"all 1": 99.0}), 0, 0, count))
    assert len(uniform) == 21
    assert max(uniform.values()) < 80
    assert set(CHOICES) == {"none", "thompson", "uniform"}


def test_a_prior_counts_like_one_group_of_completions() -> None:
    settings = replace(TWO, prior={"mlp 0.50": 0.75, "mean": 0.0})
    tally = bandit(settings).tally
    assert tally == Tally({"mlp 0.5": 12.0, "mean": 0.0}, {"mlp 0.5": 4.0, "mean": 16.0})
    chosen = Counter(arm for step in range(50) for arm in choose(settings, tally, 0, step, 8))
    assert chosen[LARGE] > 300
    with pytest.raises(UserError, match="'mlp 0.3' is none of the arms mlp 0.1, mlp 0.5; add it to arms.more"):
        bandit(replace(TWO, prior={"mlp 0.3": 0.5}))


def test_draws_of_a_pair_share_their_arm() -> None:
    paired = rollout_draws(replace(C3PO_REPLAY, antithetic=True), 1, 2, [LARGE, None])
    assert paired == [Draw(1, 2, 0, arm=LARGE), Draw(1, 2, 0, sign=-1, arm=LARGE), None, None]


@pytest.mark.parametrize(("arms", "chance"), [(5, 1.0), (20, 0.3)])
def test_a_mixture_of_arms_leaves_a_group_dead_as_often_as_method_md_says(arms: int, chance: float) -> None:
    """One arm of `arms` and the mean rescues: each of its draws does so with this chance."""
    settings = ArmsConfig(choice="uniform", places=("all",), sizes=tuple(range(1, arms + 1)), mean_share=0.0)
    good, draws, steps = Arm("all", 1), 8, 1_500
    generator, dead, offered = np.random.default_rng(0), 0, bandit(settings, draws=draws)
    for step in range(steps):
        chosen = offered.choose(0, step)
        dead += not any(arm == good and generator.random() < chance for arm in chosen)
    expected = (1 - chance / (arms + 1)) ** draws
    assert dead / steps == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / steps))


AUTO = ("model.path=tiny-qwen2", "data.train=sorting", "method.preset=auto")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ("method.draws=1",),
            "arms.choice = 'thompson': compares draws with each other; set method.draws to 2",
        ),
        (
            ("method.preset=c3po_auto", "noise.unit=rms", "noise.size=1"),
            "noise.unit = 'rms': arms of IVON are multiples",
        ),
        (("method.preset=c3po_auto", "optimizer.estimator=gradsq"), "set it to 'price'"),
        (("method.preset=c3po_auto", "noise.size=0"), "noise.size = 0.0: arms are multiples of it"),
        (
            ("method.preset=es", "method.gradient_at=generator", "method.greedy=false", "arms.choice=thompson"),
            "optimizer.kind = 'sgd': an evolution strategy has no arms",
        ),
        (("method.gradient_at=fresh",), "has no arm for a gradient draw that generated nothing"),
        (("method.draws=16", "method.greedy=true"), "set method.greedy = false"),
        (("arms.mean_share=0.9",), "arms.mean_share = 0.9: leaves no draw or pair of the 8 to any arm"),
        (("method.draws=2", "method.antithetic=true"), "leaves no draw or pair of the 1 to any arm"),
        (("arms.sizes=[]",), "arms.more = .*: leaves no arm"),
        (("arms.more=['norm']",), "must be a place and a size"),
        (("arms.more=['norm 0']",), "must be a place and a size"),
        (("arms.more=['norm 1e999']",), "must be a place and a size"),
        (("method.normalize=part",), "method.normalize = 'part': the mean weights' draws are one part"),
        (("method.advantages=draw",), "draws of one arm do not compete"),
        (("eval.every=1", "eval.draws=2"), "eval.draws = 2: a draw without an arm"),
        (("arms.prior={'norm 0.3' = 2}",), "arms.prior"),
        (("arms.prior={norm = 0.5}",), "must be 'mean', or a place and a size"),
        (("arms.choice=none", "arms.kept=0.5"), "arms.kept = 0.5: no arms are chosen"),
        (("arms.choice=none",), "noise.size = 1.0: drowns all weights in noise"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load(TrainConfig, "", [*AUTO, *settings])


def test_a_run_with_arms_has_no_posterior_to_draw_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    api.train(train_config(tmp_path / "run", "method.preset=auto", "run.steps=1"))
    words = "was trained with arms of many places and sizes, so it has no posterior; name one"
    assert main(["sample", "run", "--output", "drawn"]) == 2
    assert words in capsys.readouterr().err
    assert main(["eval", "run", "eval.draws=2", "eval.samples=2"]) == 2
    assert words in capsys.readouterr().err
    assert main(["eval", "run", "eval.draws=2", "eval.samples=2", "noise.unit=rms", "noise.size=0.05"]) == 0
    assert main(["sample", "run", "--output", "drawn", "--arm", "mlp 0.65"]) == 0
    posterior = threepo.Posterior.from_pretrained(Path("run"))
    mean, drawn = posterior.mean(), load_file("drawn/draw-0/model.safetensors")
    assert read_json(Path("drawn/draw-0/draw.json"))["arm"] == {"place": "mlp", "size": 0.65}
    assert all(torch.equal(drawn[name], value) for name, value in posterior.draw(0, Arm("mlp", 0.65)).items())
    moved = {name for name, value in mean.items() if not torch.equal(drawn[name], value)}
    assert moved == {name for name in mean if "mlp" in name}
    for name in moved:
        size = (drawn[name] - mean[name]).square().mean().sqrt() / root_mean_square(mean[name])
        assert float(size) == pytest.approx(0.65, rel=0.1)
    for arm, fault in (("head 1", "it has the kinds embedding, attention, mlp, norm"), ("mlp", "a place and a size")):
        assert main(["sample", "run", "--output", "more", "--arm", arm]) == 2
        assert fault in capsys.readouterr().err
    api.train(train_config(tmp_path / "learned", "method.preset=c3po_auto", "run.steps=1"))
    assert main(["sample", "learned", "--output", "drawn_learned"]) == 0, (
        "IVON's posterior is one, whatever chose its multiples"
    )
    # The checkpoint itself says so, wherever it is.
    shutil.copytree(checkpoints(Path("run"))[-1][1], "elsewhere")
    with pytest.raises(UserError, match=words):
        threepo.Posterior.from_pretrained("elsewhere").draw(0)
