from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant import QConfig, QConfigMapping
from backquant.errors import UsageError
from backquant.observe import MinMaxObserver

MAPPING = backquant.get_default_qconfig_mapping("x86")
X86 = backquant.get_x86_backend_config()


def prepared(net: nn.Module, image: torch.Tensor, **changes: Any) -> Any:
    return backquant.prepare_fx(net.eval(), MAPPING, image, backend_config=X86, **changes)


def test_the_steps_give_what_the_one_call_gives(
    net: nn.Module, image: torch.Tensor, unchanged: Any
) -> None:
    net.eval()
    with unchanged(net):
        steps = prepared(net, image)
        steps(image)
        converted = backquant.convert_fx(steps)
    whole = backquant.quantize(net, calibration=[image], backend=X86, qconfig_mapping=MAPPING)
    assert torch.equal(converted(image), whole(image))
    assert converted.plan.decisions == whole.plan.decisions and converted.kernels == whole.kernels


def test_converting_leaves_the_prepared_model_as_it_is(net: nn.Module, image: torch.Tensor) -> None:
    steps = prepared(net, image)
    steps(image)
    before = copy.deepcopy(steps.state_dict())
    first, reference = backquant.convert_fx(steps), backquant.convert_to_reference_fx(steps)
    first.half()
    assert all(torch.equal(value, before[name]) for name, value in steps.state_dict().items())
    assert torch.equal(backquant.convert_fx(steps)(image), backquant.convert_fx(steps)(image))
    assert "quantize_per_tensor" in reference.code


def test_a_backend_without_an_engine_gives_the_reference_model(
    net: nn.Module, image: torch.Tensor
) -> None:
    config = backquant.get_tensorrt_backend_config()
    mapping = backquant.get_default_qconfig_mapping("tensorrt")
    steps = backquant.prepare_fx(net.eval(), mapping, image, backend_config=config)
    steps(image)
    assert backquant.convert_fx(steps).engine is None


def test_dict_forms(net: nn.Module, image: torch.Tensor) -> None:
    mapping = {"": None, "object_type": [(nn.Linear, backquant.get_default_qconfig("x86"))]}
    steps = backquant.prepare_fx(
        net.eval(), mapping, image, {"preserved_attributes": ["note"]}, backend_config=X86.to_dict()
    )
    assert steps.note == net.note
    plan = backquant.prepare.prepared_state(steps).plan  # type: ignore[attr-defined]
    assert {d.operator for d in plan.decisions.values() if d.quantized} == {"Linear"}


def test_one_warning_lists_what_is_skipped(
    net: nn.Module, image: torch.Tensor, snapshot: Callable[..., None]
) -> None:
    int16 = MinMaxObserver.with_args(dtype=torch.int16)
    mapping = QConfigMapping().set_global(QConfig(int16, int16))
    with pytest.warns(UserWarning, match="operators stay float on x86") as caught:
        backquant.prepare_fx(net.eval(), mapping, image, backend_config=X86)
    assert len(caught) == 1 and caught[0].filename == __file__
    lines = str(caught[0].message).splitlines()
    snapshot("prepare-skipped", "\n".join([*lines[:4], lines[-1]]))  # the rest is said by ``match``


def test_no_warning_when_nothing_is_refused(net: nn.Module, image: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(net, image)


def test_models_that_are_not_prepared_are_refused(
    net: nn.Module, snapshot: Callable[..., None]
) -> None:
    for convert in (backquant.convert_fx, backquant.convert_to_reference_fx):
        with pytest.raises(UsageError) as caught:
            convert(net)  # type: ignore[arg-type]
    snapshot("convert-float", caught.value)


def test_fusing(net: nn.Module, image: torch.Tensor, unchanged: Any) -> None:
    net.eval()
    with unchanged(net):
        fused = backquant.fuse_fx(net, backend_config=X86)
    assert type(fused.stem).__name__ == "ConvReLU2d"
    assert torch.allclose(fused(image), net(image), atol=1e-5)
