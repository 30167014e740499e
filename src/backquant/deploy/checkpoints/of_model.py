"""What goes into a checkpoint, from a quantized model: its integers, and what quantizing has changed
beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx, nn

from backquant.backend_config import BackendConfig, DTypeConfig
from backquant.deploy.checkpoints.hub_folder import HubFolder
from backquant.deploy.checkpoints.layer import (
    Activation,
    Layer,
    is_exact,
    layer_of,
    quantized_layers,
)
from backquant.deploy.checkpoints.write import Contents, check_places
from backquant.dtypes import find_dtype
from backquant.errors import ExportError
from backquant.lower.qdq import is_dequantize
from backquant.match import Plan
from backquant.match.refusal import described_by_node
from backquant.reason_codes import ReasonCode


def contents_of(
    module: fx.GraphModule, plan: Plan, config: BackendConfig, source: HubFolder, target: str
) -> Contents:
    """The quantized layers of a reference graph, whose float model is in ``source``.

    Raises ``ExportError`` for layers and tensors without a place in the source, and for operators that a
    recipe has added.
    """
    _refuse_added(plan, target)
    described = described_by_node(plan, config)
    called = {str(node.target): node for node in module.graph.nodes if node.op == "call_module"}
    modules = dict(quantized_layers(module))
    layers: dict[str, Layer] = {}
    for path, part in modules.items():
        activation = _activation(called[path], described) if path in called else None
        entry = described.get(called[path].name) if path in called else None
        stored = None if entry is None else entry.weight_dtype_with_constraints.scale_dtype
        layers[path] = layer_of(path, part, activation, stored)
    changed = dict(_changed(module, modules, source))
    left = tuple(path for path, m in module.named_modules() if type(m) is nn.Linear)
    schemes = {path: layer.scheme for path, layer in layers.items()}
    exact = all(is_exact(layer.scale, source.dtype) for layer in layers.values())
    dtype = source.dtype if exact else torch.float32
    contents = Contents(schemes, layers.__getitem__, left, changed, dtype)
    check_places(source, contents, target)
    return contents


def _refuse_added(plan: Plan, target: str) -> None:
    for name, decision in plan.decisions.items():
        added = any(reason.rule == ReasonCode.RECIPE for reason in decision.reasons)
        if added:
            raise ExportError(
                f"a recipe has added the product {name}, which the architecture does not have",
                where=f"{decision.module_path or name}, to={target!r}",
                fix='a recipe without the step products: recipe=["weight-clipping", "gptq"]',
            )


def _activation(node: fx.Node, described: Mapping[str, DTypeConfig]) -> Activation | None:
    config = described.get(node.name)
    row = None if config is None else find_dtype(config.input_dtype)
    if config is None or row is None or not row.is_stored:
        return None
    dtype = row.name.removeprefix("q")
    if config.is_dynamic:
        shared = config.input_dtype_with_constraints.granularity
        return Activation(dtype, per_token=shared == "per_token", symmetric=row.is_float)
    given = node.args[0]
    scale = _scale(given) if isinstance(given, fx.Node) else None
    if scale is None:
        raise ExportError(
            f"the input of {node.target} has a zero point, or no scale that is known",
            where=str(node.target),
            fix="activations with a symmetric scheme: torch.per_tensor_symmetric",
        )
    return Activation(dtype, scale=torch.tensor(scale))


def _scale(dequantize: fx.Node) -> float | None:
    """The one scale of a value without a zero point; None: it has other qparams."""
    if str(dequantize.target) == "backquant.dequantize_float8.default":
        return float(dequantize.args[1])  # type: ignore[arg-type]
    if is_dequantize(dequantize) and dequantize.args[2] == 0:
        return float(dequantize.args[1])  # type: ignore[arg-type]
    return None


def _changed(
    module: fx.GraphModule, layers: Mapping[str, nn.Module], source: HubFolder
) -> Iterator[tuple[str, Tensor]]:
    """Float tensors that are not those of the source, and biases that it does not have."""
    for name, tensor in module.named_parameters(remove_duplicate=False):
        path, _, end = name.rpartition(".")
        if name in source.sizes:
            before = source.read(name)
            if before.shape == tensor.shape and not torch.equal(before.to(tensor.dtype), tensor):
                yield name, tensor.detach()
        elif end == "bias" and path in layers and bool(tensor.any()):
            yield name, tensor.detach()
