"""What a dotted name stands for."""

from __future__ import annotations

import pytest

from backquant.migrate.resolve import Fate, fate


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("torch.ao.quantization.fx.custom_config.PrepareCustomConfig", "PrepareCustomConfig"),
        ("torch.ao.quantization.quantize_fx.QConfigMapping", "QConfigMapping"),
        ("torch.quantization.QuantStub", "nn.QuantStub"),
        ("torch.nn.intrinsic.modules.fused.ConvBn2d", "nn.intrinsic.ConvBn2d"),
        ("torch.nn.intrinsic.modules.fused._FusedModule", "nn.intrinsic.FusedModule"),
        ("torch.ao.nn.intrinsic.qat.modules.conv_fused.ConvBn2d", "nn.intrinsic.qat.ConvBn2d"),
        ("torch.nn.qat.dynamic.modules.linear.Linear", "nn.qat.dynamic.Linear"),
        ("torch.nn.quantized._reference.Linear", "nn.quantized.reference.Linear"),
        ("torch.nn.quantized.FloatFunctional.add", "nn.quantized.FloatFunctional"),
        ("torch.ao.quantization.fuse_modules.fuse_conv_bn", "nn.intrinsic.fusers.fuse_conv_bn"),
        ("torch.ao.quantization.fx.match_utils.MatchAllNode", "MatchAllNode"),
        ("torch.ao.quantization.get_default_qconfig_dict", "get_default_qconfig_mapping"),
    ],
)
def test_where_a_name_goes(path: str, target: str) -> None:
    result = fate(path)
    assert result is not None
    assert result.target == f"backquant.{target}"


@pytest.mark.parametrize(
    ("path", "kind", "length"),
    [
        ("torch.ao.quantization.quantize.prepare", "eager mode", 5),
        ("torch.ao.quantization.quantize_qat", "eager mode", 4),
        ("torch.ao.quantization.fx.convert.convert", "inside of the flow", 6),
        ("torch.ao.quantization.quantize_fx._fuse_fx", "inside of the flow", 5),
        ("torch.ao.quantization.quantizer.x86_inductor_quantizer.X", "PT2E", 6),
        ("torch.backends.quantized.engine", "engine", 4),
        ("torch.quantization._numeric_suite.compare_weights", "numeric suite", 4),
        ("torch.nn.quantized.Linear.from_float", "quantized modules", 5),
        ("torch.nn.quantized.dynamic.Linear", "quantized modules", 5),
        ("torch.ao.nn.intrinsic.quantized.ConvReLU2d", "quantized modules", 6),
        ("torch.ao.quantization.fx._decomposed.x", "internals", 6),
        ("torch.ao.quantization.perpare_fx", "unknown name", 4),
        ("torch.ao.nn.intrinsic.ConvRelu2d", "unknown name", 5),
    ],
)
def test_what_needs_a_person(path: str, kind: str, length: int) -> None:
    result = fate(path)
    assert isinstance(result, Fate)
    assert result.by_hand is not None
    assert (result.by_hand.kind, min(result.length, len(path.split(".")))) == (kind, length)


@pytest.mark.parametrize("path", ["torch.nn.Linear", "torch.ao", "torch.ao.pruning", "torchao.x"])
def test_other_names_are_none_of_our_business(path: str) -> None:
    assert fate(path) is None
