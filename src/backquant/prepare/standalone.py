"""Standalone modules: each is prepared by itself, with its own configs, before its parent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from backquant.errors import BackquantError, ConfigError
from backquant.graph import (
    DeferredGraphModule,
    check_inputs,
    free_path,
    rebuilt,
    set_module,
    shallow_copy,
)
from backquant.match.plan import MatchKind, Plan
from backquant.prepare.record import PreparedModule, Request, prepared_state
from backquant.prepare.requests import ObserverSource
from backquant.qconfig import PrepareCustomConfig, QConfigMapping, StandaloneModuleConfigEntry


def prepare_standalone_modules(
    module: fx.GraphModule,
    plan: Plan,
    request: Request,
    prepare: Callable[[nn.Module, Request], PreparedModule],
) -> fx.GraphModule:
    """A copy of ``module`` with its standalone modules prepared; ``module`` itself if it has none.

    What a standalone module's entry leaves open is as for its parent: the QConfig of the rule that
    applies to its call becomes the global one, and the backend is the parent's. A module that is
    called under several rules is prepared once for each.

    Args:
        module: a fused graph, not observed yet.
        plan: of that graph.
        request: what the parent is prepared with.
        prepare: the steps from a module to a prepared one.

    Raises:
        ConfigError: an interface that cannot be (see ``set_input_quantized_indexes``).
        InputError: the entry's example inputs do not fit the module.
        BackquantError: what ``prepare`` raises, with the standalone module's path before the place.

    >>> from backquant.backend_config import BackendConfig
    >>> module = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    >>> request = Request(BackendConfig("b"), QConfigMapping(), None)
    >>> prepare_standalone_modules(module, Plan("b"), request, lambda model, request: None) is module
    True
    """
    found = [
        match
        for match in plan.matches
        if match.kind is MatchKind.STANDALONE and plan.decisions[match.anchor].quantized
    ]
    if not found:
        return module
    result = rebuilt(DeferredGraphModule, module, shallow_copy(module))
    source = ObserverSource(request.backend_config, request.qconfig_mapping)
    nodes = {node.name: node for node in result.graph.nodes}
    made: dict[tuple[str, Any], str] = {}
    for match in found:
        node = nodes[match.anchor]
        path, rule = str(node.target), plan.decisions[match.anchor].rule
        entry = _entry(request, path, module.get_submodule(path))
        key = (path, rule if entry.qconfig_mapping is None else None)
        if key not in made:
            inner = _inner(entry, source.qconfig(rule), request)
            prepared = _prepared(module.get_submodule(path), path, entry, inner, prepare)
            _check_interface(prepared, path, source.qconfig(rule))
            made[key] = free_path(result, path) if path in made.values() else path
            set_module(result, made[key], prepared)
        node.target = made[key]
    return result


def _entry(request: Request, path: str, module: nn.Module) -> StandaloneModuleConfigEntry:
    """The entry for a module; names outweigh classes."""
    assert request.custom is not None, "a standalone match comes from a PrepareCustomConfig"
    by_name, by_class = (
        request.custom.standalone_module_names,
        request.custom.standalone_module_classes,
    )
    return by_name[path] if path in by_name else by_class[type(module)]


def _inner(entry: StandaloneModuleConfigEntry, qconfig: Any, parent: Request) -> Request:
    mapping = entry.qconfig_mapping
    return Request(
        entry.backend_config if entry.backend_config is not None else parent.backend_config,
        QConfigMapping().set_global(qconfig) if mapping is None else mapping,
        entry.prepare_custom_config,
    )


def _prepared(
    module: nn.Module,
    path: str,
    entry: StandaloneModuleConfigEntry,
    request: Request,
    prepare: Callable[[nn.Module, Request], PreparedModule],
) -> PreparedModule:
    try:
        if entry.example_inputs is not None and len(entry.example_inputs):
            check_inputs(module, entry.example_inputs)
        return prepare(module, request)
    except BackquantError as error:
        where = f"standalone module {path!r}" + (f": {error.where}" if error.where else "")
        raise type(error)(error.what, where=where, fix=error.fix) from error


def quantized_inputs(prepared: PreparedModule) -> tuple[str, ...]:
    """Names of the inputs of a prepared module that arrive quantized."""
    custom = prepared_state(prepared).custom
    names = [str(node.target) for node in prepared.graph.nodes if node.op == "placeholder"]
    indexes = () if custom is None else custom.input_quantized_indexes
    return tuple(names[index] for index in indexes if index < len(names))


def quantized_output(prepared: PreparedModule) -> nn.Module | None:
    """The observer of a prepared module's output, if that is to leave quantized and is observed."""
    state = prepared_state(prepared)
    if state.custom is None or 0 not in state.custom.output_quantized_indexes:
        return None
    output = next(node for node in reversed(prepared.graph.nodes) if node.op == "output")
    returned = output.args[0]
    if not isinstance(returned, fx.Node) or returned.name not in state.sites:
        return None
    return prepared.get_submodule(state.sites[returned.name].group)


def _check_interface(prepared: PreparedModule, path: str, qconfig: Any) -> None:
    custom = prepared_state(prepared).custom
    if custom is None:
        return
    where = f"standalone module {path!r}"
    inputs = [node for node in prepared.graph.nodes if node.op == "placeholder"]
    for index in custom.input_quantized_indexes:
        if index >= len(inputs):
            raise ConfigError(
                f"input {index} is to arrive quantized, and the module has {len(inputs)} inputs",
                where=where,
                fix=f"set_input_quantized_indexes({list(range(len(inputs)))})",
            )
    if custom.input_quantized_indexes and qconfig is None:
        raise ConfigError(
            "inputs are to arrive quantized, and no QConfig of the parent says how",
            where=where,
            fix=f"parent's mapping: .set_module_name({path!r}, qconfig)\n"
            "or: .set_input_quantized_indexes([])",
        )
    _check_output(prepared, custom, where)


def _check_output(prepared: PreparedModule, custom: PrepareCustomConfig, where: str) -> None:
    output = next(node for node in reversed(prepared.graph.nodes) if node.op == "output")
    if not custom.output_quantized_indexes:
        return
    if custom.output_quantized_indexes != [0] or not isinstance(output.args[0], fx.Node):
        raise ConfigError(
            "only one tensor, output 0, can leave a standalone module quantized",
            where=f"{where}: set_output_quantized_indexes({custom.output_quantized_indexes})",
            fix="return one tensor and set [0], or .set_output_quantized_indexes([])",
        )
