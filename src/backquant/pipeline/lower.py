"""Lower a reference model by the rules of its backend's engine; without an engine it runs as it is.

Standalone modules are lowered by themselves, for the engine of their own backend; their kernels and
reasons are named by their path: ``block.conv``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import fx, nn
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from backquant.backend_config import BackendConfig
from backquant.convert import ReferenceModel, dequantize_all, reference_state
from backquant.errors import EngineError, literal
from backquant.graph import (
    DeferredGraphModule,
    GraphIndex,
    get_module,
    own_shared_tensors,
    preserve,
    rebuilt,
    released,
    set_module,
    shallow_copy,
)
from backquant.graph.devices import on_cpu
from backquant.graph.export import Interface, interface_of, output_of
from backquant.lower import EngineInfo, Lowered, engine_info, find_engine, lower
from backquant.lower.engine_dtypes import check_engine_dtypes
from backquant.match import MatchKind
from backquant.match.float_policy import float_by_request
from backquant.match.plan import Plan, Reason
from backquant.match.refusal import described_by_node
from backquant.reason_codes import ReasonCode
from backquant.report.recorded import LoweredReport
from backquant.runtime import LoweredRecord, QuantizedModel
from backquant.runtime.checkpointed import Origin


def engine_of(config: BackendConfig) -> EngineInfo | None:
    """The engine of a backend on this machine; ``None`` where it has none. Raises ``EngineError``.

    >>> engine_of(BackendConfig("b")) is None
    True
    """
    return None if config.engine is None else engine_info(config.engine)


def quantized_model(
    reference: fx.GraphModule, source: nn.Module, engine_name: str | None = None
) -> QuantizedModel:
    """Lower ``reference`` for its backend's engine; without one the reference model itself is wrapped.

    Kernels run on the CPU: what is on another device is copied there. ``engine_name``: another engine, for
    standalone modules, too. The result shares no tensor with ``source``, the model that it was made from.
    Raises ``EngineError`` when the plan asks for a dtype that the engine lacks.
    """
    state = reference_state(reference)
    engine = engine_of(state.backend_config) if engine_name is None else engine_info(engine_name)
    if engine is not None:
        reference = on_cpu(reference)
    own_shared_tensors(reference, source)
    lowered = _lowered(reference, engine, engine_name is not None)
    if engine is not None and engine.as_described:
        check_integers(state.plan, lowered.left_in_float)
    record = LoweredRecord(
        **vars(state),
        engine=engine,
        kernels=lowered.kernels,
        left_in_float=lowered.left_in_float,
        interface=_interface(reference),
    )
    origin = None
    if isinstance(reference, ReferenceModel) and state.dialect == "decomposed":
        again = partial(quantized_model, source=nn.Module(), engine_name=engine_name)
        origin = Origin(reference, again)
    made = QuantizedModel(lowered.graph_module, record, origin)
    if state.report_of is not None:
        made.record = replace(record, report_of=LoweredReport.of(reference, made))
    if lowered.graph_module is not reference:
        released(reference)
    return made


def lowered_again(model: QuantizedModel) -> QuantizedModel:
    """``model``, which a file gave, able to take over a checkpoint: that lowers it again."""
    if model.origin is not None and model.engine is not None:
        name = model.engine.name
        other = None if model.backend_config.engine == name else name
        again = partial(quantized_model, source=nn.Module(), engine_name=other)
        model.origin = Origin(model.origin.reference, again)
    return model


def _interface(reference: fx.GraphModule) -> Interface | None:
    """That of an exported model; of a traced one what its output is made of, if it holds classes."""
    found, output = interface_of(reference), output_of(reference)
    if found is None:
        return None if output is None else Interface((), output)
    integers = reference_state(reference).inputs
    names = [str(node.target) for node in reference.graph.find_nodes(op="placeholder")]
    dtypes = {names[i]: str(q.dtype).removeprefix("torch.") for i, q in integers.items() if q}
    arguments = tuple(
        replace(one, dtypes=(dtypes[one.name],)) if one.name in dtypes else one
        for one in found.arguments
    )
    return replace(found, arguments=arguments)


def _lowered(reference: fx.GraphModule, engine: EngineInfo | None, for_all: bool) -> Lowered:
    inner = _standalone(reference)
    if engine is None:
        module = (
            rebuilt(DeferredGraphModule, reference, shallow_copy(reference)) if inner else reference
        )
        module.recompile()
        result = Lowered(module, (), ())
    else:
        state = reference_state(reference)
        check_engine_dtypes(state.plan, state.backend_config, engine)
        rules = find_engine(engine.name).table
        in_float = float_by_request(state.plan, GraphIndex(reference))
        described = described_by_node(state.plan, state.backend_config)
        separate = _separate_calls(reference)
        result = lower(reference, rules, engine, separate, in_float, described)
        module = result.graph_module
        kept = reference.meta.get(_USER_PRESERVED_ATTRIBUTES_KEY, {})
        preserve(module, reference, list(kept), "ConvertCustomConfig")
    kernels, left = list(result.kernels), list(result.left_in_float)
    for path, part in inner.items():
        own = engine if for_all else engine_of(reference_state(part).backend_config)
        lowered = _lowered(part, own, for_all)
        set_module(module, path, lowered.graph_module)
        for use in lowered.kernels:
            kernels.append(replace(use, nodes=tuple(f"{path}.{name}" for name in use.nodes)))
        left += [replace(reason, node=f"{path}.{reason.node}") for reason in lowered.left_in_float]
    return Lowered(module, tuple(kernels), tuple(left))


def _standalone(reference: fx.GraphModule) -> dict[str, ReferenceModel]:
    """The standalone modules that ``reference`` calls, by path."""
    found: dict[str, ReferenceModel] = {}
    for node in reference.graph.nodes:
        module = get_module(reference, str(node.target)) if node.op == "call_module" else None
        if isinstance(module, ReferenceModel):
            found[str(node.target)] = module
    return found


def _separate_calls(reference: fx.GraphModule) -> set[str]:
    """Calls of standalone and custom modules, and what passes quantized tensors to and from them."""
    plan = reference_state(reference).plan
    calls = {match.anchor for match in plan.matches if match.kind is not MatchKind.PATTERN}
    separate = set(calls)
    for node in reference.graph.nodes:
        into = node.target is torch.quantize_per_tensor
        out_of = node.target in ("dequantize", dequantize_all)
        neighbours = node.users if into else node.args[:1] if out_of else ()
        if neighbours and all(other.name in calls for other in neighbours):
            separate.add(node.name)
        elif node.target is operator.getitem and node.args[0].name in separate:
            separate.add(node.name)  # a part of the tuple that a recurrent module gives
    return separate


# Check of the integer reference: all that the plan quantizes is computed on integers.

# Operators that read or give floats, because the description or the mapping says so, compute in float.
_FLOAT = (ReasonCode.FLOAT_IN_REFERENCE, ReasonCode.FLOAT_INPUT, ReasonCode.FLOAT_OUTPUT)
_SHOWN = 8


def check_integers(plan: Plan, left_in_float: Sequence[Reason]) -> None:
    """Raise ``EngineError`` naming what the plan quantizes and no rule could take."""
    quantized = {
        name
        for match in plan.matches
        if plan.decisions[match.anchor].quantized
        for name in match.nodes
    }
    refused = [r for r in left_in_float if r.node in quantized and r.rule not in _FLOAT]
    if not refused:
        return
    lines = [f"{r.node}: {r.asked}: {r.admitted}" for r in refused[:_SHOWN]]
    if len(refused) > _SHOWN:
        lines.append(f"… and {len(refused) - _SHOWN} more")
    node = refused[0].node
    decision = plan.decisions.get(node)
    path = decision.module_path if decision is not None and decision.module_path else node
    raise EngineError(
        "operators are quantized in a way that has no integer reference",
        where="\n         ".join(lines),
        fix=f"qconfig_mapping.set_module_name({literal(path)}, None), or the reference model, which computes "
        "them in float",
    )
