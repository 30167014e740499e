"""Which kernel of another package's engine failed, and for which layer."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from backquant.errors import BackquantError, EngineError, InputError, literal
from backquant.lower.engine import is_built_in
from backquant.runtime.failed_call import failed_call, sentence
from backquant.runtime.interpreted import Interpreted
from backquant.runtime.record import LoweredRecord

if TYPE_CHECKING:
    from backquant.runtime.unlowered import PlainlyCalled


def failure(
    model: PlainlyCalled, error: Exception, inputs: tuple[Sequence[Any], Mapping[str, Any]]
) -> BackquantError:
    """The error of ours for ``error``: that of a kernel of another package names its layer, any other says
    which inputs it was called with (``failed_call``).

    >>> import backquant
    >>> x, layer = torch.ones(1, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> model = backquant.quantize(layer, calibration=[x], slower="keep")
    >>> print(failure(model, RuntimeError("shapes differ"), ((x,), {})).what)
    the model fails on these inputs: shapes differ
    """
    elsewhere = _elsewhere(inputs) if model.record.engine is not None else ""
    if elsewhere:
        return InputError(
            f"an input is on {elsewhere}, and the model's kernels run on the CPU",
            where=f"engine {model.record.engine.name}" if model.record.engine else "",
            fix="quantized(x.cpu())",
        )
    of_kernel = _failed_kernel(error, model.graph_module, model.record, inputs)
    return of_kernel or failed_call(error, inputs, model.record.example, model.source)


def raise_told(
    model: PlainlyCalled, error: Exception, inputs: tuple[Sequence[Any], Mapping[str, Any]]
) -> NoReturn:
    """Raise ``failure``; an error of ours as it is.

    >>> import backquant
    >>> x, layer = torch.ones(1, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> model = backquant.quantize(layer, calibration=[x], slower="keep")
    >>> try: raise_told(model, RuntimeError("shapes differ"), ((x,), {}))
    ... except BackquantError as error: print(error.what)
    the model fails on these inputs: shapes differ
    """
    told = failure(model, error, inputs)
    if told is error:
        raise error
    raise told from error


def _elsewhere(inputs: tuple[Sequence[Any], Mapping[str, Any]]) -> str:
    """The device of an input that is not on the CPU."""
    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    return next((str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"), "")


def _failed_kernel(
    error: Exception,
    module: fx.GraphModule,
    record: LoweredRecord,
    inputs: tuple[Sequence[Any], Mapping[str, Any]],
) -> EngineError | None:
    """A recorded call says less than the graph: it is run once more, operator by operator."""
    engine = record.engine
    if isinstance(error, BackquantError) or engine is None or is_built_in(engine.name):
        return None
    node = failing_node(error, module)
    if node is None:
        try:
            with torch.no_grad():
                Interpreted(module)(*inputs[0], **inputs[1])
        except Exception as again:
            node, error = failing_node(again, module), again
    uses = (use for use in record.kernels if node is not None and _stands_for(node, use.nodes))
    use = next(uses, None)
    if use is None or node is None:
        return None
    decisions = (record.plan.decisions.get(name) for name in use.nodes)
    paths = (decision.module_path for decision in decisions if decision is not None)
    layer = next(filter(None, paths), use.nodes[0])
    return EngineError(
        f"the kernel {use.kernel} of the engine {use.engine} failed: {sentence(error)}",
        where=f"{layer}, node {node.name}",
        fix=f"qconfig_mapping.set_module_name({literal(layer)}, None) leaves it in float",
    )


def failing_node(error: Exception, module: fx.GraphModule) -> fx.Node | None:
    """The node of ``module`` that raised ``error``, by the line of its code; ``None`` if none did.

    >>> module = fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    >>> try: module.forward(torch.zeros(3))
    ... except RuntimeError as error: print(failing_node(error, module))
    _0
    """
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "forward" and frame.f_locals.get("self") is module:
            line = linecache.getline(frame.f_code.co_filename, trace.tb_lineno, frame.f_globals)
            name = line.partition("=")[0].partition(":")[0].strip()
            found: list[fx.Node] = [node for node in module.graph.nodes if node.name == name]
            if found:
                return found[0]
        trace = trace.tb_next
    return None


def _stands_for(node: fx.Node, names: tuple[str, ...]) -> bool:
    return node.name in names or any(node.name == f"{name}_lowered" for name in names)
