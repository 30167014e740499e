"""The harness that runs PyTorch's own tests: its edits, and the words that it has for graphs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.ao.nn.intrinsic.quantized as nniq
import torch.ao.nn.quantized as nnq
from torch import nn

import backquant

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(autouse=True)
def tools() -> Iterator[None]:
    sys.path.insert(0, str(TOOLS))
    yield
    sys.path.remove(str(TOOLS))


@pytest.fixture(scope="module")
def quantized() -> backquant.QuantizedModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    x = torch.randn(4, 3, 8, 8)
    prepared = backquant.prepare_fx(model, backquant.get_default_qconfig_mapping("fbgemm"), x)
    prepared(x)
    return backquant.convert_fx(prepared)


def test_imports_are_edited() -> None:
    from torch_own.rewrite import adapted

    text = adapted(
        "from torch.ao.quantization.quantize_fx import prepare_fx\n"
        "import torch.ao.nn.intrinsic as nni\n"
        "import torch.ao.nn.quantized as nnq\n"
        "x = torch.ao.quantization.default_qconfig, nnq.FloatFunctional(), torch.jit.script(m)\n"
    )
    assert "from torch_own.names import prepare_fx" in text
    assert "import backquant.nn.intrinsic as nni" in text
    assert "import torch.ao.nn.quantized as nnq" in text
    assert "torch_own.names.default_qconfig, backquant.nn.quantized.FloatFunctional()" in text
    assert "jit" not in text


def test_names_come_from_backquant_or_fail_where_they_are_used() -> None:
    from torch_own import names

    assert names.quantize_fx.prepare_fx is backquant.prepare_fx
    assert names.observer.MinMaxObserver is backquant.MinMaxObserver
    mapping = backquant.QConfigMapping().set_object_type(nn.Linear, backquant.default_qconfig)
    assert names._get_object_type_qconfig(mapping, nn.Linear, None) == backquant.default_qconfig
    assert names._get_object_type_qconfig(mapping, nn.ReLU, 3) == 3
    with pytest.raises(names.NotProvided, match="_is_match"):
        names._is_match()


def test_a_lowered_graph_in_the_words_of_pytorch(quantized: Any) -> None:
    from torch_own.graphs import is_lowered, type_in_torch, words_of

    words = words_of(quantized)
    assert words == [
        "quantize", "quantized conv2d_relu", "flatten", "quantized linear", "dequantize",
    ]  # fmt: skip
    assert type_in_torch(quantized.get_submodule("0")) is nniq.ConvReLU2d
    assert type_in_torch(quantized.get_submodule("3")) is nnq.Linear
    assert type_in_torch(nn.ReLU()) is nn.ReLU and isinstance(int, type_in_torch)
    assert is_lowered(quantized.graph_module) and not is_lowered(nn.ReLU())


def test_a_graph_that_differs_is_found(quantized: Any) -> None:
    import unittest

    from torch_own.graphs import same_words

    class Spec(NamedTuple):  # as PyTorch's NodeSpec
        op: str
        target: Any

    case = unittest.TestCase()
    conv, linear = Spec("call_module", nniq.ConvReLU2d), Spec("call_module", nnq.Linear)
    dequantize = Spec("call_method", "dequantize")
    same_words(case, quantized, conv, {linear: 1, dequantize: 1}, [conv, linear, dequantize])
    for expected in (
        (Spec("call_module", nnq.Conv2d),),
        (None, {dequantize: 2}),
        (None, {linear: 0}),
        (None, None, [linear, conv]),
    ):
        with pytest.raises(AssertionError):
            same_words(case, quantized, *expected)
