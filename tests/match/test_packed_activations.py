"""Dtypes of which several values share a byte are dtypes of weights: activations are not rounded to them."""

from __future__ import annotations

import torch
from torch import nn

import backquant
from backquant import BackendConfig, BackendPatternConfig, DTypeConfig
from backquant.nn.quantized import reference


def test_activations_in_half_bytes_are_refused() -> None:
    token = torch.float4_e2m1fn_x2
    entry = (
        BackendPatternConfig(nn.Linear)
        .add_dtype_config(DTypeConfig(token, token, torch.qint8))
        .set_root_module(nn.Linear)
        .set_reference_quantized_module(reference.Linear)
    )
    backend = BackendConfig("b").set_backend_pattern_config(entry)
    report = backquant.explain(nn.Sequential(nn.Linear(8, 8)), torch.ones(1, 8), backend=backend)
    [row] = report.rows
    assert not row.quantized
    assert row.reasons[0].rule == "activation-dtype"
