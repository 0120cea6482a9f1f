"""Contract 2: noise is a pure function of its address, and it is standard normal noise."""

import math

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawn import normal
from threepo.posterior.noise import BLOCK, CHUNK, address_key, noise_key, uniforms
from threepo.types import Draw, Purpose

DRAW = Draw(seed=3, step=5, index=1)
N = 2_000_000


@given(st.data())
def test_a_slice_equals_the_same_part_of_the_whole(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, CHUNK, 2 * CHUNK + 300]))
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start, size))
    whole = normal(DRAW, "w", 0, size)
    assert torch.equal(normal(DRAW, "w", start, stop), whole[start:stop])


def test_a_tensors_noise_does_not_depend_on_its_length() -> None:
    assert torch.equal(normal(DRAW, "w", 0, 5000), normal(DRAW, "w", 0, 100_000)[:5000])


def test_noise_does_not_depend_on_the_number_of_threads() -> None:
    one = normal(DRAW, "w", 0, 300_000)
    torch.set_num_threads(3)
    assert torch.equal(normal(DRAW, "w", 0, 300_000), one)


PINNED = [-0.7566671371459961, 0.9241346120834351, -1.4917006492614746, -0.03993961215019226]


def test_the_numbers_of_version_one_stay_as_they_are() -> None:
    """Checkpoints and logs name draws by address: changing these numbers would silently change what they mean."""
    assert normal(DRAW, "model.embed_tokens.weight", 510, 514).tolist() == PINNED


def test_splitmix_matches_a_scalar_version_in_plain_integers() -> None:
    key = noise_key(DRAW, "w")
    mask = (1 << 64) - 1
    for element in (0, 1, 511, 512, 513, 1024, 70_001):
        block, inside = divmod(element, BLOCK)
        z = ((block * 512 + inside % 512) * 0x9E3779B97F4A7C15 + key[0]) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z ^= key[1]
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        signed = z - (z >> 63 << 64)
        radius = math.copysign(math.sqrt(-2 * math.log(abs(signed) * 2.0**-63)), signed)
        low = z & 0xFFFFFFFF
        angle = math.pi * (low - (low >> 31 << 32)) * 2.0**-32
        expected = radius * (math.cos(angle) if inside < 512 else math.sin(angle))
        assert float(normal(DRAW, "w", element, element + 1)) == pytest.approx(expected, rel=2e-6, abs=1e-6)


def test_moments_are_those_of_a_standard_normal() -> None:
    z = normal(DRAW, "w", 0, N).double()
    # Five standard errors of each moment's estimate.
    assert abs(z.mean()) < 5 / N**0.5
    assert abs(z.var() - 1) < 5 * (2 / N) ** 0.5
    assert abs((z**3).mean()) < 5 * (15 / N) ** 0.5
    assert abs((z**4).mean() - 3) < 5 * (96 / N) ** 0.5


def test_kolmogorov_smirnov_and_tails() -> None:
    z = normal(Draw(11, 0, 0), "w", 0, N).double()
    assert scipy.stats.kstest(z.numpy(), "norm").pvalue > 1e-3
    for bound in (2.0, 3.0, 4.0):
        expected = N * 2 * scipy.stats.norm.sf(bound)
        assert abs(float((z.abs() > bound).sum()) - expected) < 5 * expected**0.5


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (Draw(3, 5, 2), "w"),
        (Draw(3, 6, 1), "w"),
        (Draw(4, 5, 1), "w"),
        (Draw(3, 5, 1), "v"),
        (Draw(5, 3, 1), "w"),
        (Draw(3, 1, 5), "w"),
    ],
    ids=["draw", "step", "seed", "parameter", "seed and step exchanged", "step and draw exchanged"],
)
def test_neighbouring_addresses_are_uncorrelated(other: Draw, name: str) -> None:
    a, b = normal(DRAW, "w", 0, N).double(), normal(other, name, 0, N).double()
    assert abs((a * b).mean()) < 5 / N**0.5
    assert abs((a[:-1] * b[1:]).mean()) < 5 / N**0.5


def test_elements_of_a_draw_are_uncorrelated_at_every_short_lag() -> None:
    z = normal(DRAW, "w", 0, N).double()
    for lag in (1, 2, 16, 511, 512, 513, 1024):
        assert abs((z[:-lag] * z[lag:]).mean()) < 5 / N**0.5, f"lag {lag}"
        assert abs(((z[:-lag] ** 2 - 1) * (z[lag:] ** 2 - 1)).mean()) < 5 * 2 / N**0.5, f"squares at lag {lag}"


def test_addresses_that_could_be_confused_have_different_keys() -> None:
    keys = [
        address_key("a", 1, 2),
        address_key("a", 12),
        address_key("a", "1", "2"),
        address_key("a", "12"),
        address_key("a", 1, "2"),
        address_key("b", 1, 2),
        address_key("a", "1s2"),
    ]
    assert len(set(keys)) == len(keys)


def test_a_parameters_key_is_that_of_its_whole_address() -> None:
    for draw in (DRAW, Draw(-1, 2**62, 0)):
        for name in ("w", "model.layers.0.mlp", ""):
            assert noise_key(draw, name) == address_key("threepo-noise", draw.seed, draw.step, draw.index, name)


def test_two_purposes_never_share_noise() -> None:
    """Every use of draws under one seed and step has keys of its own, up to the largest index."""
    draws = [Draw(0, 3, index, purpose) for purpose in Purpose for index in (0, 1, 2**20 - 1)]
    assert len({noise_key(draw, "w") for draw in draws}) == len(draws)
    with pytest.raises(AssertionError, match="another purpose"):
        noise_key(Draw(0, 3, 2**20), "w")


@pytest.mark.parametrize(
    ("purpose", "number"), [(Purpose.TRAINING, 5), (Purpose.EVALUATION, 2**20 + 5), (Purpose.FINE_TUNING, 2**21 + 5)]
)
def test_the_noise_of_runs_that_were_saved_stays(purpose: Purpose, number: int) -> None:
    assert noise_key(Draw(7, 3, 5, purpose), "w") == address_key("threepo-noise", 7, 3, number, "w")


def test_uniforms_are_uniform_and_belong_to_their_key() -> None:
    keys = [address_key("test", i) for i in range(200)]
    u = uniforms(keys, 0, 1000)
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    assert scipy.stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-3
    assert torch.equal(uniforms(keys[17:18], 100, 200), u[17:18, 100:200])
