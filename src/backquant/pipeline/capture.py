"""Capture: a model becomes a graph by symbolic trace, by ``torch.export``, or the first that works.

Where both work, ``backquant.pipeline.plan`` takes the export if it puts more on integers. The steps after
capture are the same for both: for exported graphs the backend's entries and the mapping's rules are
translated to aten operators (``backquant.operators.equivalents``).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from backquant.backend_config import BackendConfig
from backquant.convert import ConvertRequest
from backquant.errors import CaptureError, UsageError, literal
from backquant.graph import (
    Captured,
    GraphRewriter,
    called_whole,
    capture,
    fold_constants,
    inline_wrapped,
    move_rank_reads,
    reshape_views,
)
from backquant.graph.decompose import Decomposition, decomposition_of
from backquant.graph.example_call import ExampleCall
from backquant.graph.export import ExportedModel, ExportOptions, interface_of
from backquant.graph.outside import GENERATORS
from backquant.graph.shapes import GraphValues
from backquant.match import CustomMatching, Plan, Reason
from backquant.operators.computed_once import computed_once
from backquant.operators.computed_parameters import (
    added_bias,
    fold_affine,
    linear_product,
    product_of_activations,
)
from backquant.operators.equivalents import mapping_for_export, with_export_spellings
from backquant.operators.grouped import grouped_product
from backquant.operators.normal_form import (
    batch_norm_module,
    einsum_product,
    hard_sigmoid,
    hard_swish,
    places_of_masks,
    sizes_of_another,
    whole_pool,
    zeros_for_unwritten,
)
from backquant.pipeline.faithful import exported_as_called
from backquant.prepare import Request
from backquant.qconfig import PrepareCustomConfig, QConfigMapping
from backquant.reason_codes import ReasonCode

__all__ = [
    "CAPTURES",
    "Capturing",
    "captured_with",
    "exported",
    "exported_instead",
    "first_sentence",
    "is_exported",
    "said_to_fail",
    "spelled_for",
    "spelled_request",
    "traced_with_example",
    "with_state_whole",
    "with_reasons",
]

CAPTURES = ("auto", "trace", "export")
_INTO_SUBMODULE = (
    "move these lines into a submodule that holds what they write: it stays in float, with its\n"
    "state, and the rest is quantized; or pass the state as an input, and return it"
)
_WITH_TORCH = "draw with torch in place of numpy.random or random, or pass as an input what changes"
_OTHER = "the model gives other values at each call, from the same state of torch.random"
_STATE = "its forward writes {}, which the next call reads"


@dataclass(frozen=True)
class Capturing:
    """How to capture a model.

    ``how``: one of ``CAPTURES``.
    ``example_inputs``: ``None`` if there are none; the model can then only be traced.
    ``own``: the mappings that the backend itself has as defaults. With them, what the backend leaves in float
    by default stays float wherever the request names no place; ``None`` quantizes all that is requested, as
    PyTorch does.
    ``decompose``: tracing goes into attention and transformer layers and wrapped functions, as an export does
    (PyTorch's tracer keeps them as single calls), but for ``whole_classes`` and ``whole_functions``.
    ``named``: operators that a rule of the user names; rewrites leave them as they are.
    ``called``: what the model did with the example inputs, where that is known.
    """

    how: str = "auto"
    example_inputs: Any = None
    dynamic_shapes: Any = None
    own: tuple[QConfigMapping, ...] | None = None
    decompose: bool = False
    whole_classes: frozenset[type] = frozenset()
    whole_functions: frozenset[Any] = frozenset()
    named: frozenset[Any] = frozenset()
    called: ExampleCall | None = None

    @property
    def stateful(self) -> dict[str, str]:
        """Modules that stay whole because each call leaves something in them for the next; that reason."""
        state = {} if self.called is None else self.called.state
        listed = {path: " and ".join(map(repr, names)) for path, names in state.items()}
        return {path: _STATE.format(names) for path, names in listed.items()}

    @property
    def leaf_classes(self) -> frozenset[type]:
        """Those of ``whole_classes`` that would be traced through: of neither PyTorch nor this package."""
        ours = ("torch.", "backquant.")
        return frozenset(c for c in self.whole_classes if not f"{c.__module__}.".startswith(ours))

    def __post_init__(self) -> None:
        if self.how not in CAPTURES:
            raise UsageError(
                f"there is no capture {self.how!r}",
                where="capture",
                fix=f"capture={literal(CAPTURES[0])}, or {', '.join(map(literal, CAPTURES[1:]))}",
            )
        if self.dynamic_shapes is not None and self.how == "trace":
            raise UsageError(
                "dynamic_shapes is for torch.export: a symbolic trace fixes no size",
                where='capture="trace"',
                fix="dynamic_shapes=None",
            )


def captured_with(
    custom: PrepareCustomConfig | None, model: nn.Module, capturing: Capturing | None = None
) -> Captured:
    """Capture ``model``, leaving whole what ``custom`` names. The model is not changed.

    Raises ``CaptureError`` when it can be captured in none of the ways that ``capturing`` allows
    (default: by symbolic trace only).
    """
    as_pytorch = capturing is None
    capturing = Capturing("trace") if capturing is None else capturing
    _refuse_state(model, capturing)
    if capturing.called is not None:
        _refuse_outside(custom, model, capturing.called)
    if isinstance(model, ExportedModel):
        return exported(custom, model, capturing)
    if capturing.how == "export" or capturing.dynamic_shapes is not None:
        return exported(custom, model, capturing)
    try:
        traced = _traced(custom, model, capturing)
        return _checked_views(traced, as_pytorch)
    except CaptureError as error:
        if capturing.example_inputs is None:
            raise
        failure = error
    if capturing.how == "trace":
        why = said_to_fail(failure)
        return traced_with_example(custom, capturing, why, model)
    # behind the handler: within it an error of the export would have the trace's as its context, and its line
    return exported_instead(custom, model, capturing, failure)


def _refuse_state(model: nn.Module, capturing: Capturing) -> None:
    """Raise ``CaptureError`` where the model's own ``forward`` keeps state."""
    if "" in capturing.stateful:
        raise CaptureError(
            f"the model cannot become a graph, which has no state: {capturing.stateful['']}",
            where=type(model).__name__,
            fix=_INTO_SUBMODULE,
        )


def _refuse_outside(
    custom: PrepareCustomConfig | None, model: nn.Module, called: ExampleCall
) -> None:
    """Raise ``CaptureError`` where a call leaves something outside of the model for the next, and ``custom``
    does not leave the module that does it as it is."""
    matching = CustomMatching.of(custom)
    whole = tuple(
        f"{path}." for path in _paths(model, matching.untraced_names, matching.untraced_classes)
    )
    for path, names in called.outside.items():
        if f"{path}.".startswith(whole):
            continue
        what = (
            f"a call changes {' and '.join(names)}, outside of the model, and the next one reads it"
        )
        of_draws = _WITH_TORCH if {*names} <= GENERATORS.keys() else _INTO_SUBMODULE
        kept = f"PrepareCustomConfig().set_non_traceable_module_names([{path!r}])"
        raise CaptureError(
            what if names else _OTHER,
            where=f"{path or 'the model itself'}: {type(model.get_submodule(path)).__name__}.forward",
            fix=f"{kept}  # stays float, runs as it is" if path else of_draws,
        )


def with_state_whole(
    custom: PrepareCustomConfig | None, model: nn.Module, called: ExampleCall
) -> PrepareCustomConfig | None:
    """``custom``, which leaves modules whole, too, in which a call leaves something for the next.

    Raises ``CaptureError`` where the model's own ``forward`` keeps state.
    """
    _refuse_outside(custom, model, called)
    if not called.state:
        return custom
    _refuse_state(model, Capturing(called=called))
    extended = copy.deepcopy(custom) or PrepareCustomConfig()
    names = [*extended.non_traceable_module_names, *called.state]
    return extended.set_non_traceable_module_names(names)


def traced_with_example(
    custom: PrepareCustomConfig | None, capturing: Capturing, why: str, model: nn.Module
) -> Captured:
    """A trace of ``model`` that may ask for sizes and flags of the example inputs, after one that could not.

    The notes say what was held, and ``why`` a trace without them was not taken. Raises ``CaptureError``.
    """
    captured = _checked_views(_traced(custom, model, capturing, capturing.example_inputs), False)
    note = f"traced with the sizes and flags of the example inputs; a trace without them {why}"
    return replace(captured, notes=(note, *captured.notes))


def said_to_fail(error: CaptureError) -> str:
    """How a note says that a capture failed."""
    return f"fails: {first_sentence(error)} ({error.where})"


def _checked_views(traced: Captured, as_pytorch: bool) -> Captured:
    """``traced``, unless it writes to a view and reads the changed tensor by another name.

    Only ``torch.export`` writes such a change as a new value; in a trace, quantize nodes in between would
    lose it. ``as_pytorch``: such a trace is taken, with a note.
    """
    name = traced.lost_change
    if not name:
        return traced
    what = f"{name!r} changes a tensor in place that is read later under another name"
    if as_pytorch:
        note = f"{what}: the change may be lost where the tensor is quantized"
        return replace(traced, notes=(*traced.notes, note))
    refused = CaptureError(
        what,
        where=name,
        fix='capture="export", or write it without the change: torch.cat of the parts, or torch.where',
    )
    if name in traced.scopes:
        refused.part = traced.scopes[name].path
    raise refused


def is_exported(captured: Captured) -> bool:
    """Whether ``torch.export`` made the graph.

    >>> is_exported(capture(nn.ReLU()))
    False
    """
    return captured.origin == "torch.export"


def spelled_for(captured: Captured, request: Request) -> tuple[BackendConfig, QConfigMapping]:
    """The backend and the mapping in the spelling of the graph; as they are for a symbolic trace."""
    backend, mapping = request.backend_config, request.qconfig_mapping
    if not is_exported(captured):
        return backend, mapping
    return with_export_spellings(backend), mapping_for_export(mapping)


def spelled_request(prepared: nn.Module, request: ConvertRequest) -> ConvertRequest:
    """A conversion's request in the spelling of the prepared graph.

    >>> spelled_request(nn.ReLU(), ConvertRequest()) == ConvertRequest()
    True
    """
    if interface_of(prepared) is None:
        return request
    mapping, backend = request.qconfig_mapping, request.backend_config
    return replace(
        request,
        qconfig_mapping=None if mapping is None else mapping_for_export(mapping),
        backend_config=None if backend is None else with_export_spellings(backend),
    )


def _traced(
    custom: PrepareCustomConfig | None,
    model: nn.Module,
    capturing: Capturing,
    example_inputs: Any = None,
) -> Captured:
    custom_matching = CustomMatching.of(custom)
    custom_matching.check(model)
    if capturing.decompose and isinstance(model, nn.RNNBase | nn.RNNCellBase):
        model = called_whole(model)
    captured = capture(
        model,
        non_traceable_names={*custom_matching.untraced_names, *capturing.stateful},
        non_traceable_classes=custom_matching.untraced_classes | capturing.leaf_classes,
        preserved_attributes=() if custom is None else custom.preserved_attributes,
        decomposition=_decomposition(custom_matching, model, capturing),
        example_inputs=example_inputs,
    )
    captured = replace(captured, whole={**captured.whole, **capturing.stateful})
    if capturing.decompose and not model.training:
        inline_wrapped(captured.module, captured.scopes, capturing.whole_functions)
        fold_constants(captured.module, captured.scopes)
        move_rank_reads(captured.module)
        _rewrite(captured, capturing)
    return captured


def _rewrite(captured: Captured, capturing: Capturing) -> None:
    """Write what has no integer kernel as what has one, in place."""
    module, scopes, kept = captured.module, captured.scopes, capturing.named
    values = GraphValues(module, capturing.example_inputs, captured.free)
    write = GraphRewriter(module, scopes, values, kept | capturing.whole_functions)
    if write.apply(einsum_product):
        reshape_views(module.graph)
    write.kept = kept
    write.apply(*_RULES)
    computed_once(module, scopes, kept)


_RULES = (
    linear_product,
    hard_sigmoid,
    hard_swish,
    grouped_product,
    zeros_for_unwritten,
    places_of_masks,
    sizes_of_another,
    whole_pool,
    product_of_activations,
    added_bias,
    batch_norm_module,
    fold_affine,
)


def _decomposition(
    custom_matching: CustomMatching, model: nn.Module, capturing: Capturing
) -> Decomposition | None:
    if not capturing.decompose or capturing.example_inputs is None or model.training:
        return None
    return decomposition_of(
        model,
        capturing.example_inputs,
        whole_names=custom_matching.untraced_names,
        whole_classes=custom_matching.untraced_classes | capturing.whole_classes,
        tops=("",) if capturing.how == "trace" else (),
    )


def exported_instead(
    custom: PrepareCustomConfig | None, model: nn.Module, capturing: Capturing, error: CaptureError
) -> Captured:
    try:
        captured = exported(custom, model, capturing)
    except CaptureError as other:
        with suppress(CaptureError):
            why = said_to_fail(error)
            return _checked_views(traced_with_example(custom, capturing, why, model), False)
        raise CaptureError(
            f"the model can be captured neither by symbolic tracing ({first_sentence(error)}) nor by "
            f"torch.export ({first_sentence(other)})",
            where=other.where,
            fix=other.fix,
        ) from other
    note = f"captured by torch.export; a symbolic trace {said_to_fail(error)}"
    return replace(captured, notes=(note, *captured.notes[1:]))


def first_sentence(error: CaptureError) -> str:
    """The first sentence, without what all errors of a kind begin with."""
    reason = error.what
    for general in ("the model cannot be traced symbolically: ", "the model cannot be exported: "):
        reason = reason.removeprefix(general)
    return reason.partition(". ")[0]


def with_reasons(plan: Plan, captured: Captured) -> Plan:
    """``plan`` with the capture's notes, and its reasons for the modules that it left whole."""
    reasons: dict[str, Reason] = {}
    for name, decision in plan.decisions.items():
        why = captured.whole.get(decision.module_path)
        if (
            why is not None
            and decision.reasons
            and decision.reasons[0].rule == ReasonCode.NOT_TRACED
        ):
            only = f"only what is captured: {why}"
            reasons[name] = Reason(name, ReasonCode.NOT_CAPTURED, decision.operator, only)
    whole = (f"{path!r} stays float as a whole: {why}" for path, why in captured.whole.items())
    return replace(plan.explain(reasons), notes=(*captured.notes, *whole, *plan.notes))


def exported(
    custom: PrepareCustomConfig | None, model: nn.Module, capturing: Capturing
) -> Captured:
    custom_matching = CustomMatching.of(custom)
    custom_matching.check(model)
    entered = set(_paths(model, (), capturing.leaf_classes))
    untraced = _paths(model, custom_matching.untraced_names, custom_matching.untraced_classes)
    if isinstance(model, ExportedModel):
        entered = set()
    options = ExportOptions(
        dynamic_shapes=capturing.dynamic_shapes,
        whole={
            **dict.fromkeys(entered, "the backend has an entry for it"),
            **dict.fromkeys(untraced, "PrepareCustomConfig names it"),
            **capturing.stateful,
        },
        preserved_attributes=() if custom is None else custom.preserved_attributes,
    )
    captured = exported_as_called(model, capturing.example_inputs, options)
    if capturing.decompose and not model.training:
        _rewrite(captured, capturing)
    whole = {path: why for path, why in captured.whole.items() if path not in entered}
    notes = ("captured by torch.export", *captured.notes)
    return replace(captured, notes=notes, whole=whole)


def _paths(model: nn.Module, names: Collection[str], classes: Collection[type]) -> Iterator[str]:
    """The paths of the modules of these names and classes."""
    for path, module in model.named_modules(remove_duplicate=False):
        if path and (path in names or type(module) in classes):
            yield path
