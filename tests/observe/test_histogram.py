from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from backquant.errors import ConfigError
from backquant.observe import HistogramObserver, default_histogram_fake_quant

SETTINGS: dict[str, dict[str, Any]] = {
    "unsigned": {},
    "reduced": {"reduce_range": True},
    "symmetric": {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric},
    "four bits": {"dtype": torch.qint8, "quant_min": -8, "quant_max": 7},
}
DISTRIBUTIONS = [
    "normal",
    "heavy-tailed",
    "cauchy",
    "bimodal",
    "relu",
    "constant",
    "single value",
    "huge outlier",
    "denormal",
    "all negative",
    "infinities",
    "discrete",
    "saturated",
    "uniform",
]


def sample(name: str, seed: int, size: int = 10_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator)
    u = torch.rand(size, generator=generator)
    half = size // 2
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "normal": lambda: x,
        "heavy-tailed": lambda: x / u.clamp(min=1e-3),
        "cauchy": lambda: torch.tan(torch.pi * (u - 0.5)),
        "bimodal": lambda: torch.cat((x[:half] * 0.3 - 3, x[half:] * 0.1 + 2)),
        "relu": x.relu,
        "constant": lambda: torch.full((size,), 3.7) * (seed - 4.5),
        "single value": lambda: x[:1],
        "huge outlier": lambda: torch.cat((x[1:], torch.tensor([1e4 * (seed + 1)]))),
        "denormal": lambda: x * 1e-40,
        "all negative": lambda: -x.abs() - 0.1,
        "infinities": lambda: torch.cat((x, torch.tensor([float("inf"), float("-inf")]))),
        "discrete": lambda: (u * 17).floor() / 16,
        "saturated": lambda: (x * 4).clamp(0, 6),
        "uniform": lambda: u * 2 - 0.7,
    }
    return makers[name]()


def squared_error(x: torch.Tensor, observer: Any) -> float:
    scale, zero_point = observer.calculate_qparams()
    bounds = observer.quant_min, observer.quant_max
    rounded = torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero_point), *bounds)
    return float((x - rounded).double().square().sum())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_error_is_at_most_two_percent_above_the_oracles(
    name: str, setting: str, oracle: Callable[..., Any], quietly: Callable[..., Any]
) -> None:
    """On several seeds, data in four batches; where the oracle's error is 0, ours is 0."""
    for seed in range(1 if name == "denormal" else 4):  # the oracle takes seconds on denormals
        x = sample(name, seed)
        ours = HistogramObserver(**SETTINGS[setting])
        theirs = oracle("HistogramObserver", **SETTINGS[setting])
        for batch in x.chunk(4):
            quietly(ours, batch), quietly(theirs, batch)
        finite = x[x.isfinite()]
        found, limit = squared_error(finite, ours), 1.02 * squared_error(finite, theirs)
        assert found <= limit, (seed, found, limit)


@pytest.mark.parametrize(
    "name", [n for n in DISTRIBUTIONS if n not in ("denormal", "single value")]
)
@pytest.mark.parametrize("size", [32_000, 100_000])
def test_the_error_of_samples_is_at_most_two_percent_above_the_oracles(
    name: str, size: int, oracle: Callable[..., Any], quietly: Callable[..., Any]
) -> None:
    """Batches so large that of their bulk only every n-th value is counted."""
    for seed in range(4):
        x = sample(name, seed, size)
        ours, theirs = HistogramObserver(), oracle("HistogramObserver")
        for batch in x.chunk(4):
            quietly(ours, batch), quietly(theirs, batch)
        finite = x[x.isfinite()]
        assert (ours.min_val, ours.max_val) == (finite.min(), finite.max())
        found, limit = squared_error(finite, ours), 1.02 * squared_error(finite, theirs)
        assert found <= limit, (seed, found, limit)


def test_denormals_of_more_seeds_give_the_smallest_scale() -> None:
    """With scale eps every denormal rounds to zero, whatever the oracle's range is."""
    for seed in range(10):
        observer = HistogramObserver()
        observer(sample("denormal", seed))
        scale, _ = observer.calculate_qparams()
        assert scale.item() == torch.finfo(torch.float32).eps


@pytest.mark.parametrize("size", [1000, 100_000])
def test_infinities_are_left_out_and_counted(size: int) -> None:
    clean, dirty = HistogramObserver(), HistogramObserver()
    x = sample("infinities", 0, size)
    dirty(x)
    clean(x[x.isfinite()])
    assert (clean.ignored, dirty.ignored) == (0, 2)
    for key, value in clean.state_dict().items():
        assert torch.equal(dirty.state_dict()[key], value), key


