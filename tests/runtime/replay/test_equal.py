"""What a model gives depends on no recorded call, no time, and no setting of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import backquant
from backquant.api import convert_fx, prepare_fx
from backquant.lower.kernels.engine_setting import packing_for, running
from backquant.runtime import QuantizedModel

ENGINES = ("x86", "onednn", "fbgemm", "qnnpack", "native")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def lowered(model: nn.Module, x: torch.Tensor, engine: str) -> QuantizedModel:
    mapping = backquant.get_default_qconfig_mapping(engine)
    backend = backquant.get_backend_config(engine)
    prepared = prepare_fx(model.eval(), mapping, (x,), backend_config=backend)
    prepared(x)
    return convert_fx(prepared)  # type: ignore[return-value]


class Counts(nn.Module):
    """The number of samples as a number, which a quiet call hides."""

    def __init__(self, count: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(c, 8, 3, padding=1, bias=False) for c in (3, 8))
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = torch.relu(self.second(torch.relu(self.first(x))))
        return torch.relu(torch.relu(value).mean((1, 2, 3)) * self.count(x) - 0.1)


def size(x: torch.Tensor) -> float:
    return x.shape[0]


def elements(x: torch.Tensor) -> float:
    return x.numel() / 768


def length(x: torch.Tensor) -> float:
    return len(x)


@pytest.mark.parametrize("count", [size, elements, length])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_recorded_call_of_zeros_decides_nothing(
    engine: str, count: Callable[[torch.Tensor], float]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16)
    with torch.no_grad():
        model = lowered(Counts(count), x, engine)
        for _ in range(3):
            assert not model(torch.zeros_like(x)).any()
        expected = model.graph_module(x)
        assert expected.max() > 0
        for _ in range(12):
            assert torch.equal(model(x), expected)


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(c, 9, 3, padding=1) for c in (3, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = torch.relu(self.first(x))
        return nn.functional.hardswish(value + self.second(value))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_users_engine_changes_no_bit(engine: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 9, 9)
    with torch.no_grad():
        model = lowered(Added(), x, engine)
        expected = model(x)
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = "qnnpack"
        try:
            for _ in range(6):
                assert torch.equal(model(x), expected)
                assert torch.backends.quantized.engine == "qnnpack"
        finally:
            torch.backends.quantized.engine = before


def test_packing_within_a_call_keeps_the_users_engine() -> None:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "qnnpack"
    try:
        with running():
            assert torch.backends.quantized.engine != "qnnpack"
            for engine in ("fbgemm", "qnnpack"):
                with packing_for(engine):
                    assert torch.backends.quantized.engine == engine
        assert torch.backends.quantized.engine == "qnnpack"
    finally:
        torch.backends.quantized.engine = before


def test_an_addition_by_torch_rounds_the_end_of_a_row_otherwise() -> None:
    """Why ``quantized::add`` is no reason to compute a batch in parts; when it fails, it may be one."""
    one, other = torch.cartesian_prod(*[torch.arange(256, dtype=torch.uint8)] * 2).unbind(1)
    generator = torch.Generator().manual_seed(0)
    differ = 0
    for _ in range(16):
        scales = (torch.rand(3, generator=generator) * 0.1 + 0.005).tolist()
        zeros = torch.randint(0, 255, (3,), generator=generator).tolist()

        def added(
            x: torch.Tensor,
            y: torch.Tensor,
            scales: list[float] = scales,
            zeros: list[int] = zeros,
        ) -> torch.Tensor:
            pair = [
                torch._make_per_tensor_quantized_tensor(value.clone(), scale, zero)
                for value, scale, zero in zip((x, y), scales, zeros, strict=False)
            ]
            return torch.ops.quantized.add(*pair, scales[2], zeros[2]).int_repr()

        rows = zip(one.split(31), other.split(31), strict=True)
        ends = torch.cat([added(*row) for row in rows])
        differ += int((added(one, other) != ends).sum())
    assert differ
