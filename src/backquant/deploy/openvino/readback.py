"""The kernels that OpenVINO's CPU plugin chose, with the precision that each computes in.

Source: OpenVINO documentation, "Runtime model" (``CompiledModel.get_runtime_model``): the runtime info of
its nodes names the layer type, the precision, and the layers of the file that it was made from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from backquant.deploy.exported import TargetKernel
from backquant.deploy.onnx.names import origin_of

__all__ = ["kernels_of"]

_NO_KERNEL = frozenset({"Input", "Output", "Const", "Reorder", "Convert", "FakeQuantize"})
_INTEGER = ("i8", "u8")
_FLOAT = ("f32", "f16", "bf16")


def kernels_of(
    model: Any, origins: Mapping[str, str], after: Mapping[str, str]
) -> tuple[TargetKernel, ...]:
    """One record for each layer of the compiled model, in its order.

    ``origins`` names the reference graph's node behind each node and tensor of the ONNX file, ``after`` the
    one that alone reads what another makes. A generated kernel (``Subgraph``) leaves out the name of its
    first product: what no kernel names and only it reads is a part of it.
    """
    import openvino

    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1})
    found = []
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = {key: value.astype(str) for key, value in _runtime_info(node)}
        kind = info.get("layerType", node.get_type_name())
        if kind in _NO_KERNEL:
            continue
        precision = _precision(info)
        layers = info.get("originalLayersNames", "").split(",")
        nodes = tuple(dict.fromkeys(filter(None, (origin_of(name, origins) for name in layers))))
        found.append(TargetKernel(kind, nodes, precision or "?", precision in _INTEGER))
    return _with_unnamed(found, after)


def _precision(info: Mapping[str, str]) -> str:
    """What a layer computes in. Its precision may be that of its output: the name of its primitive tells."""
    primitive = info.get("primitiveType", "").lower().rpartition("_")[2]
    return primitive if primitive in _FLOAT else info.get("runtimePrecision", "").lower()


def _with_unnamed(found: list[TargetKernel], after: Mapping[str, str]) -> tuple[TargetKernel, ...]:
    named = {node for use in found for node in use.nodes}
    before: dict[str, list[str]] = {}
    for node, reader in after.items():
        if node not in named:
            before.setdefault(reader, []).append(node)
    return tuple(
        replace(
            use, nodes=(*use.nodes, *(one for node in use.nodes for one in before.get(node, ())))
        )
        if use.kernel == "Subgraph"
        else use
        for use in found
    )


def _runtime_info(node: Any) -> list[tuple[str, Any]]:
    info = node.get_rt_info()
    keys = ("layerType", "runtimePrecision", "primitiveType", "originalLayersNames")
    return [(key, info[key]) for key in keys if key in info]
