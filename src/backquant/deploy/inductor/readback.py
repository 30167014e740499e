"""The kernels in a package's generated code.

Each call there stands behind a comment that names the nodes of the exported graph that it computes;
oneDNN's integer kernels are called by name.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from torch import fx

from backquant.deploy.exported import TargetKernel
from backquant.deploy.inductor.split_dequantize import reads_weight
from backquant.deploy.program import Program
from backquant.lower.qdq import is_dequantize, is_quantize

_SOURCES = re.compile(r"// Topologically Sorted Source Nodes: \[([^\]]*)\]")
_CALL = re.compile(r"\b(aoti_torch_\w+|cpp_fused_\w+)\(")
_INTEGER = re.compile(r"aoti_torch_cpu__(q(?:conv|linear)\w*)")


def kernels_of(path: Path, module: fx.GraphModule, program: Program) -> Iterator[TargetKernel]:
    """The calls in the generated wrapper, in order, with the nodes of ``module`` that they compute."""
    nodes = {node.name: node for node in module.graph.nodes}
    with zipfile.ZipFile(path) as package:
        wrappers = [name for name in package.namelist() if name.endswith(".wrapper.cpp")]
        texts = [package.read(name).decode() for name in wrappers]
    named: set[str] = set()
    for sources, kernel in (call for text in texts for call in _calls(text)):
        origins = [_computed(program.origins.get(s, s), nodes) for s in sources]
        computed = tuple(dict.fromkeys(origin for origin in origins if origin))
        integer = _INTEGER.match(kernel)
        if integer is None:
            yield TargetKernel(kernel, computed, "generated", integer=False)
            continue
        # The sources go back to the operator whose result is quantized at its input; its own is the last.
        # An addition that it took in may name another kernel's result, too: that kernel came before.
        weighted = [own for name in computed for own in _weighted(module, nodes[name])]
        own = ([n for n in weighted if n not in named] or weighted)[-1:]
        named.update(own)
        yield TargetKernel(integer[1], tuple(own), "int8", integer=True)


def _calls(text: str) -> Iterator[tuple[list[str], str]]:
    """Each kernel's call with the names in the comment before it."""
    parts = _SOURCES.split(text)
    for names, body in zip(parts[1::2], parts[2::2], strict=True):
        sources = [name.strip() for name in names.split(",") if name.strip()]
        for call in _CALL.findall(body):
            if _is_kernel(call):
                yield sources, call


def _is_kernel(call: str) -> bool:
    return call.startswith("cpp_fused_") or call.startswith("aoti_torch_cpu_")


def _computed(name: str, nodes: dict[str, fx.Node]) -> str:
    """A quantize node stands for the operator whose result it quantizes."""
    node = nodes.get(name)
    if node is None:
        return ""
    if is_quantize(node):
        return str(node.args[0])
    return "" if is_dequantize(node) else name


def _weighted(module: fx.GraphModule, node: fx.Node) -> list[str]:
    """Operators with a weight: ``node``, or those whose result it changes in the same kernel."""
    if reads_weight(module, node):
        return [node.name]
    return [before.name for before in node.all_input_nodes if reads_weight(module, before)]
