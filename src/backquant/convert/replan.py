"""A new plan for ``convert_fx`` with another mapping or backend than ``prepare_fx`` had.

``match`` decides again, on the prepared graph without its observers. An operator that was not prepared cannot
be quantized any more:

1. A QConfig at conversion is that of the preparation, or ``None``: leave it in float. Rules may be
   added; none may be missing. (As in PyTorch, where ``None`` for a fused part, a custom or a
   standalone module is ignored; here it counts.)
2. An operator that was left in float stays so, with the reason that it was given then.
3. An operator that the other backend matches otherwise than the first did stays in float.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx, nn

from backquant.backend_config import BackendConfig
from backquant.convert.weights import without_training
from backquant.errors import ConfigError
from backquant.graph import set_module
from backquant.graph.shapes import GraphValues
from backquant.match import CustomMatching, Match, MatchKind, Plan, Reason, make_plan
from backquant.prepare import ObserverSource, Record, unobserved
from backquant.qconfig import QConfigMapping, qconfig_equals
from backquant.reason_codes import ReasonCode

_WHERE = "convert_fx(..., qconfig_mapping=...)"


def replanned(
    prepared: fx.GraphModule,
    state: Record,
    mapping: QConfigMapping | None,
    backend: BackendConfig | None,
) -> Record:
    """``state`` for this mapping and backend; its plan is still that of the preparation.

    The new plan is ``state.plan`` itself when both are ``None``.

    Raises ConfigError when the mapping asks for something else than that of prepare.
    """
    if mapping is None and backend is None:
        return state
    if mapping is not None:
        check_rules(state.qconfig_mapping, mapping)
    changed = replace(
        state,
        qconfig_mapping=state.qconfig_mapping if mapping is None else mapping,
        backend_config=state.backend_config if backend is None else backend,
    )
    plan = make_plan(
        _as_planned(prepared, state),
        state.scopes,
        changed.backend_config,
        changed.qconfig_mapping,
        fusions=state.plan.fusions,
        custom=CustomMatching.of(state.custom),
        values=GraphValues.given(state.shapes),
    )
    if backend is not None:
        plan = replace(plan, unreached_entries=())
    _check_requests(state, changed, plan)
    return replace(changed, plan=_no_more_than(state.plan, plan))


def check_rules(prepared: QConfigMapping, requested: QConfigMapping) -> None:
    """Raise ConfigError unless ``requested`` has every rule of ``prepared``, with its QConfig or None."""
    known = {(rule.kind, rule.target): rule for rule in requested.rules()}
    for rule in prepared.rules():
        name = f"{rule.kind} {rule.key}".strip()
        found = known.get((rule.kind, rule.target))
        if found is None:
            raise ConfigError(
                f"the mapping lacks the rule {name!r} that the model was prepared with",
                where=_WHERE,
                fix="pass the mapping of prepare_fx, with QConfigs replaced by None",
            )
        skips = found.qconfig is None and rule.kind != "global"
        if not skips and not qconfig_equals(rule.qconfig, found.qconfig):
            raise ConfigError(
                f"the rule {name!r} asks for another QConfig than the model was prepared with",
                where=f"{_WHERE}: {found.qconfig!r} instead of {rule.qconfig!r}",
                fix="pass the QConfig of prepare_fx, or None to leave it in float",
            )


def _check_requests(state: Record, changed: Record, plan: Plan) -> None:
    before = ObserverSource(state.backend_config, state.qconfig_mapping)
    after = ObserverSource(changed.backend_config, changed.qconfig_mapping)
    for name, decision in plan.decisions.items():
        requested = after.qconfig(decision.rule)
        was = before.qconfig(state.plan.decisions[name].rule)
        if requested is not None and not qconfig_equals(was, requested):
            raise ConfigError(
                f"node {name!r} was prepared with another QConfig",
                where=f"{_WHERE}: rule {decision.rule} asks for {requested!r}, prepared with {was!r}",
                fix="pass the QConfig of prepare_fx, or None to leave it in float",
            )


def _no_more_than(before: Plan, after: Plan) -> Plan:
    reasons: list[Reason] = []
    for match in after.matches:
        if not after.decisions[match.anchor].quantized:
            continue
        was = before.decisions[match.anchor]
        prepared = None if was.match is None else before.matches[was.match]
        if was.reasons:
            reasons.append(replace(was.reasons[-1], node=match.anchor))
        elif prepared is None or not was.quantized or not _same(prepared, match):
            reasons.append(
                Reason(
                    match.anchor,
                    ReasonCode.NOT_PREPARED,
                    f"{match.pattern}, quantized",
                    "what was observed when the model was prepared"
                    + ("" if prepared is None else f": {prepared.pattern}"),
                    fix="prepare_fx(..., backend_config=...) with the backend of the conversion",
                )
            )
    return after.refuse(reasons)


def _same(one: Match, two: Match) -> bool:
    return (one.nodes, one.root, one.kind) == (two.nodes, two.root, two.kind)


def _as_planned(prepared: fx.GraphModule, state: Record) -> fx.GraphModule:
    """The graph as it was planned: without observers, with the modules that were there then."""
    twin = unobserved(prepared)
    kinds = {match.anchor: match.kind for match in state.plan.matches}
    for node in twin.graph.nodes:
        name = node.name
        if node.op != "call_module":
            continue
        if kinds.get(name, MatchKind.PATTERN) is not MatchKind.PATTERN:
            node.target = state.scopes[name].path
            set_module(twin, node.target, _stand_in(state.scopes[name].module_type))
            continue
        module = twin.get_submodule(str(node.target))
        planned = _planned_class(state, name)
        if isinstance(module, nn.SyncBatchNorm) and planned is not None:
            set_module(twin, str(node.target), _stand_in(planned))
        else:
            set_module(twin, str(node.target), without_training(module))
    return twin


def _planned_class(state: Record, node: str) -> type | None:
    number = state.plan.decisions[node].match if node in state.plan.decisions else None
    if number is None or len(state.plan.matches[number].nodes) != 1:
        return None
    pattern = state.backend_config.shared_configs[state.plan.matches[number].entry].normal_pattern
    return pattern.anchor.op if isinstance(pattern.anchor.op, type) else None


def _stand_in(cls: type | None) -> nn.Module:
    """A module of a class, for matching only."""
    assert cls is not None and issubclass(cls, nn.Module)
    module: nn.Module = cls.__new__(cls)
    nn.Module.__init__(module)
    return module


def all_in_float(plan: Plan) -> Plan:
    """``plan`` with nothing quantized: a standalone module that is left out at conversion.

    >>> all_in_float(Plan("b")) == Plan("b")
    True
    """
    anchors = (match.anchor for match in plan.matches)
    return plan.refuse(
        Reason(anchor, ReasonCode.LEFT_OUT, "left out at conversion", "")
        for anchor in anchors
        if plan.decisions[anchor].quantized
    )
