"""The description beside ONNX Runtime's own list of kernels."""

from __future__ import annotations

from tools.onnxruntime_registry import beyond_the_registry, claimed, taken, unclaimed


def test_no_claim_is_beyond_the_registry() -> None:
    """Every type that an operator is claimed for is one that a kernel takes; what is left out is listed."""
    assert len(claimed()) > 20
    assert list(beyond_the_registry()) == []
    assert taken("QLinearConv", ("T1", "T2")) >= {("tensor(uint8)", "tensor(int8)")}
    left = list(unclaimed())
    assert "conv2d: QLinearConv takes tensor(int8), tensor(int8)" in left
    assert "QLinearWhere: no entry" in left
