"""``check`` makes a request for each dtype config, and says which none can satisfy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant import BackendConfig, list_backends
from backquant.backend_config import (
    BackendDefaults,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    QuantDefault,
    get_backend_config,
)
from backquant.cli.models import findings
from backquant.match.satisfiable import left_float_by_default, unsatisfiable
from backquant.operators import find


def found(config: DTypeConfig, layer: type[nn.Module] = nn.Linear) -> list[str]:
    entry = BackendPatternConfig(layer).add_dtype_config(config)
    backend = BackendConfig("b").set_backend_pattern_config(entry)
    return [finding.message for finding in unsatisfiable(backend)]


@pytest.mark.parametrize("name", list_backends())
def test_what_is_shipped_can_be_asked_for(name: str) -> None:
    assert unsatisfiable(get_backend_config(name)) == []


NEVER = {
    "float4": DTypeConfig(torch.float4_e2m1fn_x2, torch.float4_e2m1fn_x2),
    "e8m0": DTypeConfig(torch.qint8, torch.qint8, torch.float8_e8m0fnu),
    "fnuz": DTypeConfig(torch.float8_e4m3fnuz, torch.float8_e4m3fnuz),
    "dynamic integers": DTypeConfig(torch.qint8, torch.qint8, is_dynamic=True),
    "bounds": DTypeConfig(
        DTypeWithConstraints(torch.qint8, scale_min_lower_bound=2.0, scale_max_upper_bound=1.0)
    ),
}


@pytest.mark.parametrize("name", NEVER)
def test_what_nothing_satisfies(name: str, snapshot) -> None:
    [message] = found(NEVER[name])
    snapshot(f"unsatisfiable_{name.replace(' ', '_')}", message)


@pytest.mark.parametrize(
    "config",
    [
        DTypeConfig(
            torch.qint8, torch.qint8, torch.qint8, torch.int32, bias_scale="input_times_weight"
        ),
        DTypeConfig(torch.uint16, torch.uint16, torch.qint8),
        DTypeConfig(torch.qint8, torch.int16, torch.qint8),
        DTypeConfig(torch.qint8, torch.float, torch.qint8),
        DTypeConfig(
            DTypeWithConstraints(torch.int16, symmetric=True),
            DTypeWithConstraints(
                torch.int16, scale_exact_match=2**-15, zero_point_exact_match=0, symmetric=False
            ),
        ),
        DTypeConfig(torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e4m3fn),
        DTypeConfig(torch.float16, torch.float16, torch.float16, torch.float16),
        DTypeConfig(torch.quint8, torch.float, torch.qint8, torch.float, is_dynamic=True),
        DTypeConfig(torch.quint8, torch.quint8, torch.qint8, where={"in_channels": 3}),
        DTypeConfig(DTypeWithConstraints(torch.quint8, power_of_two_scale=True), torch.quint8),
    ],
    ids=str,
)
def test_what_can_be_asked_for(config: DTypeConfig) -> None:
    assert found(config) == []


def test_a_file_is_told_with_its_line(tmp_path) -> None:
    path = tmp_path / "b.yaml"
    path.write_text(
        "schema_version: 1\nname: b\nentries:\n- pattern: torch.add\n"
        "  dtype_configs: [{input_dtype: qint8, output_dtype: float8_e4m3fnuz}]\n"
    )
    [finding] = [f for f in findings(str(path)) if f.rule == "unsatisfiable"]
    assert finding.place.endswith("b.yaml:5: entries[0].dtype_configs[0].output_dtype (torch.add)")


@pytest.mark.parametrize("name", list_backends())
def test_the_default_request_reaches_every_operator(name: str) -> None:
    """But those that PyTorch's descriptions quantize at each call, or with weights of 4 bits."""
    backend = get_backend_config(name)
    entries = list(backend.shared_entries)
    left = [find(entries[finding.entry].anchor.op) for finding in left_float_by_default(backend)]
    assert {operator.family for operator in left} <= {"recurrent", "embedding"}


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.LSTMCell])
def test_states_have_no_output_scale(layer: type[nn.Module]) -> None:
    static = DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float)
    dynamic = DTypeConfig(torch.qint8, torch.float, torch.qint8, torch.float, is_dynamic=True)
    [message] = found(static, layer)
    assert "one output scale for a result and its states" in message
    assert found(dynamic, layer) == []


def test_what_the_default_request_leaves_in_float() -> None:
    int8, int16 = DTypeConfig(torch.qint8, torch.qint8), DTypeConfig(torch.int16, torch.int16)
    entries = [
        BackendPatternConfig(torch.add).add_dtype_config(int8),
        BackendPatternConfig(torch.mul).add_dtype_config(int16),
        BackendPatternConfig(torch.sub).add_dtype_config(int16).add_dtype_config(int8),
    ]
    defaults = BackendDefaults(QuantDefault("minmax", dtype=torch.qint8), QuantDefault("noop"))
    backend = BackendConfig("b").set_backend_pattern_configs(entries).set_defaults(defaults)
    [finding] = left_float_by_default(backend)
    assert (finding.severity, finding.place) == ("note", "entry 1 (torch.mul)")
    assert finding.message.endswith(": activation qint8 [-128, 127]; admitted is activation int16")
