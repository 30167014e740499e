"""What a builder of TensorRT was seen to refuse, though its documentation does not say so.

Seen with TensorRT 8.6.0 on an NVIDIA H200, by conformance's cases of the description ``tensorrt``; later
versions may build them.
"""

from __future__ import annotations

from collections.abc import Iterator

from backquant.deploy.tensorrt.finding import DECONVOLUTION, POOLING, Hit, Rule
from backquant.deploy.tensorrt.view import GraphView

_POOLS = ("AveragePool", "MaxPool")
_SPATIAL_3D = 3


def _pool_3d(view: GraphView) -> Iterator[Hit]:
    for kind in _POOLS:
        for node in view.of_type(kind):
            sizes = next((list(a.ints) for a in node.attribute if a.name == "kernel_shape"), [])
            if len(sizes) == _SPATIAL_3D and view.is_dequantized(node.input[0]):
                what = f"{kind} over three axes may have no INT8 kernel"
                yield Hit(
                    view.name(node), what, "float, if the builder finds no kernel", "quantized"
                )


def _transposed(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type("ConvTranspose"):
        if view.is_quantized(node):
            what = "a transposed convolution on integers may not build"
            yield Hit(view.name(node), what, "float, if the builder fails", "quantized")


BUILT = (
    Rule(
        "pool-3d",
        "A quantized pool over three axes may not build",
        "advice",
        POOLING,
        "TensorRT 8.6.0: “All of the candidates were removed”",
        _pool_3d,
    ),
    Rule(
        "transposed",
        "A quantized transposed convolution may not build",
        "advice",
        DECONVOLUTION,
        "TensorRT 8.6.0: “Assertion engine failed” (the float one builds)",
        _transposed,
    ),
)
