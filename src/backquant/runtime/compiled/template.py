"""A call of one of our kernels as a node of Inductor's graph.

The node's code includes ``kernels.h`` or a header beside it and calls one of its templates with all sizes
as literals; only the batch may be symbolic. Nothing is fused into it: its epilogue is complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from backquant.native import SOURCES
from backquant.runtime.compiled.inductor import CppTemplate, V, ir

HEADER = SOURCES / "kernels.h"
GROUPED = SOURCES / "grouped.h"
IMAGES = SOURCES / "images.h"
TILES = SOURCES / "tiles.h"
ATTENTION = SOURCES / "attention.h"
_LANES = tuple(SOURCES / name for name in ("lanes.h", "lanes_x86.h", "lanes_arm.h"))
_INCLUDED = (*_LANES, HEADER, GROUPED, IMAGES, TILES, ATTENTION)
# the lane count and the order for which weights were packed; see lanes.h
_PACKED_FOR = "static_assert(backquant::LANES == 16 && backquant::ORDER == BACKQUANT_BYTES);"


@dataclass(frozen=True)
class KernelCall:
    """``body``: C++ between the braces; it reads the arguments by name, writes ``out``, and reads the
    number of images (rows of a linear layer) as ``count``. ``header``: what it includes."""

    name: str
    arguments: Mapping[str, Any]
    body: str
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    count: Any
    header: Path = HEADER


@cache
def _digest() -> str:
    """A digest of all headers: code compiled from others must not be found in Inductor's cache."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in _INCLUDED)).hexdigest()[:16]


class _Template(CppTemplate):
    """Renders a ``KernelCall``."""

    def __init__(self, call: KernelCall, nodes: Mapping[str, Any], layout: Any) -> None:
        threads = torch.get_num_threads()
        super().__init__(f"backquant_{call.name}", list(nodes.values()), layout, threads)
        self.call, self.nodes = call, dict(nodes)

    def render(  # type: ignore[override]
        self,
        kernel: Any,
        template_buffer_node: Any = None,
        epilogue_nodes: Any = None,
        **ignored: Any,  # noqa: ARG002 - Inductor's protocol
    ) -> str:
        assert not epilogue_nodes, "nothing can be fused behind a kernel of ours"
        out = self.output_node if template_buffer_node is None else template_buffer_node
        names: dict[str, str] = {}  # the same input may be passed twice
        inputs: dict[str, Any] = {}
        for name, node in self.nodes.items():
            known = names.setdefault(node.get_name(), name)
            if known == name:
                inputs[name] = node
        again = [
            f"const auto* {name} = {names[node.get_name()]};"
            for name, node in self.nodes.items()
            if name not in inputs
        ]
        free = [self.call.count] if hasattr(self.call.count, "free_symbols") else []
        declared = kernel.def_kernel(inputs=inputs, outputs={"out": out}, extra_sizevars=free)
        count = kernel.rename_indexing(self.call.count)
        threads = "#define BACKQUANT_THREADS 1\n" if self.num_threads > 1 else ""
        lines = (
            kernel.maybe_codegen_profile(),
            *again,
            f"const int64_t count = {count};",
            self.call.body,
        )
        body = "\n  ".join(lines)
        return (
            f"// kernels of backquant {_digest()}\n{self.header().getvalue()}\n"
            f'#ifndef BACKQUANT_THREADS\n{threads}#endif\n#include "{self.call.header}"\n{_PACKED_FOR}\n'
            f'extern "C" {declared}\n{{\n  {body}\n}}\n'
        )


def constant(values: torch.Tensor, name: str) -> Any:
    """A tensor that the compiled code carries along. Its name is none of the model's own: PyTorch loads what
    is called like a buffer of the model from that buffer."""
    return V.graph.add_tensor_constant(values.contiguous(), name=f"backquant_kernel_{name}")


def _buffer(value: Any) -> Any:
    while isinstance(value, (ir.TensorBox, ir.StorageBox)):
        value = value.data
    return value.unwrap_view() if isinstance(value, ir.ReinterpretView) else value


def kernel_node(call: KernelCall) -> Any:
    """The result of ``call`` in the graph that Inductor is lowering."""
    nodes = {name: _buffer(value) for name, value in call.arguments.items()}
    layout = ir.FixedLayout(torch.device("cpu"), call.dtype, list(call.size), list(call.stride))
    made = _Template(call, nodes, layout).generate().output_node()
    made.data.data.allow_epilogue_fusion = False
    return made
