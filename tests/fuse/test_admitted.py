"""Fusions that would hide a part from being quantized are given up; all others are as before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant.qconfig as bq
from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    ObservationType,
    get_backend_config,
)
from backquant.fuse import plan_fused
from backquant.graph import capture
from backquant.nn import intrinsic
from backquant.nn.quantized import reference

STATIC = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
DYNAMIC = DTypeConfig(torch.quint8, torch.float, torch.qint8, torch.float, is_dynamic=True)
OWN = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT


def _entry(pattern, *dtype_configs):
    entry = BackendPatternConfig(pattern).set_observation_type(OWN)
    entry.set_root_module(nn.Linear).set_reference_quantized_module(reference.Linear)
    return entry.set_dtype_configs(list(dtype_configs))


def _fused(*modules, into, dtype_configs=()):
    entry = BackendPatternConfig(modules).set_dtype_configs(list(dtype_configs))
    return entry.set_fuser_method(lambda is_qat, *parts: into(*parts)).set_fused_module(into)


def _backend(fused_dtypes=(STATIC,), *more):
    """Linear runs statically and dynamically, with a ReLU only as ``fused_dtypes``."""
    return BackendConfig("custom").set_backend_pattern_configs(
        [
            _entry(nn.Linear, STATIC, DYNAMIC),
            _entry(intrinsic.LinearReLU, *fused_dtypes),
            _fused(nn.Linear, nn.ReLU, into=intrinsic.LinearReLU, dtype_configs=fused_dtypes),
            *more,
        ]
    )


def _model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()).eval()


def _decisions(found):
    return [(d.operator, d.outcome.value) for d in found.plan.decisions.values()]


def _mapping(qconfig):
    return bq.QConfigMapping().set_global(qconfig)


def test_a_fusion_does_not_hide_a_linear_layer_from_dynamic_quantization():
    found = plan_fused(capture(_model()), _backend(), _mapping(bq.default_dynamic_qconfig))
    assert _decisions(found) == [("Linear", "quantized"), ("ReLU", "float")] * 2
    assert found.plan.fusions == ()
    assert found.plan.notes == tuple(
        f"\"Linear, ReLU\" at '{root}' is not fused: its first part alone is admitted, and as one "
        "operator, LinearReLU, it is refused (requested input quint8 [0, 255], dynamic quantization, "
        "supported input quint8, static quantization; requested output quint8 [0, 255], supported output "
        "quint8)"
        for root in ("_0", "_2")
    )


def test_a_fused_module_without_an_entry_is_named():
    backend = BackendConfig("custom").set_backend_pattern_configs(
        [_entry(nn.Linear, STATIC), _fused(nn.Linear, nn.ReLU, into=intrinsic.LinearReLU)]
    )
    found = plan_fused(capture(_model()), backend, _mapping(bq.default_qconfig))
    assert _decisions(found) == [("Linear", "quantized"), ("ReLU", "float")] * 2
    assert "supported custom has no entry for LinearReLU" in found.plan.notes[0]


def test_what_the_fused_operator_runs_stays_fused():
    found = plan_fused(capture(_model()), _backend(), _mapping(bq.default_qconfig))
    assert _decisions(found) == [("LinearReLU", "quantized")] * 2
    assert found.plan.notes == ()
    both = _backend((STATIC, DYNAMIC))
    found = plan_fused(capture(_model()), both, _mapping(bq.default_dynamic_qconfig))
    assert _decisions(found) == [("LinearReLU", "quantized")] * 2


def test_each_occurrence_is_decided_by_itself():
    mapping = _mapping(bq.default_qconfig).set_module_name("2", bq.default_dynamic_qconfig)
    found = plan_fused(capture(_model()), _backend(), mapping)
    assert _decisions(found) == [
        ("LinearReLU", "quantized"),
        ("Linear", "quantized"),
        ("ReLU", "float"),
    ]


def test_a_fusion_that_hides_nothing_is_kept():
    half = bq.float16_dynamic_qconfig
    found = plan_fused(capture(_model()), _backend(), _mapping(half))
    assert _decisions(found) == [("LinearReLU", "float")] * 2
    found = plan_fused(capture(_model()), _backend(), bq.QConfigMapping())
    assert _decisions(found) == [("LinearReLU", "float")] * 2
    skipped = _mapping(bq.default_dynamic_qconfig).set_object_type(nn.ReLU, None)
    found = plan_fused(capture(_model()), _backend(), skipped)
    assert _decisions(found) == [("LinearReLU", "float")] * 2


def test_a_shorter_fusion_takes_the_place_of_a_longer_one():
    class LinearReLUDropout(intrinsic.LinearReLU):
        def __init__(self, linear, relu, dropout):
            super().__init__(linear, relu)

    longer = _fused(nn.Linear, nn.ReLU, nn.Dropout, into=LinearReLUDropout)
    backend = _backend((STATIC, DYNAMIC), longer, _entry(LinearReLUDropout, STATIC))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout()).eval()
    found = plan_fused(capture(model), backend, _mapping(bq.default_dynamic_qconfig))
    assert _decisions(found) == [("LinearReLU", "quantized"), ("Dropout", "float")]
    backend = _backend((STATIC,), longer, _entry(LinearReLUDropout, STATIC))
    found = plan_fused(capture(model), backend, _mapping(bq.default_dynamic_qconfig))
    assert _decisions(found) == [("Linear", "quantized"), ("ReLU", "float"), ("Dropout", "float")]


def test_a_root_that_is_refused_for_another_reason_is_fused_again():
    pair = _entry(nn.Linear, DYNAMIC)._set_num_tensor_args_to_observation_type({2: OWN})
    fused = _fused(nn.Linear, nn.ReLU, into=intrinsic.LinearReLU)
    backend = BackendConfig("custom").set_backend_pattern_configs([pair, fused])
    found = plan_fused(capture(_model()), backend, _mapping(bq.default_dynamic_qconfig))
    assert _decisions(found) == [("LinearReLU", "float")] * 2
    assert found.plan.notes == ()


@pytest.mark.parametrize("backend", ["x86", "fbgemm", "qnnpack", "onednn", "native"])
@pytest.mark.parametrize(
    "qconfig", ["default_dynamic_qconfig", "float16_dynamic_qconfig", "default_qconfig"]
)
def test_the_engines_give_up_no_fusion(backend, qconfig):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4), nn.ReLU()
    ).eval()
    mapping = _mapping(getattr(bq, qconfig))
    found = plan_fused(capture(model), get_backend_config(backend), mapping)
    assert [f.pattern for f in found.plan.fusions] == ["Conv2d, BatchNorm2d, ReLU", "Linear, ReLU"]
