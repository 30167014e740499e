"""Defaults for operators between float operators: who gets them, and that files carry them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import backquant
from backquant.backend_config import BackendConfig, get_backend_config
from backquant.backend_config.files import dumps, loads
from backquant.observe import MinMaxObserver


class Mixed(nn.Module):
    """``alone`` and the function stand between norms; ``first`` and ``second`` read each other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.alone, self.first, self.second = (nn.Linear(8, 8) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.twice = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.alone(self.norm(x)).view(-1, 8))
        x = F.gelu(F.linear(x, self.weight))
        x = F.gelu(self.twice(x))
        x = F.gelu(self.second(F.relu(self.first(x))))
        return F.gelu(self.second(self.twice(x)))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def dynamic(model: nn.Module, config: BackendConfig, **options) -> dict[str, bool]:
    """By module, or the name of a function's node: whether it is quantized at each call."""
    quantized = backquant.quantize(model, X, backend=config, calibration=[X], **options)
    plan, found = quantized.plan, {}
    for match in plan.matches:
        decision = plan.decisions[match.anchor]
        if decision.quantized and "inear" in decision.operator:
            dtypes = config.configs[match.entry].dtype_configs[decision.dtype_config]
            found[decision.module_path or match.root] = bool(dtypes.is_dynamic)
    return found


def test_dynamic_between_float_operators_and_static_elsewhere() -> None:
    torch.manual_seed(0)
    model, config = Mixed().eval(), get_backend_config("xnnpack")
    found = dynamic(model, config)
    # a module that is called at two places stands alone at both, or not
    assert found == {
        "alone": True,
        "linear": True,
        "twice": False,
        "first": False,
        "second": False,
    }
    report = backquant.explain(model, X, backend="xnnpack")
    assert any("2 are quantized dynamically by default" in note for note in report.notes)


def test_what_a_mapping_names_stays_as_it_asks() -> None:
    torch.manual_seed(0)
    model, config = Mixed().eval(), get_backend_config("xnnpack")
    mapping = backquant.get_default_qconfig_mapping("xnnpack")
    assert dynamic(model, config, qconfig_mapping=mapping) == dynamic(model, config)
    mapping.set_module_name("alone", mapping.global_qconfig)
    found = dynamic(model, config, qconfig_mapping=mapping)
    assert not found["alone"]
    assert found["linear"]
    activation = MinMaxObserver.with_args(
        dtype=torch.qint8
    )  # not the default's: all of it is followed
    static = backquant.QConfig(activation, mapping.global_qconfig.weight)
    other = backquant.QConfigMapping().set_global(static)
    assert not any(dynamic(model, config, qconfig_mapping=other).values())


def test_a_file_carries_it() -> None:
    config = get_backend_config("xnnpack")
    assert "between_float_operators: true" in dumps(config)
    again = loads(dumps(config))
    assert again == config
    between = [rule for rule in again.defaults.overrides if rule.between_float_operators]
    assert between and all(nn.Linear in rule.operators for rule in between)
