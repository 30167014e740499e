"""What OpenVINO would compile for ever is refused before."""

from __future__ import annotations

from types import SimpleNamespace

import onnx_ir
import pytest

from backquant.deploy.openvino import workarounds
from backquant.errors import ExportError


def convolution(channels: int = 16, taps: int = 14, **attributes: object) -> onnx_ir.Node:
    weight = onnx_ir.Value(name="w", shape=onnx_ir.Shape([channels, 1, 3, taps]))
    given = {"group": channels, **attributes}
    return onnx_ir.node("Conv", [onnx_ir.Value(name="x"), weight], given, name="line")


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_only_where_the_cpu_has_bfloat16(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool
) -> None:
    facts = SimpleNamespace(capabilities={"avx512_bf16": has_bfloat16})
    monkeypatch.setattr(workarounds, "machine_facts", lambda: facts)
    others = [
        convolution(17),
        convolution(taps=13),
        convolution(strides=[1, 2]),
        convolution(dilations=[1, 2]),
        convolution(group=8),
    ]
    workarounds.check_ends(others)
    if has_bfloat16:
        with pytest.raises(ExportError, match="never finishes"):
            workarounds.check_ends([*others, convolution(strides=[2, 1])])
    else:
        workarounds.check_ends([convolution()])
