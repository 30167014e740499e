"""Each kernel of the convolutional benchmark models, given the reference model's integers, is within one
step of it. ``tests/stock`` has smaller models of the same families, those with attention too.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks.models import MODELS, build

import backquant
from against_torch.kernels import check_kernels
from backquant.api import flow
from backquant.runtime.compiled.modules import compilable

# Kernels at the least, that the check must have reached.
KERNELS = {
    "resnet18": 20, "resnet50": 50, "mobilenet_v2": 50, "mobilenet_v3_large": 60,
    "efficientnet_b0": 80, "regnet_y_400mf": 90, "densenet121": 120, "shufflenet_v2_x1_0": 60,
    "convnext_tiny": 18,
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_give_the_reference_models_integers(name: str) -> None:
    torch.manual_seed(0)
    sample = MODELS[name].sample(1)[..., :64, :64].contiguous()
    kept: list[Any] = []

    def keep(reference: Any, *rest: Any) -> Any:
        kept.append(reference)
        return real(reference, *rest)

    real = flow.quantized_model
    with mock.patch.object(flow, "quantized_model", keep):
        quantized = backquant.quantize(build(name), sample, backend="x86", calibration=[sample])
    found = check_kernels(kept[0], quantized, sample)
    assert found.checked >= KERNELS[name]
    # Where an activation is part of a kernel that rounds once, two steps (backquant.lower.fuse_followers).
    once = [use for use in quantized.kernels if "rounds once" in use.kernel]
    twice = {name for use in once if "add" not in use.kernel for name in use.nodes}
    assert found.worst <= 1 + (found.node.removesuffix("_lowered") in twice), found
    assert found.cut < 0.02, found
    compilable(quantized.graph_module)  # each of these kernels has a spelling for the compiler
