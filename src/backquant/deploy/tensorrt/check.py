"""``check_onnx``: what TensorRT's documentation says about a quantized ONNX file."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backquant.deploy.tensorrt.rules import RULES
from backquant.deploy.tensorrt.view import Finding, graph_views
from backquant.errors import ExportError, MissingExtraError, UsageError

_ORDER = {"error": 0, "advice": 1}


def check_onnx(model: str | os.PathLike[str] | Any) -> list[Finding]:
    """The places of an ONNX model that break a rule of TensorRT, errors first.

    ``model``: the path of a file of any origin, or an ``onnx.ModelProto``. Weights are not loaded,
    external data is read only where a rule needs values; time is linear in the number of nodes.
    The rules with their sources: docs/deploy-tensorrt.md. An empty list says that no rule is broken,
    not that an engine was built.

    Raises:
        MissingExtraError: the package onnx is not installed.
        UsageError: there is no such file.
        ExportError: the file is no ONNX model, or holds constants that cannot be read.

    >>> from onnx import TensorProto, helper
    >>> floats = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in "xy"]
    >>> graph = helper.make_graph(
    ...     [helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="quantize"),
    ...      helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], name="back")],
    ...     "example", floats[:1], floats[1:],
    ...     [helper.make_tensor("scale", TensorProto.FLOAT, [], [0.1]),
    ...      helper.make_tensor("zero", TensorProto.INT8, [], [3])])
    >>> for finding in check_onnx(helper.make_model(graph)):
    ...     print(finding)
    error   zero-point  quantize: the zero point is not 0 (expected 0, found 3)
    error   zero-point  back: the zero point is not 0 (expected 0, found 3)
    """
    if find_spec("onnx") is None:
        raise MissingExtraError(
            "checking ONNX files needs onnx, which is not installed",
            extra="onnx",
            where="check_onnx",
        )
    loaded, folder = _loaded(model)
    views = list(graph_views(loaded, folder))
    found = [found for view in views for rule in RULES for found in rule.findings(view)]
    return sorted(found, key=lambda finding: _ORDER[finding.severity])


def _loaded(model: Any) -> tuple[Any, Path | None]:
    import onnx

    if isinstance(model, onnx.ModelProto):
        return model, None
    if not isinstance(model, (str, os.PathLike)):
        raise UsageError(
            f"{type(model).__name__} is neither a path nor an onnx.ModelProto",
            where="check_onnx",
            fix='check_onnx("model.onnx")',
        )
    path = Path(model)
    if not path.is_file():
        raise UsageError(f"there is no file {path}", where=str(path), fix="name an ONNX file")
    try:
        loaded = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # what protobuf raises depends on its implementation
        raise _malformed(path, f"{error}") from error
    if not loaded.HasField("graph") or not loaded.opset_import:
        raise _malformed(path, "it has no graph, or no operator set")
    return loaded, path.parent


def _malformed(path: Path, reason: str) -> ExportError:
    return ExportError(
        f"{path.name} is no ONNX model: {' '.join(reason.split())[:200]}",
        where=str(path),
        fix="export it again",
    )
