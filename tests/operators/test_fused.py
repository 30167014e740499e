"""Operators that run as one kernel, by their names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
import snapshots
from backquant.backend_config import BackendPatternConfig, DTypeConfig
from backquant.errors import SpecError
from backquant.match.satisfiable import never_matched
from backquant.nn.quantized import reference
from backquant.observe import FakeQuantize, MinMaxObserver
from backquant.operators import entries_of, folding_entries
from backquant.operators.described import fused_entries
from backquant.qconfig import QConfig, QConfigMapping

ACTIVATION, WEIGHT = (
    FakeQuantize.with_args(
        observer=MinMaxObserver,
        dtype=torch.qint8,
        qscheme=torch.per_tensor_symmetric,
        quant_min=-128,
        quant_max=127,
    )
    for _ in range(2)
)

SPEC = """
schema_version: 1
name: fused
dtype_configs:
  int8: {input_dtype: qint8, output_dtype: qint8, weight_dtype: qint8}
entries:
- operators: [conv2d, conv2d+relu6, conv2d+batch_norm2d, linear, linear+relu]
  dtype_configs: [int8]
  where: {rank: {max: 4}}
"""


def test_other_operators_stay_nodes_of_the_pattern() -> None:
    by_pattern = {entry.pattern: entry for entry in fused_entries("conv2d+hardswish")}
    entry = by_pattern[nn.Conv2d, nn.Hardswish]
    assert (entry.root_module, entry.reference_quantized_module) == (nn.Conv2d, reference.Conv2d)
    assert (torch.conv2d, F.hardswish) in by_pattern


def test_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "fused.yaml"
    path.write_text(SPEC)
    backend = backquant.BackendConfig.load(path)
    assert backend.validate() == []
    backend.save(tmp_path / "again.yaml")
    assert backquant.BackendConfig.load(tmp_path / "again.yaml") == backend
    layers = (
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU6(),
        nn.Flatten(),
        nn.Linear(16, 4),
        nn.ReLU(),
    )
    report = backquant.explain(
        nn.Sequential(*layers).eval(), torch.randn(1, 3, 4, 4), backend=backend
    )
    rows = {row.operator: row.outcome for row in report.operators}
    assert [rows[name] for name in ("Conv2d", "ReLU6", "LinearReLU")] == 3 * ["quantized"]
    assert "BatchNorm2d" not in [row.operator for row in report.operators if row.outcome == "float"]


CHAINS = {
    "conv2d+add": lambda m, x: m.conv(x) + x,
    "conv2d+add+relu": lambda m, x: m.relu(torch.add(x, m.conv(x))),
    "conv2d+batch_norm2d+relu6": lambda m, x: F.relu6(m.norm(m.conv(x))),
    "conv2d+batch_norm2d+add+relu": lambda m, x: F.relu(x + m.norm(m.conv(x))),
    "conv2d+relu+mul": lambda m, x: x * F.relu(m.conv(x)),
    "conv2d+leaky_relu": lambda m, x: F.leaky_relu(m.conv(x), 0.2),
    "conv2d+sub": lambda m, x: x - m.conv(x),
    "conv2d+softmax": lambda m, x: torch.softmax(m.conv(x), dim=1),
    "conv_transpose2d+batch_norm2d+relu": lambda m, x: m.relu(m.norm(m.up(x))),
    "add+relu": lambda m, x: F.relu(x + x),
    "mul+sigmoid": lambda m, x: torch.sigmoid(x * 2),
}


class OneKernel(nn.Module):
    """What a name stands for, between two poolings."""

    def __init__(self, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call
        self.conv, self.up = nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 1)
        self.norm, self.relu, self.pool = nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.call(self, self.pool(x)))


def described(*names: str) -> backquant.BackendConfig:
    values = DTypeConfig(torch.qint8, torch.qint8)
    weighted = DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float)
    entries = entries_of(["max_pool2d"], [values])
    for name in names:
        entries += entries_of([name], [weighted if name.startswith("conv") else values])
    return backquant.BackendConfig("b").set_backend_pattern_configs(entries)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        *((name, False) for name in CHAINS),
        *((name, True) for name in CHAINS if not name.startswith("conv_transpose")),
    ],
)
def test_each_name_is_found_as_one_kernel(name: str, training: bool) -> None:
    """No observer inside: two poolings and one kernel, with one between each."""
    prepare = backquant.prepare_qat_fx if training else backquant.prepare_fx
    model = OneKernel(CHAINS[name]).train(training)
    backend, x = described(name), torch.randn(1, 4, 4, 4)
    mapping = QConfigMapping().set_global(QConfig(ACTIVATION, WEIGHT))
    prepared = prepare(model, mapping, (x,), backend_config=backend)
    observers = [node for node in prepared.graph.nodes if "activation_post" in str(node.target)]
    assert len(observers) == 4, prepared.graph
    assert never_matched(backend) == []


def test_what_a_name_needs_besides_leaves_other_entries_as_they_are() -> None:
    own = fused_entries("conv2d+batch_norm2d")
    assert {entry.normal_pattern for entry in own} <= {
        entry.normal_pattern for entry in folding_entries("conv2d+batch_norm2d+relu6")
    }
    both = described("conv2d+batch_norm2d+relu6", "conv2d+batch_norm2d", "conv2d+relu6")
    assert never_matched(both) == []


def test_a_pattern_that_matches_nothing() -> None:
    """A sequence into an operator that takes more, and one whose start another entry fuses."""
    patterns = [(nn.Conv2d, torch.add), (nn.Conv2d, nn.BatchNorm2d, nn.ReLU6), (nn.Conv2d, "view")]
    backend = described("conv2d+batch_norm2d").set_backend_pattern_configs(
        [
            BackendPatternConfig(pattern).add_dtype_config(DTypeConfig(torch.qint8))
            for pattern in patterns
        ]
    )
    found = "\n".join(map(str, never_matched(backend)))
    snapshots.compare(Path(__file__), "never-matches", found)


@pytest.mark.parametrize("name", backquant.list_backends())
def test_no_pattern_of_ours_matches_nothing(name: str) -> None:
    assert never_matched(backquant.get_backend_config(name)) == []


def test_a_sequence_that_is_none() -> None:
    with pytest.raises(SpecError) as raised:
        fused_entries("conv2d+linear")
    snapshots.compare(Path(__file__), "no-kernel", str(raised.value))


BY_HAND = {
    "operators after one": lambda fix, _: [
        fused_entries(one) for one in re.findall(r"(\w+\+[+\w]+)", fix)
    ],
    "operators: [": lambda fix, _: [
        never_matched(described(one)) for one in re.findall(r"operators: \[(\S+)\]", fix)
    ],
}
