"""The defaults of the four engines, field by field, against PyTorch's default qconfigs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import (
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
)

import backquant as bq
from backquant.backend_config import BackendDefaults, get_backend_config, list_backends
from fresh import failures

OURS = (
    "onnxruntime",
    "openvino",
    "xnnpack",
    "inductor_x86",
    "x86_lowbit",
    "litert",
    "litert_micro",
    "litert_16x8",
    "compressed_tensors",
    "gptq",
    "awq",
    "mlx",
    "torchao",
    "gguf",
)  # PyTorch has no getters
ENGINES = ("fbgemm", "x86", "qnnpack", "onednn")
OBSERVERS = {
    "histogram": "HistogramObserver",
    "minmax": "MinMaxObserver",
    "moving_average_minmax": "MovingAverageMinMaxObserver",
    "per_channel_minmax": "PerChannelMinMaxObserver",
    "moving_average_per_channel_minmax": "MovingAveragePerChannelMinMaxObserver",
    "placeholder": "PlaceholderObserver",
    "noop": "NoopObserver",
    "reuse_input": "ReuseInputObserver",
}
FAKE_QUANTIZES = {
    "fake_quantize": "FakeQuantize",
    "fused_moving_average": "FusedMovingAvgObsFakeQuantize",
}


def _ours(default: Any) -> tuple[str, dict[str, Any]]:
    observer = OBSERVERS[default.observer]
    if default.fake_quantize is None:
        return observer, default.options
    return FAKE_QUANTIZES[default.fake_quantize], {"observer": observer, **default.options}


def _theirs(constructor: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(constructor, type):
        return constructor.__name__, {}
    keywords = dict(constructor.p.keywords)
    if "observer" in keywords:
        keywords["observer"] = keywords["observer"].__name__
    return constructor.p.func.__name__, keywords


def _defaults(name: str) -> BackendDefaults:
    defaults = get_backend_config(name).defaults
    assert defaults is not None
    return defaults


@pytest.fixture(autouse=True)
def vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's onednn qconfig warns on CPUs without VNNI."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)


@pytest.mark.parametrize("name", ENGINES)
def test_general_defaults_equal_torch(name: str) -> None:
    ours, ptq, qat = _defaults(name), get_default_qconfig(name), get_default_qat_qconfig(name)
    assert _ours(ours.activation) == _theirs(ptq.activation)
    assert _ours(ours.weight) == _theirs(ptq.weight)
    assert _ours(ours.qat_activation) == _theirs(qat.activation)
    assert _ours(ours.qat_weight) == _theirs(qat.weight)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("make_mapping", "prefix"),
    [(get_default_qconfig_mapping, ""), (get_default_qat_qconfig_mapping, "qat_")],
    ids=["ptq", "qat"],
)
def test_overrides_equal_torch_in_order(name: str, make_mapping: Any, prefix: str) -> None:
    ours = _defaults(name)
    fixed = {
        config.pattern
        for config in get_backend_config(name).configs
        for dtypes in config.dtype_configs
        if dtypes.output_dtype_with_constraints.scale_exact_match is not None
    }
    theirs = {
        operator: qconfig
        for operator, qconfig in make_mapping(name).object_type_qconfigs.items()
        if operator not in fixed
    }
    assert [o for override in ours.overrides for o in override.operators] == list(theirs)
    for override in ours.overrides:
        for operator in override.operators:
            for role in ("activation", "weight"):
                field = prefix + role
                default = getattr(override, field) or getattr(ours, field)
                assert _ours(default) == _theirs(getattr(theirs[operator], role)), operator


@pytest.mark.parametrize("name", list_backends())
def test_defaults_lie_within_an_entry(name: str) -> None:
    """What is asked for by default is admitted by the linear layer's first fitting dtype config."""
    backend = get_backend_config(name)
    defaults = _defaults(name)
    linear = torch.ops.aten.addmm.default if name == "qnnpack_pt2e" else torch.nn.Linear
    [entry] = [c for c in backend.configs if c.pattern is linear]
    activation = defaults.activation.dtype or torch.quint8
    weight = defaults.weight.dtype or torch.quint8
    output = torch.float32 if defaults.activation.is_dynamic else activation
    fitting = [
        c
        for c in entry.dtype_configs
        if (c.input_dtype, c.output_dtype, c.weight_dtype) == (activation, output, weight)
    ]
    assert fitting
    for default, admitted in (
        (defaults.activation, fitting[0].input_dtype_with_constraints),
        (defaults.weight, fitting[0].weight_dtype_with_constraints),
    ):
        if admitted.quant_min_lower_bound is not None:
            assert default.quant_min is not None
            assert default.quant_min >= admitted.quant_min_lower_bound
            assert default.quant_max is not None
            assert default.quant_max <= admitted.quant_max_upper_bound
        if admitted.scale_min_lower_bound is not None:
            assert default.eps is not None
            assert default.eps >= admitted.scale_min_lower_bound


@pytest.mark.parametrize("name", list_backends())
def test_the_default_of_each_operator_fits_its_entry(name: str) -> None:
    rules = bq.qconfig.get_default_qconfig_mapping(name).object_type_qconfigs
    for entry in get_backend_config(name).configs:
        qconfig = rules.get(entry.pattern)
        if qconfig is not None:
            admitted = {config.input_dtype for config in entry.dtype_configs}
            assert qconfig.activation().dtype in admitted, entry.pattern


def test_getters_work_in_a_fresh_process() -> None:
    """PyTorch's do not unless another of its modules was imported before."""
    names = [name for name in list_backends() if name not in OURS]
    code = "import backquant.backend_config as b; assert b.get_{}_backend_config().configs"
    assert failures(code.format(name) for name in names) == {}


@pytest.mark.parametrize("name", list_backends())
def test_engine_is_known_to_torch(name: str) -> None:
    engine = get_backend_config(name).engine
    known = {"native": "fbgemm", "fbgemm": "fbgemm", "qnnpack": "qnnpack", "x86": "x86"}
    assert engine == {**known, "onednn": "onednn", "x86_lowbit": "x86"}.get(name)


@pytest.mark.parametrize("name", list_backends())
def test_each_call_builds_a_new_description(name: str) -> None:
    one, two = get_backend_config(name), get_backend_config(name)
    assert one == two
    one.configs[0].dtype_configs.clear()
    assert one != two
    assert one.configs[1].dtype_configs


@pytest.mark.parametrize("name", ["tensorrt", "executorch"])
def test_signed_activations_pass_through_reshape(name: str) -> None:
    """A ``ReuseInputObserver`` is of quint8, and these take int8: PyTorch has no mapping for them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    traced = Reshaped(model)
    report = bq.explain(traced, torch.randn(2, 4), backend=name)
    rows = {row.node: row for row in report.rows}
    assert rows["reshape"].quantized
    assert "qint8" in rows["reshape"].dtype_config and "quint8" not in rows["reshape"].dtype_config


class Reshaped(nn.Module):
    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.one, self.two = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).reshape(-1, 4))
