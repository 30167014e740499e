"""Custom modules: a float module becomes the observed one that the user's class makes of it."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.errors import BackquantError, ConfigError
from backquant.graph import free_path, set_module, shallow_copy
from backquant.match.custom import requested_kind
from backquant.match.plan import Decision, Match, MatchKind, Plan
from backquant.match.rules import RuleTable
from backquant.qconfig import PrepareCustomConfig, QConfigMapping


def observe_custom_modules(
    prepared: fx.GraphModule, plan: Plan, mapping: QConfigMapping, custom: PrepareCustomConfig
) -> None:
    """Replace the custom modules of ``prepared`` by their observed forms, in place.

    The float module gets the QConfig of its rule as ``qconfig``, and so do the modules inside of it
    (that of their class or name, where the mapping has one), as in PyTorch. A module that is called
    under several rules is made once for each.

    Raises ConfigError when ``from_float`` fails or returns no module.
    """
    nodes = {node.name: node for node in prepared.graph.nodes}
    found = [
        match
        for match in plan.matches
        if match.kind is MatchKind.CUSTOM_MODULE and plan.decisions[match.anchor].quantized
    ]
    paths = [str(nodes[match.anchor].target) for match in found]
    floats = {path: prepared.get_submodule(path) for path in paths}
    made: dict[tuple[str, Any], str] = {}
    for match, path in zip(found, paths, strict=True):
        decision = plan.decisions[match.anchor]
        key = (path, decision.rule)
        if key not in made:
            module = shallow_copy(floats[path])
            rule = decision.rule
            qconfig = None if rule is None else mapping.lookup(rule.kind, rule.index)
            give_qconfigs(module, path, qconfig, RuleTable(mapping))
            made[key] = free_path(prepared, path) if path in made.values() else path
            set_module(prepared, made[key], _observed(module, match, decision, custom))
        nodes[match.anchor].target = made[key]


def give_qconfigs(module: nn.Module, path: str, qconfig: Any, table: RuleTable) -> None:
    """Set ``module.qconfig``, and that of the modules inside by their own rules, in place.

    >>> from backquant.qconfig import QConfigMapping
    >>> block = nn.Sequential(nn.ReLU())
    >>> give_qconfigs(block, "block", "asked", RuleTable(QConfigMapping()))
    >>> block[0].qconfig
    'asked'
    """
    module.qconfig = qconfig
    for name, child in module.named_children():
        child_path = f"{path}.{name}"
        hit = table.by_exact_name(child_path) or table.by_type(type_before_parametrizations(child))
        own = qconfig if hit is None else hit.qconfig
        give_qconfigs(child, child_path, getattr(child, "qconfig", own), table)


def _observed(
    module: nn.Module, match: Match, decision: Decision, custom: PrepareCustomConfig
) -> nn.Module:
    kind = requested_kind(decision.asked_activation, decision.asked_weight)
    assert kind is not None, "a custom module that is quantized was matched for a kind"
    observed_class = custom.float_to_observed_mapping[kind][type(module)]
    names = f"{type(module).__name__}, {observed_class.__name__}"
    where = f"PrepareCustomConfig.set_float_to_observed_mapping({names}), node {match.anchor!r}"
    fix = (
        f"class {observed_class.__name__}:\n    @classmethod\n"
        "    def from_float(cls, module): ...  # a module"
    )
    from_float = getattr(observed_class, "from_float", None)
    if not callable(from_float):
        raise ConfigError(
            f"{observed_class.__name__} has no class method from_float", where=where, fix=fix
        )
    try:
        made = from_float(module)
    except BackquantError as error:
        raise type(error)(error.what, where=where, fix=error.fix) from error
    except Exception as error:
        raise ConfigError(
            f"{observed_class.__name__}.from_float raised {type(error).__name__}: {error}",
            where=where,
            fix=fix,
        ) from error
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"{observed_class.__name__}.from_float returned {made!r}, which is no module",
            where=where,
            fix=fix,
        )
    if getattr(made, "qconfig", None) is None:
        made.qconfig = module.qconfig
    return made.train(module.training)
