"""From a calibrated model to the reference model: every quantized value as quantize/dequantize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from backquant.convert.activations import convert_activations, needed_sites
from backquant.convert.dialects import DIALECTS
from backquant.convert.fold import fold_after_training
from backquant.convert.functional_weights import (
    convert_functional_weights,
    measure_functional_weights,
)
from backquant.convert.interface import dequantize_inputs, keep_outputs_quantized
from backquant.convert.measured import Measured, measure
from backquant.convert.scales import measured_scales
from backquant.convert.state import Conversion, ReferenceModel, ReferenceState
from backquant.convert.weights import convert_weighted_modules
from backquant.errors import UsageError
from backquant.graph import (
    GraphEditor,
    remove_unused_modules,
    settle_mode_values,
    shallow_copy,
    verify,
)
from backquant.match.recheck import recheck
from backquant.prepare import ObserverSource, PreparedState, prepared_state, rebuilt

__all__ = ["convert_to_reference"]


def convert_to_reference(
    prepared: fx.GraphModule, *, dialect: str = "decomposed"
) -> ReferenceModel:
    """The reference model of a calibrated (or trained) ``prepared`` model.

    It computes in float what integer kernels would compute: values pass through quantize and
    dequantize nodes, weights are stored as integers. ``prepared`` is not changed and can be
    calibrated further. State: ``reference_state(result)``.

    Args:
        prepared: from ``insert_observers``, calibrated.
        dialect: ``"decomposed"``: ``torch.ops.quantized_decomposed`` on plain tensors;
            ``"quantized_tensor"``: ``torch.quantize_per_tensor`` and ``.dequantize()``.

    Raises:
        UsageError: the model is not prepared, or there is no such dialect.
        ConfigError: a reference class without ``from_float``; a dtype that the dialect lacks.

    >>> from torch import nn
    >>> from backquant.backend_config import BackendConfig
    >>> from backquant.match.plan import Plan
    >>> from backquant.prepare import insert_observers
    >>> from backquant.qconfig import QConfigMapping
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    >>> prepared = insert_observers(gm, Plan("x86"), BackendConfig("x86"), QConfigMapping())
    >>> [node.name for node in convert_to_reference(prepared).graph.nodes]
    ['input_1', '_0', 'output']
    """
    if dialect not in DIALECTS:
        raise UsageError(
            f"there is no dialect {dialect!r}",
            where="convert_to_reference(dialect=...)",
            fix=" or ".join(f'dialect="{name}"' for name in DIALECTS),
        )
    state = prepared_state(prepared)
    work = _working_copy(prepared, state, dialect)
    fold_after_training(work)
    work.qparams = _measured(prepared, work)
    work.plan = recheck(work.plan, measured_scales(work))
    needed = needed_sites(work)
    dequantize_inputs(work)
    skipped = convert_functional_weights(work)
    convert_activations(work, skipped)
    convert_weighted_modules(work)
    keep_outputs_quantized(work)
    return _finished(work, needed)


def _working_copy(prepared: fx.GraphModule, state: PreparedState, dialect: str) -> Conversion:
    module = rebuilt(prepared, shallow_copy(prepared), ReferenceModel)
    settle_mode_values(module)
    return Conversion(
        module=module,
        editor=GraphEditor(module, state.provenance.copy()),
        prepared=state,
        plan=state.plan,
        source=ObserverSource(state.backend_config, state.qconfig_mapping),
        dialect=dialect,
        qparams={},
        nodes={node.name: node for node in module.graph.nodes},
    )


def _measured(prepared: fx.GraphModule, work: Conversion) -> Mapping[str, Measured]:
    """By head of each group; constant weights are measured now, the rest was in calibration."""
    found = measure_functional_weights(prepared, work)
    for head in work.prepared.sites.groups():
        if head not in found:
            found[head] = measure(prepared.get_submodule(head))
    return found


def _finished(work: Conversion, needed: set[str]) -> ReferenceModel:
    read = _tensors_read(work.module)
    work.module.graph.eliminate_dead_code()
    _drop_tensors(work.module, read - _tensors_read(work.module))
    for site in work.prepared.sites.sites:
        del work.module._modules[site.name]  # one by one: shared observers have several names
    remove_unused_modules(work.module)
    result = work.editor.finish()
    assert isinstance(result, ReferenceModel)
    verify(result, after="pass 'convert to reference'")
    sites = work.prepared.sites.sites
    result.meta["backquant"] = ReferenceState(
        plan=work.plan,
        scopes=work.prepared.scopes,
        backend_config=work.prepared.backend_config,
        provenance=work.editor.provenance,
        sites=replace(work.prepared.sites, sites=tuple(s for s in sites if s.name in needed)),
        qparams={s.name: work.qparams[s.group] for s in sites if s.name in needed},
        dialect=work.dialect,
    )
    return result


def _tensors_read(module: fx.GraphModule) -> set[str]:
    return {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}


def _drop_tensors(module: fx.GraphModule, paths: set[str]) -> None:
    """Remove tensors that the graph no longer reads, unless a called module owns them."""
    called = {str(node.target) for node in module.graph.nodes if node.op == "call_module"}
    for path in paths:
        *owners, name = path.split(".")
        if not any(".".join(owners[: i + 1]) in called for i in range(len(owners))):
            delattr(module.get_submodule(".".join(owners)), name)
