"""Standalone modules are converted by themselves, with what their parent passes to them.

Where a standalone module takes quantized inputs, the dequantize node before it goes; where its output
leaves quantized, a dequantize node follows. In the ``"decomposed"`` dialect the module is converted
once for each set of qparams that it is called with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from backquant.convert.contracts import standalone_are_converted
from backquant.convert.dialects import is_dequantize
from backquant.convert.interface import insert_dequantize, plain_qparams
from backquant.convert.state import Conversion, ReferenceModel, reference_state
from backquant.dtypes import QParams
from backquant.graph import contract, free_path, get_module, set_module
from backquant.prepare import PreparedModule, prepared_state

#: The qparams of the inputs that a parent passes quantized to a standalone module, by position.
Passed = Mapping[int, QParams | None]


@contract(ensures=[standalone_are_converted])
def convert_standalone_modules(
    work: Conversion, convert: Callable[[PreparedModule, fx.Node, Passed], ReferenceModel]
) -> None:
    """Replace the prepared standalone modules of ``work.module`` by their reference models.

    Args:
        work: after the observers of the parent were converted.
        convert: a prepared module, the node that calls it, and what it is passed, to its reference
            model.
    """
    inner: dict[str, PreparedModule] = {}
    made: dict[tuple[str, tuple[tuple[int, QParams | None], ...]], str] = {}
    for node in list(work.module.graph.nodes):
        if node.op != "call_module":
            continue
        path = str(node.target)
        module = inner.get(path) or get_module(work.module, path)
        if not isinstance(module, PreparedModule):
            continue
        inner[path] = module
        passed = _take_quantized(node, module)
        key = (path, tuple(passed.items()))
        if key not in made:
            taken = path in made.values()
            made[key] = free_path(work.module, path) if taken else path
            set_module(work.module, made[key], convert(module, node, passed))
        node.target = made[key]
        reference = get_module(work.module, made[key])
        outputs = reference_state(reference).outputs
        if 0 in outputs:
            insert_dequantize(work, node, outputs[0])


def _take_quantized(node: fx.Node, module: PreparedModule) -> dict[int, QParams | None]:
    """Lead the quantized inputs of ``node`` around their dequantize nodes."""
    names = [str(place.target) for place in module.graph.nodes if place.op == "placeholder"]
    custom = prepared_state(module).custom
    passed: dict[int, QParams | None] = {}
    args, kwargs = list(node.args), dict(node.kwargs)
    for index in custom.input_quantized_indexes if custom is not None else ():
        value = args[index] if index < len(args) else kwargs.get(names[index])
        if not isinstance(value, fx.Node) or not is_dequantize(value):
            continue
        passed[index] = plain_qparams(value)
        if index < len(args):
            args[index] = value.args[0]
        else:
            kwargs[names[index]] = value.args[0]
    node.args, node.kwargs = tuple(args), kwargs
    return passed
