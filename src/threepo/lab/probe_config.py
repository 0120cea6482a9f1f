"""[probe]: settings of `threepo probe`, in addition to the settings of the training that it is about."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from threepo.config import TrainConfig
from threepo.config.recipes import Table, find_recipe, lay_over, merge, parse_overrides, read_toml, with_preset
from threepo.config.records import Count, Positive, Settings, Share, build, must
from threepo.run_folder import CONFIG, read_config

POSTERIOR = "posterior"
LAYERS = "layers"
Sizes = Annotated[tuple[Positive, ...], must(lambda sizes: list(sizes) == sorted(set(sizes)), "must ascend")]


class ProbeConfig(Settings, table="probe"):
    """[probe]: which noise is tried, and on how many problems, draws and rollouts (docs/probe.md)."""

    places: Annotated[tuple[str, ...], must(bool, "name at least one place")] = (
        *(POSTERIOR, "all", "embedding", "norm", "attention", "mlp", LAYERS),
    )
    """`posterior` (all parameters, as IVON draws), `all` or a kind of layer as in noise.where, `layers` (first, middle
    and last block and the last norm, each alone), or a pattern such as "model.layers.2.*"."""
    sizes: Sizes = (0.1, 0.2, 0.3, 0.45, 0.65, 1.0, 1.5, 2.2)
    """Sigma over each parameter's root mean square, for all places but the posterior."""
    ess: Sizes = (1e8, 1e9, 1e10)
    """Effective sample sizes of the posterior: the model's own, or else IVON's initial one."""
    temperatures: Sizes = (0.7, 1.25, 1.5, 2.0)
    """Temperatures to compare with, at equal rollouts."""
    draws: Annotated[int, must(lambda draws: draws > 1, "must be 2 or more")] = 64
    """Draws of each noise."""
    rollouts: Annotated[int, must(lambda rollouts: rollouts > 1, "must be 2 or more")] = 16
    """Completions of each problem by each draw; to predict groups of one draw, take their size."""
    problems: Count = 8
    """Problems to measure on: the first that the mean policy (nearly) never solves."""
    candidates: Count = 64
    """First problems of data.train, among which these are sought."""
    looks: Count = 64
    """Completions of each candidate, for this search only."""
    solved_at_most: Share = 0.05
    """Candidates solved more often than this are not taken."""
    most_kl: Positive = 1.0
    """Largest KL to the mean, in nats a token, of noise proposed for training."""
    draws_together: Count = 16
    """Draws that the engine holds at once; fewer need less memory."""
    exact: bool = False
    """Compute chances from the probability of the answer, which must be the only right completion."""


def load_probing(
    model: str, recipe: str, overrides: Sequence[str], flags: Table
) -> tuple[TrainConfig, ProbeConfig, Table]:
    """The training that a probe of `model` is about, the probe's own settings, and the tables of that training.

    The tables come from the recipe, or from the run if `model` is a run folder; then overrides apply. `flags` are
    settings of [probe] that override everything. `UserError` for a training that cannot be probed.
    """
    table: Table = {}
    if recipe:
        table = read_toml(find_recipe(recipe))
    elif (Path(model) / CONFIG).is_file() and "data" in (recorded := read_config(Path(model))):
        table = merge(recorded, {"model": {"tokenizer": ""}})  # the checkpoint has its own
        del table["run"]["folder"]
        if table["optimizer"].get("step_size"):  # the record has the rate that follows from it, too
            del table["optimizer"]["lr"]
    top = merge(parse_overrides(overrides), {"model": {"path": model}})
    table = lay_over(TrainConfig, {"data": {}, **table}, top)
    probe = build(ProbeConfig, merge(table.pop("probe", {}), flags), "probe")
    config = build(TrainConfig, with_preset(table))
    sampling = config.sampling
    for key, off in (("top_p", 1), ("top_k", 0)):
        fix = f"a probe compares log-probs, which have no meaning if rollouts are cut; set sampling.{key} = {off}"
        sampling.check(key, getattr(sampling, key) == off, fix)
    sampling.check("temperature", sampling.temperature > 0, "a probe counts what is sampled; set it above 0")
    return config, probe, table
