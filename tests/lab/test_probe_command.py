"""`threepo probe` from the command's side: what it measures, what it says, and the recipe that it writes."""

import json
import math
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from factories import completion
from families import FAMILIES, policy_of
from runs import TINY
from threepo.cli import main
from threepo.config import LoRAConfig, ModelConfig, NoiseConfig, TrainConfig
from threepo.config.recipes import load, parse_overrides
from threepo.config.records import build, to_dict
from threepo.data.source import open_training
from threepo.errors import UserError
from threepo.files import write_json
from threepo.lab.probe import Condition, Probe, conditions
from threepo.lab.probe_config import ProbeConfig, load_probing
from threepo.lab.probe_findings import findings, recipe, write_recipe
from threepo.models.policy import Policy, load_policy
from threepo.posterior.gaussian import FixedWeights, Posterior
from threepo.posterior.ivon import IVON
from threepo.run_folder import checkpoints
from threepo.types import Draw, Purpose

SETTINGS = (
    *TINY[1:],
    "data.train=choices",
    "data.levels=[2]",
    "sampling.max_new_tokens=4",
    "method.rollouts_per_prompt=4",
    'probe.places=["posterior", "embedding"]',
    "probe.sizes=[0.1, 0.5]",
    "probe.temperatures=[2.0]",
    "probe.problems=3",
    "probe.candidates=5",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm(tmp_path_factory.mktemp("model") / "warm")


def warm(folder: Path, *more: str) -> Path:
    """A model that has begun to copy two letters."""
    data = ['demonstrations.tasks=["choices"]', "demonstrations.levels=[2]", "demonstrations.behaviours={direct=1.0}"]
    optimizer = ["optimizer.kind=adamw", "optimizer.lr=1e-2", "demonstrations.batch_size=16"]
    assert main(["sft", f"run.folder={folder}", "run.steps=150", *TINY, *data, *optimizer, *more]) == 0
    return folder


def probed(model: Path, folder: Path, *more: str) -> dict[str, Any]:
    assert main(["probe", str(model), *SETTINGS, "--draws", "6", "--output", str(folder), *more]) == 0
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def test_a_probe_counts_what_the_draws_solve(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--rollouts", "4", "--ess", "1e3,1e6", "probe.solved_at_most=1", "--write", str(tmp_path / "next.toml")]
    summary = probed(model, tmp_path / "probe", *own)
    assert summary["verdict"].split()[:3] in (["Weight", "noise", "will"], ["Weight", "noise", "should"])
    printed = capsys.readouterr().out
    assert summary["verdict"].split()[0] in printed
    advised = f"next: threepo train {tmp_path / 'next.toml'}" in printed
    assert advised == (tmp_path / "next.toml").is_file() == (summary["draws"] > 0)
    assert advised or f"{tmp_path / 'next.toml'} is not written, as no noise is advised" in printed
    assert len(summary["problems"]["measured_on"]) == 3
    rows = {(row["place"], row["size"]): row for row in summary["noise"]}
    assert rows.keys() == {("posterior", 1e6), ("posterior", 1e3), ("embedding", 0.1), ("embedding", 0.5)}
    assert rows["embedding", 0.1]["kl"] < rows["embedding", 0.5]["kl"]
    assert rows["posterior", 1e6]["kept_share"] > rows["embedding", 0.5]["kept_share"]
    assert rows["embedding", 0.1]["dead_share"].keys() == {"1", "2", "4"}
    parts = [json.loads(file.read_text()) for file in sorted((tmp_path / "probe" / "parts").iterdir())]
    assert (np.array(parts[1]["rates"]).shape, parts[1]["rollouts"]) == ((3, 1), 24), "the mean: of all draws together"
    assert (np.array(parts[3]["rates"]).shape, parts[3]["rollouts"]) == ((3, 6), 4)
    for part in parts[1:]:
        assert part["rollouts_right"] == pytest.approx(np.mean(part["rates"])), "counted by problem and draw, or at all"


def test_a_probe_that_was_stopped_goes_on_as_if_it_had_not_been(model: Path, tmp_path: Path) -> None:
    settings = ["--rollouts", "2", "probe.solved_at_most=1", 'probe.places=["embedding"]', "probe.sizes=[0.1]"]
    whole = probed(model, tmp_path / "probe", *settings)
    gone = tmp_path / "probe" / "parts" / "003.json"
    before, kept = gone.read_bytes(), (tmp_path / "probe" / "parts" / "002.json").stat().st_mtime_ns
    gone.unlink()
    assert probed(model, tmp_path / "probe", *settings) == whole
    assert gone.read_bytes() == before
    assert (tmp_path / "probe" / "parts" / "002.json").stat().st_mtime_ns == kept, "it was not made again"


def test_a_probe_without_a_place_to_look_at_is_refused(model: Path) -> None:
    config, settings, _ = load_probing(str(model), "", [*SETTINGS, 'probe.places=["embedding"]'], {})
    adapted = load_policy(ModelConfig(path=str(checkpoints(model)[-1][1]), lora=LoRAConfig(rank=2)))
    with pytest.raises(UserError, match="trains none of these places; name others, such as all"):
        conditions(config, settings, adapted)
    fitting = replace(settings, places=("embedding", "norm", "all"))
    without_norms = policy_of(FAMILIES["olmo"])
    assert {c.place for c in conditions(config, fitting, without_norms) if c.is_noisy} == {"embedding", "all"}
    with pytest.raises(UserError, match="places = .*: this model trains nothing that 'atention' fits"):
        conditions(config, replace(settings, places=("all", "atention")), without_norms)


@pytest.mark.parametrize("rank", [0, 1])
def test_exact_chances_are_those_of_the_answer(rank: int, model: Path, tmp_path: Path) -> None:
    """Against the model's own logits, at weights perturbed outside of the probe."""
    low = ["method.preset=c3po", f"noise.rank={rank}"] if rank else []
    probed(model, tmp_path / "exact", "--exact", "probe.solved_at_most=1", *low)
    part = json.loads((tmp_path / "exact" / "parts" / "006.json").read_text())
    assert (part["place"], part["size"], part["rollouts"]) == ("embedding", 0.1, 0)
    config, settings, _ = load_probing(str(model), "", SETTINGS, {})
    policy = load_policy(ModelConfig(path=str(checkpoints(model)[-1][1])))
    assert conditions(config, settings, policy)[5] == Condition("embedding", 0.1)
    shape = NoiseConfig(unit="rms", size=0.1, where={"embedding": 1.0}, rank=rank)
    noise = Posterior.around(policy.model.named_parameters(), shape)
    measured_on = json.loads((tmp_path / "exact" / "summary.json").read_text())["problems"]["measured_on"]
    problem = next(p for p in open_training(config.data).problems.first(5) if p.id == measured_on[1])
    texts = (str(problem.prompt), problem.answer)
    prompt, answer = (policy.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    targets = [*answer, policy.tokenizer.eos_token_id]

    def chance(temperature: float) -> float:
        with torch.no_grad():
            logprobs = (policy.model(torch.tensor([[*prompt, *targets]])).logits[0] / temperature).log_softmax(-1)
        return math.exp(sum(float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(targets)))

    hot = json.loads((tmp_path / "exact" / "parts" / "002.json").read_text())
    assert (hot["place"], hot["size"], hot["rates"][1]) == ("temperature", 2.0, [pytest.approx(chance(2.0), rel=1e-4)])
    assert hot["rollouts_right"] == pytest.approx(np.mean(hot["rates"]), abs=0.1), "and is sampled there"
    noise.perturb_(((name, p.detach()) for name, p in policy.model.named_parameters()), Draw(0, 6, 2, Purpose.PROBE))
    assert part["rates"][1][2] == pytest.approx(chance(1.0), rel=1e-4)
    assert part["rollouts_right"] == pytest.approx(np.mean(part["rates"]), abs=0.1), "1,024 rollouts agree"


def test_distances_by_hand(policy: Policy) -> None:
    """Four tokens each, with exp(t / 4) times their chance at the mean; of exp(t) = 1, 2.2 and 1/2.2, Seq-MIS keeps 1.

    The fresh draws have hardly any noise. KL: the mean of exp(d) - 1 - d with d = t / 4, the mean less their own.
    """
    totals, tokens = [0.0, math.log(2.2), -math.log(2.2)], (11, 12, 13, 14)
    with torch.no_grad():
        logprobs = policy.model(torch.tensor([[5, 6, *tokens]])).logits[0].log_softmax(-1)
    at_mean = [float(logprobs[1 + i, token]) for i, token in enumerate(tokens)]
    rows = [completion(rollout=i, tokens=tokens, logprobs=[m - t / 4 for m in at_mean]) for i, t in enumerate(totals)]
    noise = Posterior.around(policy.model.named_parameters(), NoiseConfig(unit="rms", size=1e-9))
    probe = Probe(planted(0.05)[0], ProbeConfig(), policy, None, None)  # type: ignore[arg-type]  # nothing is generated
    draws = [Draw(0, 1, i, Purpose.PROBE) for i in range(8)]
    found = probe.distances(FixedWeights(policy.model, noise), rows, draws)
    assert found["kept_share"] == pytest.approx(1 / 3)
    assert found["kl"] == pytest.approx(sum(math.exp(t / 4) - 1 - t / 4 for t in totals) / 3, rel=1e-3)
    rows.append(completion(rollout=3, tokens=tokens, logprobs=[m - 0.1 for m in at_mean]))
    assert probe.distances(FixedWeights(policy.model, noise), rows[2:], draws)["kl"] == pytest.approx(
        (math.exp(-math.log(2.2) / 4) - 1 + math.log(2.2) / 4 + math.exp(0.1) - 1.1) / 2, rel=1e-3
    )


def test_an_ess_means_the_noise_that_the_recipe_will_train(policy: Policy) -> None:
    """Whatever the size of the noise with which the posterior was learned."""
    ivon = IVON(policy.model.named_parameters(), hess_init=0.1)
    learned = Posterior.of(ivon)
    learned = replace(learned, groups=tuple(replace(group, noise_scale=0.25) for group in learned.groups))
    probe = Probe(planted(0.05)[0], ProbeConfig(), policy, learned, None)  # type: ignore[arg-type]
    (group,) = probe.posterior(Condition("posterior", 1e6)).groups
    assert (group.ess, group.noise_scale) == (1e6, 1.0)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` installs it")
def test_vllm_writes_as_often_right_as_each_draw_would(tmp_path: Path) -> None:
    """Rollouts by vLLM under every draw, beside the exact chances that the trainer computes at the same draws."""
    wide = "model.tiny.hidden_size=64"  # the smallest heads that vLLM has on a CPU are 32 wide
    vllm = [wide, "engine.kind=vllm", "engine.dtype=float32", "engine.vllm.enforce_eager=true"]
    vllm += [f"engine.vllm.kv_cache_memory_bytes={1 << 28}"]
    probed(warm(tmp_path / "warm", wide), tmp_path / "vllm", "--exact", "probe.solved_at_most=1", *vllm)
    parts = [json.loads(file.read_text()) for file in sorted((tmp_path / "vllm" / "parts").iterdir())][1:]
    chances = [float(np.mean(part["rates"])) for part in parts]
    assert [part["rollouts_right"] for part in parts] == pytest.approx(chances, abs=0.1)
    assert max(chances) - min(chances) > 0.2, "else any policy would do"


def measured(place: str, size: float, rates: np.ndarray, **facts: float) -> dict[str, Any]:
    return {"place": place, "size": size, "rates": rates.tolist(), "rollouts": 0, **facts}


def planted(chance: float, kept: float = 0.9) -> tuple[TrainConfig, ProbeConfig, list[dict[str, Any]]]:
    """The mean solves 1 in 1,000; temperature 1 in 500; draws on the embedding `chance`, on the MLPs no more."""
    generator = np.random.default_rng(0)
    facts = {"kl": 0.1, "kept_share": kept}
    everything = [
        measured("mean", 1.0, np.full((4, 1), 1e-3)),
        measured("temperature", 1.5, np.full((4, 1), 2e-3)),
        measured("mlp", 0.5, generator.beta(0.5, 499.5, (4, 64)), **facts),
        measured("embedding", 0.5, generator.beta(0.5, 0.5 / chance, (4, 64)), **facts),
    ]
    settings = ["data.train=choices", "model.path=tiny-qwen2", "optimizer.lr=1e-4"]
    return load(TrainConfig, "", settings), ProbeConfig(), everything


def test_a_planted_effect_is_found_and_its_recipe_can_be_trained(tmp_path: Path) -> None:
    for kept, gradient in ((0.9, "fresh"), (0.2, "generator")):
        config, settings, everything = planted(0.05, kept)
        summary = findings(config, settings, everything, everything[-1])
        assert summary["chosen"]["place"] == "embedding"
        assert "should help here: embedding 0.5 x RMS" in summary["verdict"]
        assert "temperature" in summary["verdict"]
        template = 'It\'s "asked":\n{prompt}\nBox it: \\boxed{}.'  # neither of TOML's quotes holds it as it is
        data = {"train": "choices", "prompt_template": template}
        training = {"model": {"path": "tiny-qwen2"}, "data": data, "optimizer": {"lr": 1e-4}}
        noise = NoiseConfig(structure="threepo.posterior.noise_structures:Noise", unit="rms", size=0.1)
        own = replace(config, method=replace(config.method, draws=2), noise=noise)
        assert recipe(summary, own, training, "")["noise"]["structure"] == own.noise.structure
        write_recipe(tmp_path / "out.toml", recipe(summary, config, training, ""), summary["verdict"])
        written = load(TrainConfig, str(tmp_path / "out.toml"))
        assert (written.method.gradient_at, written.method.draws) == (gradient, summary["draws"])
        assert written.noise.where == {"embedding": 1.0}
        assert written.data.prompt_template == template
        assert (written.noise.unit, written.noise.size, written.optimizer.lr) == ("rms", 0.5, 1e-4)
        posterior = {**summary, "confirmed": {**summary["confirmed"], "place": "posterior", "size": 1e7}}
        write_recipe(tmp_path / "out.toml", recipe(posterior, config, training, "somewhere"), "why")
        ivon: Any = load(TrainConfig, str(tmp_path / "out.toml")).optimizer
        assert (ivon.kind, ivon.ess, ivon.load_hessian) == ("ivon", 1e7, "somewhere")


def test_the_recipe_keeps_the_optimizer_that_a_preset_named(tmp_path: Path) -> None:
    config, settings, everything = planted(0.05)
    own = ["method.preset=c3po", "optimizer.lr=60", "optimizer.ess=1e7"]
    config = load(TrainConfig, "", ["data.train=choices", "model.path=tiny-qwen2", *own])
    summary = findings(config, settings, everything, everything[-1])
    write_recipe(tmp_path / "out.toml", recipe(summary, config, parse_overrides(own), ""), "why")
    written: Any = load(TrainConfig, str(tmp_path / "out.toml"), ["data.train=choices", "model.path=tiny-qwen2"])
    assert (written.optimizer.kind, written.optimizer.lr, written.noise.size) == ("ivon", 60, 0.5)


def test_the_recipe_leaves_out_what_does_not_fit_its_noise(tmp_path: Path) -> None:
    config, settings, everything = planted(0.05)
    summary = findings(config, settings, everything, everything[-1]) | {"draws": 1}
    base = ["data.train=choices", "model.path=tiny-qwen2"]
    streamed = ["overlap.lag=1", "overlap.stream=true"]
    controlled = ["method.preset=c3po", "ess_schedule.kind=controller"]
    for own, gradient_at in ((controlled, "fresh"), (streamed, "generator")):
        config = load(TrainConfig, "", [*base, *own])
        write_recipe(tmp_path / "out.toml", recipe(summary, config, parse_overrides([*base, *own]), ""), "why")
        written = load(TrainConfig, str(tmp_path / "out.toml"))
        assert (written.ess_schedule.kind, written.method.gradient_at) == ("constant", gradient_at)
        assert written.overlap == config.overlap


def test_a_run_that_chooses_its_noise_starts_from_what_was_measured(tmp_path: Path) -> None:
    config, settings, everything = planted(0.05)
    own = ["data.train=choices", "model.path=tiny-qwen2", "method.preset=auto", "noise.size=0.5"]
    config = load(TrainConfig, "", own)
    summary = findings(config, settings, everything, {**everything[-1], "kl": 1.01 * everything[-1]["kl"]})
    write_recipe(tmp_path / "out.toml", recipe(summary, config, parse_overrides(own), ""), "why")
    written = load(TrainConfig, str(tmp_path / "out.toml"))
    assert (written.method.name, written.noise, written.arms.sizes) == ("auto", config.noise, ())
    assert written.arms.more == ("mlp 1", "embedding 1"), "0.5 x RMS, in units of noise.size"
    rates = {m["place"]: float(np.mean(m["rates"])) for m in everything}
    expected = {"mean": 1e-3, "mlp 1": rates["mlp"], "embedding 1": rates["embedding"]}
    assert written.arms.prior == pytest.approx(expected)
    other = [*own, "noise.where={all=0.5}"]  # arms would have other noise than was measured
    config = load(TrainConfig, "", other)
    write_recipe(tmp_path / "out.toml", recipe(summary, config, parse_overrides(other), ""), "why")
    assert load(TrainConfig, str(tmp_path / "out.toml")).noise.where == {"embedding": 1.0}
    tried = {**summary, "noise": [*summary["noise"], {**summary["noise"][-1], "place": "posterior", "size": 1e9}]}
    config = load(TrainConfig, "", own)
    write_recipe(tmp_path / "out.toml", recipe(tried, config, parse_overrides(own), ""), "why")
    assert load(TrainConfig, str(tmp_path / "out.toml")).arms.more == ("mlp 1", "embedding 1")
    posterior = {**summary, "confirmed": {**summary["confirmed"], "place": "posterior", "size": 1e7}}
    write_recipe(tmp_path / "out.toml", recipe(posterior, config, parse_overrides(own), ""), "why")
    assert not load(TrainConfig, str(tmp_path / "out.toml")).arms.active


def test_the_training_of_a_probed_run_has_its_rate_and_not_its_folder(model: Path, tmp_path: Path) -> None:
    own = ["data.train=choices", "method.preset=c3po", "optimizer.kind=ivon", "optimizer.step_size=1e-5"]
    config = load(TrainConfig, "", [*own, f"model.path={model}", f"run.folder={tmp_path / 'run'}"])
    write_json(tmp_path / "run" / "config.json", to_dict(config))
    _, _, training = load_probing(str(tmp_path / "run"), "", [], {})
    assert "folder" not in training["run"]
    assert build(TrainConfig, training).optimizer.step_size == 1e-5


def test_a_planted_null_is_not_found() -> None:
    config, settings, everything = planted(0.0005)
    summary = findings(config, settings, everything)
    assert (summary["chosen"], summary["draws"]) == (None, 0)
    assert "will not help" in summary["verdict"]


def test_noise_that_does_no_more_than_a_temperature_is_not_proposed() -> None:
    config, settings, everything = planted(0.05)
    everything[1] = measured("temperature", 1.5, np.full((4, 1), 0.2))
    summary = findings(config, settings, everything, everything[-1])
    assert summary["confirmed"]["mu"]["low"] < 0.2
    assert summary["verdict"].startswith("Weight noise is not shown to do more here than a temperature. embedding 0.5")
    assert summary["draws"] == 0, "no recipe"


def test_luck_among_many_is_measured_again() -> None:
    config, settings, everything = planted(0.05)
    again = dict(everything[-1], rates=everything[2]["rates"])
    summary = findings(config, settings, everything, again)
    assert summary["chosen"]["place"] == "embedding"
    assert summary["draws"] == 0
    assert "will not help" in summary["verdict"]


def test_nothing_solved_is_not_taken_for_an_answer() -> None:
    config, settings, everything = planted(0.05)
    none = [dict(m, rates=np.zeros_like(m["rates"]).tolist(), rollouts=16) for m in everything]
    found = findings(config, settings, none)
    assert found["verdict"].startswith("Cannot be told: neither the mean (below ")
    warm = next(i for i, m in enumerate(none) if m["place"] == "temperature")
    none[warm] = dict(none[warm], rates=np.full_like(none[warm]["rates"], 0.25).tolist())
    assert "but a temperature did: temperature" in findings(config, settings, none)["verdict"]


def test_noise_too_far_from_the_mean_is_not_proposed_but_named() -> None:
    config, settings, everything = planted(0.05)
    far = [*everything[:-1], dict(everything[-1], kl=1.5)]
    found = findings(config, settings, far)
    assert found["chosen"] is None
    said = found["verdict"]
    assert "within probe.most_kl = 1 nats a token is not shown to help here, but larger noise is: embedding 0.5" in said
    assert "(KL 1.5)" in said
    assert "Within it: The best, mlp" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.train=sorting", "--exact"], "--exact: sorting may have other right completions than its answer"),
        (["sampling.top_p=0.9"], "sampling.top_p = 0.9: a probe compares log-probs"),
        (["--ess", "1e8,many"], "--ess 1e8,many: must be numbers"),
        (["probe.sizes=[0.3, 0.1]"], "probe.sizes = .*must ascend"),
        (["porbe.draws=3"], "unknown table porbe"),
        (
            ["--draws", "2", "--rollouts", "2", "method.rollouts_per_prompt=16"],
            "too few for groups of 16; set --rollouts 16",
        ),
        (["--write", "out.json"], "a recipe's name ends in .toml"),
        (["probe.solved_at_most=0", "reward.function=test_probe_command:always"], "there is nothing to rescue"),
    ],
)
def test_mistakes_are_named(
    model: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    levels = [text for text in SETTINGS if "sorting" not in arguments[0] or "data." not in text]
    assert main(["probe", str(model), *levels, "--output", str(tmp_path / "out"), *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_results_of_something_else_are_not_overwritten(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (model / "summary.json").read_bytes()
    assert main(["probe", str(model), *SETTINGS, "--output", str(model)]) == 2
    assert "holds the config.json of something else already" in capsys.readouterr().err
    assert (model / "summary.json").read_bytes() == before


def always(completions: list[str], **_: Any) -> list[float]:
    """A reward for everything."""
    return [1.0] * len(completions)
