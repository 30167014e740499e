from __future__ import annotations

import torch
from torch import nn

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    get_backend_config,
)
from backquant.match.fixes import Suggestions
from backquant.match.rules import QConfigReader
from backquant.match.verdict import Judge, Roles

WEIGHTED, PLAIN = Roles(True, True, False), Roles(True, False, False)


def suggestions(backend: BackendConfig) -> Suggestions:
    return Suggestions(backend, QConfigReader(), Judge())


def test_default_where_it_is_admitted() -> None:
    backend = get_backend_config("fbgemm")
    patterns = [config.pattern for config in backend.configs]
    asked = suggestions(backend)
    assert asked.request(patterns.index(nn.Linear), WEIGHTED) == 'get_default_qconfig("fbgemm")'
    assert asked.request(-1, PLAIN) == 'get_default_qconfig("fbgemm")'
    assert "FixedQParamsObserver" in asked.request(patterns.index(nn.Sigmoid), PLAIN)
    assert "float_qparams" in asked.request(patterns.index(nn.Embedding), WEIGHTED)


def test_backends_of_ones_own() -> None:
    entries = [
        BackendPatternConfig(nn.Linear).add_dtype_config(
            DTypeConfig(torch.int8, torch.int8, torch.int8, torch.float)
        ),
        BackendPatternConfig(nn.ReLU),
    ]
    asked = suggestions(BackendConfig("mine").set_backend_pattern_configs(entries))
    assert asked.request(0, WEIGHTED).startswith(
        "QConfig(\n    activation=MinMaxObserver.with_args"
    )
    assert asked.request(1, PLAIN) == ""  # the entry admits nothing
    assert asked.request(-1, PLAIN) == "default_qconfig"
