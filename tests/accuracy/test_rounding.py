from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from backquant.accuracy.rounding import (
    Grid,
    adaround,
    better_rows,
    clipped,
    columns,
    descended,
    gptq,
    gram,
    quadratic,
)

GRID = Grid(torch.tensor(0.25), torch.tensor(0.0), -8, 7)


def problem(seed: int, count: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and the gram matrix of inputs that depend on each other."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(64, count, generator=made) @ torch.randn(count, count, generator=made)
    return torch.randn(1, rows, count, generator=made) * 0.5, (x.T @ x / 64)[None]


def best_of_all(weight: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Every choice of below and above, for each row."""
    ups = torch.tensor(list(itertools.product((0.0, 1.0), repeat=weight.shape[-1])))
    tried = GRID.values(GRID.floor(weight).unsqueeze(2) + ups)
    change = tried - weight.unsqueeze(2)
    return ((change @ hessian) * change).sum(-1).amin(-1)


@pytest.mark.parametrize("seed", [0, 2])
def test_roundings_are_near_the_best_of_all(seed: int) -> None:
    weight, hessian = problem(seed, 8)
    best = best_of_all(weight, hessian).sum()
    nearest = quadratic(GRID.nearest(weight) - weight, hessian).sum()
    learned = adaround(weight, hessian, GRID)
    turned = descended(weight, hessian, GRID, gptq(weight, hessian, GRID))
    chosen = better_rows(weight, hessian, learned, turned)
    one, both = (quadratic(made - weight, hessian).sum() for made in (learned, chosen))
    assert both <= one <= best + 0.5 * (nearest - best)


@pytest.mark.parametrize("seed", range(3))
def test_gptq_follows_its_closed_form(seed: int) -> None:
    """After each column the rest is the best there is: the least squares solution with what is rounded
    fixed, column by column, without any blocks or factors; the column with the largest inputs first."""
    weight, hessian = problem(seed, 140, rows=2)
    order = hessian[0].diagonal().argsort(descending=True)
    weight, hessian = weight[..., order], hessian[:, order][..., order]
    damped = hessian[0].double() + 0.01 * hessian[0].double().diagonal().mean() * torch.eye(140)
    left = weight[0].double().clone()
    for column in range(140):
        rounded = GRID.nearest(left[:, column])
        error = left[:, column] - rounded
        left[:, column] = rounded
        rest = slice(column + 1, None)
        if column < 139:
            step = torch.linalg.solve(damped[rest, rest], damped[rest, column])
            left[:, rest] += error[:, None] * step[None]
    mixed = torch.randperm(140, generator=torch.Generator().manual_seed(seed))
    given = hessian.double()[:, mixed][..., mixed]
    found = torch.empty_like(weight.double())
    found[..., mixed] = gptq(weight.double()[..., mixed], given, GRID)
    assert torch.allclose(found[0], left, atol=1e-9)
    loss, nearest = (
        quadratic(made - weight, hessian).sum() for made in (found.float(), GRID.nearest(weight))
    )
    assert loss < 0.7 * nearest


def test_scales_follow_their_columns_when_columns_are_ordered() -> None:
    """A grid of two scales: each column ends on the grid that it had."""
    weight, hessian = problem(5, 16)
    scale = torch.where(torch.arange(16) < 8, 0.25, 0.125).expand_as(weight)
    grid = Grid(scale, torch.zeros(()), -8, 7)
    made = gptq(weight, hessian, grid)
    assert torch.equal(made, grid.nearest(made)) and not torch.equal(made, GRID.nearest(made))
    nearest, own = (quadratic(x - weight, hessian).sum() for x in (grid.nearest(weight), made))
    assert own < 0.8 * nearest


def test_sums_of_wide_layers_are_whole() -> None:
    """Of more than 512 columns, one half of the matrix is copied from the other."""
    x = torch.randn(40, 1100)
    found, count = gram(nn.Linear(1100, 1), x)
    assert count == 40
    assert torch.allclose(found[0], x.T @ x, atol=1e-3)


def test_descent_never_makes_it_worse_and_stays_in_the_range() -> None:
    weight, hessian = problem(9, 24)
    weight = 4 * weight  # many at the ends
    nearest = GRID.nearest(weight)
    made = descended(weight, hessian, GRID, nearest)
    assert bool((quadratic(made - weight, hessian) <= quadratic(nearest - weight, hessian)).all())
    steps = made / GRID.scale
    assert torch.equal(steps, steps.round()) and steps.min() >= -8 and steps.max() <= 7


def test_inputs_that_are_never_there_do_no_harm() -> None:
    weight, hessian = problem(1, 8)
    hessian[:, :, 3] = hessian[:, 3, :] = 0
    assert torch.isfinite(gptq(weight, hessian, GRID)).all()
    assert gptq(weight, torch.zeros_like(hessian), GRID).equal(GRID.nearest(weight))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 4),
        nn.Conv1d(6, 4, 3, stride=2, padding=1),
        nn.Conv2d(4, 8, (3, 2), padding=(1, 0), dilation=(1, 2), groups=2),
        nn.Conv2d(4, 4, 3, padding="same", padding_mode="reflect", groups=4),
        nn.Conv3d(2, 2, 2, stride=(1, 2, 1)),
    ],
    ids=str,
)
def test_the_quadratic_form_is_the_error_of_the_output(layer: nn.Module) -> None:
    torch.manual_seed(0)
    is_linear = isinstance(layer, nn.Linear)
    size = (5, 6) if is_linear else (2, layer.in_channels, *[7] * len(layer.kernel_size))  # type: ignore[arg-type]
    x = torch.randn(size)
    hessian, count = gram(layer, x)
    change = 0.1 * torch.randn_like(layer.weight)  # type: ignore[arg-type]
    with torch.no_grad():
        before = layer(x)
        layer.weight += change  # type: ignore[operator]
        error = (layer(x) - before).pow(2).sum()
    groups = 1 if is_linear else layer.groups
    loss = quadratic(columns(change, groups), hessian).sum()
    assert torch.allclose(loss, error, rtol=1e-4)
    assert count * layer.weight.shape[0] == before.numel()  # type: ignore[index]


def test_clipping_helps_where_a_large_weight_counts_little() -> None:
    weight, hessian = problem(2, 16, rows=8)
    weight[..., 0] = 6.0
    hessian[:, 0, :] = hessian[:, :, 0] = 0
    grid = Grid(weight.abs().amax(-1, keepdim=True) / 7, torch.tensor(0.0), -8, 7)
    share = clipped(weight, hessian, grid)
    narrow = Grid(grid.scale * share.unsqueeze(-1), grid.zero_point, -8, 7)
    before, after = (quadratic(g.nearest(weight) - weight, hessian) for g in (grid, narrow))
    assert bool((after <= before).all()) and after.sum() < 0.5 * before.sum()


@pytest.mark.parametrize(
    ("layer", "shape", "taken"),
    [
        (nn.Linear(3, 2), (2, 50, 3), 10),
        (nn.Conv1d(3, 2, 3, padding=1), (2, 3, 50), 10),
        (nn.Conv2d(4, 2, 3, stride=2, groups=2), (2, 4, 41, 41), 50),
        (nn.Conv3d(1, 1, 2, dilation=2), (1, 1, 10, 10, 10), 64),
    ],
)
def test_of_many_positions_some_say_as_much(
    layer: nn.Module, shape: tuple[int, ...], taken: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape) + 1
    (every, many), (some, few) = gram(layer, x), gram(layer, x, taken)
    assert taken <= few < 2.5 * taken < many
    assert float((every / many - some / few).norm() / (every / many).norm()) < 0.5
    assert torch.equal(gram(layer, x, many)[0], every)
