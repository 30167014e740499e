"""Which kernel of another package's engine failed, and for which layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from backquant.errors import BackquantError, EngineError, InputError, literal
from backquant.graph.call_table import failed_node
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
    node = failed_node(error, module)
    if node is None:
        try:
            with torch.no_grad():
                Interpreted(module)(*inputs[0], **inputs[1])
        except Exception as again:
            node, error = failed_node(again, module), again
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


def _stands_for(node: fx.Node, names: tuple[str, ...]) -> bool:
    return node.name in names or any(node.name == f"{name}_lowered" for name in names)
