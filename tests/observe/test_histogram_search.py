from __future__ import annotations

import pytest
import torch

from backquant.dtypes import QuantRange, affine_qparams
from backquant.observe.histogram_grid import Counted, Spread, add_to_bins
from backquant.observe.histogram_search import SquaredError, best_range

UNSIGNED = QuantRange(torch.quint8, torch.per_tensor_affine, 0, 255)
SIGNED = QuantRange(torch.qint8, torch.per_tensor_symmetric, -128, 127)
FOUR_BITS = QuantRange(torch.qint8, torch.per_tensor_affine, -8, 7, customized=True)
EPS = torch.tensor([torch.finfo(torch.float32).eps])


def spread(x: torch.Tensor) -> Spread:
    return add_to_bins(None, [Counted(x, 1)], 7).spread(7, float(x.min()), float(x.max()))


def measured(x: torch.Tensor, scale: float, zero_point: int, target: QuantRange) -> float:
    rounded = torch.fake_quantize_per_tensor_affine(
        x, scale, zero_point, target.quant_min, target.quant_max
    )
    return float((x - rounded).double().square().sum())


@pytest.mark.parametrize("target", [UNSIGNED, SIGNED, FOUR_BITS])
@pytest.mark.parametrize("seed", range(3))
def test_the_estimate_is_close_to_the_measured_error(target: QuantRange, seed: int) -> None:
    """Within 1 %, for ranges that clip nothing, little, and most."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(seed))
    values = spread(x)
    ends = torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0, 5.0])
    scale, zero_point = affine_qparams(-ends, ends, target, EPS)
    estimate = SquaredError.of(values)(scale.numpy(), zero_point.numpy(), target)
    for s, z, found in zip(scale, zero_point, estimate, strict=True):
        assert float(found) == pytest.approx(measured(x, float(s), int(z), target), rel=0.01)


def test_the_estimate_is_exact_on_discrete_values() -> None:
    x = torch.arange(-20, 21) / 7
    values = spread(x)
    scale, zero_point = torch.tensor([0.1, 0.03]), torch.tensor([128, 100])
    estimate = SquaredError.of(values)(scale.numpy(), zero_point.numpy(), UNSIGNED)
    for s, z, found in zip(scale, zero_point, estimate, strict=True):
        assert float(found) == pytest.approx(measured(x, float(s), int(z), UNSIGNED), rel=1e-4)


@pytest.mark.parametrize("target", [UNSIGNED, SIGNED, FOUR_BITS])
def test_no_range_of_a_dense_scan_is_noticeably_better(target: QuantRange) -> None:
    x = torch.randn(5_000, generator=torch.Generator().manual_seed(1)) ** 3
    values = spread(x)

    def errors(low: torch.Tensor, high: torch.Tensor) -> list[float]:
        scale, zero_point = affine_qparams(low, high, target, EPS)
        return SquaredError.of(values)(scale.numpy(), zero_point.numpy(), target).tolist()

    low, high = torch.from_numpy(best_range(values, target, EPS.item()))
    grid = torch.linspace(0.02, 1.05, 70)
    scan = torch.cartesian_prod(grid * x.min(), grid * x.max())
    found = errors(low[None], high[None])
    assert min(found) <= 1.005 * min(errors(scan[:, 0], scan[:, 1]))


def test_an_exact_range_is_kept() -> None:
    low, high = best_range(spread(torch.arange(256) / 255), UNSIGNED, EPS.item())
    assert (low.item(), high.item()) == (0.0, 1.0)


def test_ranges_hold_zero() -> None:
    low, high = best_range(spread(torch.linspace(3, 4, 1000)), UNSIGNED, EPS.item())
    assert low.item() == 0.0
    assert high.item() == pytest.approx(4, rel=0.02)
    low, high = best_range(spread(-torch.linspace(3, 4, 1000)), UNSIGNED, EPS.item())
    assert high.item() == 0.0
    assert low.item() == pytest.approx(-4, rel=0.02)


def test_an_overflowing_range_is_avoided() -> None:
    """The widest range has no finite scale in float32; the search finds one that has."""
    big = torch.finfo(torch.float32).max
    low, high = best_range(spread(torch.tensor([-big, 0.0, big])), UNSIGNED, EPS.item())
    scale, _ = affine_qparams(torch.tensor(low), torch.tensor(high), UNSIGNED, EPS)
    assert torch.isfinite(scale).all()
