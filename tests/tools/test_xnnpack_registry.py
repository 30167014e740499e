"""The description beside the partitioner of ExecuTorch's XNNPACK delegate."""

from __future__ import annotations

from tools.xnnpack_registry import (
    DYNAMIC,
    STATIC,
    beyond_the_registry,
    claimed,
    registered,
    unclaimed,
)


def test_no_claim_is_beyond_the_partitioner() -> None:
    """What is claimed is taken in that way; what is left out is listed."""
    ways = {name: ways for name, (_, ways) in claimed().items()}
    assert ways["conv2d"] == {STATIC, DYNAMIC} and ways["add"] == {STATIC} and len(ways) > 15
    assert registered()["sigmoid.default"] == {"FP32"}
    assert list(beyond_the_registry()) == []
    assert "slice_copy.Tensor: STATIC_QUANT" in list(unclaimed())
