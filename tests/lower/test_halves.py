from __future__ import annotations

import torch
from torch import nn

import backquant

HALF = backquant.QConfigMapping().set_global(backquant.qconfig.float16_static_qconfig)


def _casts(model: nn.Module, x: torch.Tensor) -> tuple[int, bool]:
    """How often a value is made float16, and whether the lowered model equals the reference model."""
    prepared = backquant.prepare_fx(model.eval(), HALF, x, backend_config=_backend())
    reference = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    quantized = backquant.convert_fx(prepared)
    nodes = quantized.graph_module.graph.nodes
    into = [n for n in nodes if "convert_element" in str(n.target) and n.args[1] == torch.float16]
    return len(into), torch.equal(quantized(x), reference(x))


def _backend() -> backquant.BackendConfig:
    half = backquant.DTypeConfig(torch.float16, torch.float16)
    shared = backquant.ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    entries = [
        backquant.BackendPatternConfig(operator).set_observation_type(kind).add_dtype_config(half)
        for operator, kind in (
            ("reshape", shared),
            ("transpose", shared),
            (torch.sigmoid, backquant.ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT),
        )
    ]
    config = backquant.BackendConfig("halves").set_backend_pattern_configs(entries)
    return config.set_engine("x86")


class _Moved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x.reshape(2, 3, 4).transpose(1, 2))


class _ReadTwice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.reshape(2, 3, 4)
        return torch.sigmoid(y) + y


def test_what_moves_values_moves_halves() -> None:
    torch.manual_seed(0)
    assert _casts(_Moved(), torch.randn(6, 4)) == (2, True)  # the input, and the sigmoid's result
    assert _casts(_ReadTwice(), torch.randn(6, 4))[1]