@pytest.mark.parametrize("name", [n for n in DISTRIBUTIONS if n != "infinities"])
def test_any_order_and_any_tree_of_merges_gives_the_same_bits(name: str) -> None:
    x = sample(name, seed=3, size=3000)
    whole = HistogramObserver()
    whole(x)
    parts = []
    for batch in reversed(x.split(700)):
        part = HistogramObserver()
        part(batch)
        parts.append(part)
    forward, backward = copy.deepcopy(parts), copy.deepcopy(parts)
    line = forward[0]
    for part in forward[1:]:
        line = line.merge(part)
    while len(backward) > 1:
        backward = [*backward[2:], backward[1].merge(backward[0])]
    resumed = HistogramObserver()
    for batch in x.split(1100):
        resumed = pickle.loads(pickle.dumps(resumed))
        resumed(batch)
    for other in (line, backward[0], resumed, HistogramObserver().merge(whole)):
        for key, value in whole.state_dict().items():
            assert torch.equal(other.state_dict()[key], value), key
        assert all(map(torch.equal, other.calculate_qparams(), whole.calculate_qparams()))


def test_memory_is_bounded_by_the_grid() -> None:
    observer, most = HistogramObserver(), 2 * 255 * 128  # bins per sign and power of two
    bits = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    for batch in x[x.isfinite()].split(4000):
        observer(batch)
    assert 0.9 * most < observer.bin_key.numel() <= most
    for _ in range(3):
        observer(torch.randn(10_000))
    assert observer.bin_key.numel() <= most
    usual = HistogramObserver()
    for _ in range(10):
        usual(torch.randn(50_000))
    assert usual.bin_key.numel() < 4000


@pytest.mark.parametrize(
    ("bins", "bits"), [(1, 7), (16, 7), (256, 7), (2048, 7), (2049, 8), (10**9, 10)]
)
def test_bins_set_the_resolution(bins: int, bits: int) -> None:
    observer = HistogramObserver(bins=bins)
    assert observer.mantissa_bits == bits
    observer(torch.randn(1000))
    assert observer.bin_count.sum() == 1000
    assert torch.isfinite(observer.calculate_qparams()[0]).all()


def test_other_resolutions_do_not_merge() -> None:
    with pytest.raises(ConfigError, match="bins: 2048 and 1024"):
        HistogramObserver().merge(HistogramObserver(bins=1024))


def test_dynamic_is_refused() -> None:
    with pytest.raises(ConfigError, match="not at inference"):
        HistogramObserver(is_dynamic=True)


def test_counts_are_integers_and_extremes_exact() -> None:
    observer = HistogramObserver()
    x = torch.randn(1000)
    observer(x)
    kinds = [getattr(observer, f"bin_{n}").dtype for n in ("key", "count", "first", "second")]
    assert kinds == [torch.int32, torch.int64, torch.int64, torch.int64]
    assert (observer.min_val.item(), observer.max_val.item()) == (x.min().item(), x.max().item())
    assert "values=1000" in repr(observer)


def test_the_histogram_fake_quantizer_rounds_to_the_best_range() -> None:
    fake = default_histogram_fake_quant()
    observer = HistogramObserver(quant_min=0, quant_max=255, reduce_range=True)
    x = torch.randn(1000)
    observer(x)
    scale, zero_point = observer.calculate_qparams()
    expected = torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero_point), 0, 127)
    assert torch.equal(fake(x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_model_in_half_precision_still_measures(dtype: torch.dtype, when: str) -> None:
    reference, observer = HistogramObserver(), HistogramObserver()
    x = torch.randn(2, 2000).to(dtype).float()
    reference(x[0]), reference(x[1])
    if when == "before":
        observer.to(dtype)
    observer(x[0].to(dtype))
    observer.to(dtype)
    observer(x[1].to(dtype))
    assert torch.equal(observer.bin_count, reference.bin_count)
    assert torch.equal(observer.bin_second, reference.bin_second)
    scale = observer.calculate_qparams()[0].float()
    assert float(scale) == pytest.approx(float(reference.calculate_qparams()[0]), rel=0.02)


def test_histogram_reads_the_state_as_pytorchs_attribute_does() -> None:
    observer = HistogramObserver(bins=256)
    assert observer.histogram.tolist() == [0.0] * 256
    data = torch.randn(3000)
    observer(data[:1000])
    observer(data[1000:])
    assert observer.histogram.shape == (256,)
    assert observer.histogram.double().sum().item() == pytest.approx(3000, rel=1e-6)
    exact = torch.histc(data, 256, observer.min_val.item(), observer.max_val.item())
    # values lie within the bins of the grid as far as is known of them
    assert (observer.histogram.cumsum(0) - exact.cumsum(0)).abs().max() <= 0.01 * 3000
    assert "histogram" not in observer.state_dict()  # it is no state


def test_histogram_of_values_that_are_known_exactly() -> None:
    observer = HistogramObserver(bins=7)
    for value in (1.0, 4.0, 2.0, 8.0, 8.0):  # each alone in its bin of the grid
        observer(torch.tensor([value]))
    assert observer.histogram.tolist() == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 2.0]
    one = HistogramObserver(bins=4)
    one(torch.tensor([2.0, 2.0]))
    assert one.histogram.sum().item() == 2
