"""The option ``opset``: the operator set that was asked for, or an error that says why not.

PyTorch's exporter writes operator set 18 and converts to later ones. An earlier one (17, the last of
TensorRT 8.6) is written where each operator of the file means there what it means in 18:

1. Operators that did not change between the two.
2. Reductions over constant axes, which are an attribute before 18.
3. ``Pad``, ``Resize``, ``Split`` and scatters that use nothing of what 18 added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backquant.errors import ExportError, UsageError

__all__ = ["asked_opset", "check_opset", "lower_opset"]

_FIRST = 17
_WRITTEN = 18  # what PyTorch's translations are written for
_SAME_INPUTS = {"Pad": 3, "Resize": 4, "ScatterElements": 3, "ScatterND": 3}
_NEW_ATTRIBUTES: Mapping[str, Mapping[str, object]] = {
    "Resize": {"antialias": 0, "axes": None, "keep_aspect_ratio_policy": "stretch"},
    "Split": {"num_outputs": None},
}
_NEW_REDUCTIONS = (b"max", b"min", "max", "min")


def asked_opset(options: Mapping[str, Any], least: int) -> int:
    """The operator set of ``options``; ``least``, which the dtypes need, where none is asked for.

    Raises ``UsageError`` for what is none, or is below ``least`` where that is above 18.

    >>> asked_opset({}, 18), asked_opset({"opset": 17}, 18)
    (18, 17)
    """
    import onnx

    asked, last = options.get("opset", least), onnx.defs.onnx_opset_version()
    is_number = isinstance(asked, int) and not isinstance(asked, bool)
    first = _FIRST if least <= _WRITTEN else least
    if is_number and first <= asked <= last:
        return int(asked)
    raise UsageError(
        f"opset is a whole number from {first} to {last} for this model, not {asked!r}",
        where=f"options={{'opset': {asked!r}}}",
        fix=f"options={{'opset': {least}}}",
    )


def check_opset(model: Any, asked: int) -> None:
    """Raise ``ExportError`` where the exporter left a model at another operator set than ``asked``."""
    made = model.opset_imports.get("", 0)
    if made != asked:
        raise ExportError(
            f"PyTorch's exporter cannot write this model in operator set {asked}: it stays at {made}",
            where=f"options={{'opset': {asked}}}",
            fix=f"options={{'opset': {made}}}",
        )


def lower_opset(model: Any, version: int) -> None:
    """From operator set 18 to ``version``, in place.

    Raises ``ExportError`` with the operators that ``version`` lacks.
    """
    import onnx

    lacking = []
    for node in list(model.graph.all_nodes()):
        if node.domain not in ("", "ai.onnx"):
            continue
        since = onnx.defs.get_schema(node.op_type, _WRITTEN).since_version
        if since > version and not _is_same(node) and not _with_axes_attribute(node):
            lacking.append(f"{node.op_type} ({node.name})")
    if lacking:
        raise ExportError(
            f"operator set {version} has no form of {lacking[0].split(' ')[0]} as the model uses it",
            where=", ".join(lacking[:3]),
            fix=f"options={{'opset': {_WRITTEN}}}, or write that part of the model with other operators",
        )
    model.opset_imports[""] = version


def _is_same(node: Any) -> bool:
    """Rule 3."""
    if node.op_type not in {*_SAME_INPUTS, *_NEW_ATTRIBUTES}:
        return False
    inputs = [
        value for value in node.inputs[_SAME_INPUTS.get(node.op_type, 2) :] if value is not None
    ]
    new = _NEW_ATTRIBUTES.get(node.op_type, {})
    used = [
        n for n, plain in new.items() if n in node.attributes and node.attributes[n].value != plain
    ]
    reduction = node.attributes.get("reduction")
    if node.op_type == "Split" and _is_even(node):
        used = []
    if inputs or used or (reduction is not None and reduction.value in _NEW_REDUCTIONS):
        return False
    for name in new:
        node.attributes.pop(name, None)
    return True


def _is_even(node: Any) -> bool:
    """Whether a ``Split`` without sizes gives equal parts: before 18 there are no others."""
    axis = node.attributes["axis"].value if "axis" in node.attributes else 0
    shape = node.inputs[0].shape
    size = None if shape is None else shape[axis]
    return isinstance(size, int) and size % len(node.outputs) == 0


def _with_axes_attribute(node: Any) -> bool:
    """Rule 2."""
    import onnx_ir as ir

    if not node.op_type.startswith("Reduce"):
        return False
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    if axes is not None:
        if axes.const_value is None:
            return False
        node.attributes["axes"] = ir.AttrInt64s("axes", axes.const_value.numpy().tolist())
        node.resize_inputs(1)
    no_axes = node.attributes.pop("noop_with_empty_axes", None)
    return no_axes is None or not no_axes.value or axes is not None
