"""Floats to bytes by the library, beside the operator of the reference model."""

from __future__ import annotations

import pytest
import torch

from backquant.graph import register_quantized_decomposed
from backquant.lower.kernels import boundary

pytestmark = pytest.mark.usefixtures("native_library")


def reference(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    register_quantized_decomposed()
    run = torch.ops.quantized_decomposed.quantize_per_tensor.default
    return run(x, scale, zero_point, 0, 255, torch.uint8)


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (33, 3), (2, 5, 9, 11), (1, 64, 4, 4), (5, 4099)]
)
@pytest.mark.parametrize("zero_point", [0, 3, 128, 255])
def test_the_integers_are_those_of_the_reference_model(
    shape: tuple[int, ...], zero_point: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape) * 40
    found = boundary.quantized(x, 0.37, zero_point)
    assert found is not None
    assert torch.equal(found, reference(x, 0.37, zero_point))


@pytest.mark.parametrize("zero_point", [3, 4])
def test_halfway_between_two_integers_and_far_away(zero_point: int) -> None:
    x = torch.cat([torch.arange(-60, 600) / 4, torch.tensor([-1e30, 1e30, -torch.inf, torch.inf])])
    found = boundary.quantize(x, 0.5, zero_point, 0, 255, torch.uint8)
    assert torch.equal(found, reference(x, 0.5, zero_point))


def test_memory_formats() -> None:
    x = torch.randn(2, 5, 9, 11)
    last = x.contiguous(memory_format=torch.channels_last)
    found = boundary.quantized(last, 0.02, 100)
    assert found is not None and found.stride() == last.stride()
    assert torch.equal(found, reference(x, 0.02, 100))
    for other in (x.transpose(1, 2), x[:, ::2], x.expand(2, 5, 9, 11)[:, :, 1:], x.double(), x[:0]):
        assert boundary.quantized(other, 0.02, 100) is None


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_decide_nothing(threads: int) -> None:
    x, before = torch.randn(300_001), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = boundary.quantized(x, 0.02, 100)
    finally:
        torch.set_num_threads(before)
    assert found is not None and torch.equal(found, reference(x, 0.02, 100))


def test_wrong_calls_of_the_operators_are_refused() -> None:
    run = torch.ops.backquant_kernels
    x = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    for wrong in (x.double(), x[:, ::2], x.to(torch.uint8)):
        with pytest.raises(RuntimeError, match="float32"):
            run.quantized(wrong, 0.1, 0)
    for gate in (torch.ones(2, 4), torch.ones(2, 3, 1, 1), torch.ones(1, 4, 1, 1).double()):
        with pytest.raises(RuntimeError, match="a gate has one number a channel"):
            run.quantized_product(x, gate, 0.1, 0)
    with pytest.raises(RuntimeError, match="channels last"):
        run.quantized_product(x.contiguous(), torch.ones(2, 4, 1, 1), 0.1, 0)


@pytest.mark.parametrize("threads", [1, 2])
def test_tables(threads: int) -> None:
    table, before = torch.randperm(256).to(torch.uint8), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in ((), (1,), (63,), (64,), (2, 5, 9, 11), (70_001,)):
            x = torch.randint(0, 256, shape, dtype=torch.uint8)
            found = boundary.looked_up(x, table)
            assert found is not None and torch.equal(found, table[x.long()])
    finally:
        torch.set_num_threads(before)


def test_tables_of_images() -> None:
    table, x = torch.randperm(256).to(torch.uint8), torch.randint(0, 256, (2, 5, 9, 11))
    x = x.to(torch.uint8).contiguous(memory_format=torch.channels_last)
    found = boundary.looked_up(x, table)
    assert found is not None and found.stride() == x.stride()
    assert torch.equal(found, table[x.long()])
    for other in (x.transpose(1, 2), x[:, ::2], x[:0], x.view(torch.int8)):
        assert boundary.looked_up(other, table) is None
