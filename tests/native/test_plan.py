"""The library's operators over generated layers, beside exact arithmetic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from backquant.native.library import Case, computed, image_results, layout
from backquant.native.plan import Result, Shape
from layers import layers

pytestmark = pytest.mark.usefixtures("native_library")


@given(layers())
@example(Case((2, 3, 4, 9), Shape((8, 3, 1, 3)), Result(1.0, 0, torch.float32, "none", (), "")))
def test_any_layer_is_right(case: Case) -> None:
    if not case.shape.is_known:
        return
    found, expected = computed(case, torch.Generator().manual_seed(1), layout())
    off = float((found.double() - expected).abs().max())
    if case.result.dtype == torch.uint8:
        assert off <= 0.5 + 2e-3
    else:
        assert off <= 1e-5 * float(expected.abs().max())
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("scale", [0.5, 0.02, 0.0008, 0.0004])
def test_gelu_of_bytes(scale: float) -> None:
    """A shorter polynomial where its error is a 64th of a step at most; the exact one for finer steps."""
    result = Result(scale, 17, torch.uint8, "gelu", (), "none")
    assert result.activation == ("GELU_BYTES" if scale > 0.0005 else "GELU")
    case = Case((1, 20, 40, 40), Shape((72, 20, 1, 1)), result)
    found, expected = computed(case, torch.Generator().manual_seed(1), layout())
    assert (found.double() - expected).abs().max() <= 0.5 + 1 / 64


@given(st.tuples(*(st.integers(1, most) for most in (3, 300, 9, 9))))
@example((1, 64, 3, 3))
@example((2, 257, 1, 1))
def test_any_image_is_right(size: tuple[int, int, int, int]) -> None:
    for _, found, expected in image_results(size, torch.Generator().manual_seed(1)):
        assert found.shape == expected.shape
        assert (found.double() - expected.clamp(0, 255)).abs().max() <= 0.5 + 2e-3


def test_what_is_no_image_is_refused() -> None:
    run = torch.ops.backquant_kernels
    x = torch.zeros(1, 4, 2, 2, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="channels last"):
        run.averaged(torch.zeros(1, 4, 2, 2, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="one number a channel"):
        run.gated(x, x, 0.0, 0.0, 1.0, 0.0, 0)
    with pytest.raises(RuntimeError, match="scales and shifts"):
        run.rescaled(x, torch.zeros(8), 0)


def test_what_is_no_plan_is_refused() -> None:
    run = torch.ops.backquant_kernels
    x = torch.zeros(1, 4, 2, 2, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="not a plan"):
        run.convolution(x, torch.zeros(1024, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="not a plan"):
        run.convolution(x, torch.zeros(8, dtype=torch.uint8))


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(1, 5, 2, 2, dtype=torch.uint8),
        torch.zeros(1, 20, 8, 8, dtype=torch.uint8),  # channels first
        torch.zeros(20, 8, 8, dtype=torch.uint8),
        torch.zeros(1, 20, 8, 8),
    ],
)
def test_what_a_layer_does_not_take_is_refused(x: torch.Tensor) -> None:
    from backquant.native.library import PlainWeights
    from backquant.native.plan import plan

    weight = torch.ones(8, 20, 1, 1, dtype=torch.int8)
    weights = PlainWeights(weight, torch.ones(8), torch.zeros(8))
    result = Result(1.0, 0, torch.uint8, "none", (), "")
    made = plan(Shape((8, 20, 1, 1)), weights, (1.0, 0), result, layout=layout())
    with pytest.raises(RuntimeError, match="convolution takes uint8"):
        torch.ops.backquant_kernels.convolution(x, made)
