"""Operators that give truths or positions, and those of one record, in a trace and in an export."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
from backquant.backend_config import BackendConfig, BackendDefaults, DTypeConfig, QuantDefault
from backquant.operators import entries_of

NAMES = (
    "add",
    *(
        "relu6",
        "mul",
        "div",
        "pow",
        "gt",
        "ge",
        "lt",
        "le",
        "eq",
        "ne",
        "exp",
        "abs",
        "neg",
        "softplus",
    ),
    *("sum", "amax", "amin", "argmax", "argmin", "cat", "slice", "adaptive_max_pool2d", "gather"),
    *("index_select", "log_softmax"),
    *("clamp", "log", "sqrt", "rsqrt", "trunc", "logsigmoid", "permute"),
)
INDEX = torch.tensor([0, 2, 1, 3])

CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu6": nn.ReLU6(),
    "div": lambda x: x / 2.5,
    "pow": lambda x: x.pow(2),
    "exp": torch.exp,
    "abs and neg": lambda x: -x.abs(),
    "softplus": F.softplus,
    "sum": lambda x: x.sum(1, keepdim=True),
    "amax": lambda x: x.amax((2, 3)),
    "adaptive_max_pool2d": nn.AdaptiveMaxPool2d(2),
    "index_select": lambda x: x.index_select(1, INDEX),
    "gather": lambda x: torch.gather(x, 1, torch.zeros(1, 4, 6, 6, dtype=torch.long)),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "slice": lambda x: torch.cat([x[:, 2:], x[:, :2]], 1),
    "argmax": lambda x: x.argmax(1),
    "gt": lambda x: torch.gt(x, 0.1),
    "eq": lambda x: x.eq(x.abs()),
    "log": lambda x: torch.log(x.abs() + 2),
    "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: (x.absolute() + 2).rsqrt(),
    "logsigmoid": F.logsigmoid,
    # other names, which exports keep
    "fix": torch.fix,
    "divide": lambda x: torch.divide(x, torch.exp(x)),
    "true_divide": lambda x: x.true_divide(x.exp()),
    "clip": lambda x: x.clip(-0.5, 0.5),
    "negative": torch.negative,
    "concat": lambda x: torch.concat([x, -x], 1),
    "permute_copy": lambda x: torch.permute_copy(x, (0, 2, 3, 1)),
}


class After(nn.Module):
    """An operator after a convolution."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.call = nn.Conv2d(3, 4, 3), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.conv(x))


def described() -> BackendConfig:
    values = DTypeConfig(torch.qint8, torch.qint8)
    weighted = DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float)
    made = BackendConfig("npu").set_defaults(
        BackendDefaults(
            QuantDefault("minmax", torch.qint8, torch.per_tensor_affine),
            QuantDefault("minmax", torch.qint8, torch.per_tensor_symmetric),
        )
    )
    rows = [*entries_of(["conv2d"], [weighted]), *entries_of(NAMES, [values])]
    return made.set_backend_pattern_configs(rows)


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_nothing_stays_float(name: str, exported: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    model = After(CALLS[name]).eval()
    program = torch.export.export(model, (x,)) if exported else model
    quantized = backquant.quantize(program, x, backend=described(), calibration=[x])
    assert [row.node for row in quantized.report.rows if row.outcome == "float"] == []
    assert quantized(x).dtype == model(x).dtype


@pytest.mark.parametrize("named", [False, True])
def test_a_mask_is_not_observed(named: bool) -> None:
    """What a comparison gives has no qparams, with an entry for it and without."""
    backend = described()
    if not named:
        rows = [row for row in backend.configs if row.pattern not in (torch.gt, "gt")]
        backend = (
            BackendConfig("npu").set_defaults(backend.defaults).set_backend_pattern_configs(rows)
        )
    x = torch.randn(1, 3, 8, 8)
    model = After(lambda y: y * torch.gt(y, 0)).eval()
    quantized = backquant.quantize(model, x, backend=backend, calibration=[x])
    torch.testing.assert_close(quantized(x), model(x), atol=0.1, rtol=0)
