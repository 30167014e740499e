"""A QConfig, as code, for an operator that no rule of the mapping quantizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from backquant.backend_config import BackendConfig, BackendPatternConfig
from backquant.errors import BackquantError, did_you_mean, literal
from backquant.graph import Scope
from backquant.identifiers import label
from backquant.match.fixes import qconfig_fix
from backquant.match.plan import Decision, Fusion, RuleKind, RuleRef
from backquant.match.qconfig_reader import QConfigReader
from backquant.match.rules import RuleTable
from backquant.match.verdict import Judge, QConfigRequest, Roles
from backquant.qconfig import QConfig, get_default_qconfig

_NOTHING = QConfigRequest(None, None)


class Suggestions:
    """Suggests the backend's default QConfig where the entry admits it, else another that the entry admits.

    >>> import torch
    >>> from backquant.backend_config import get_backend_config
    >>> backend = get_backend_config("x86")
    >>> suggestions, roles = Suggestions(backend, QConfigReader(), Judge()), Roles(True, False, False)
    >>> known = [config.pattern for config in backend.shared_configs]
    >>> suggestions.request(known.index(torch.add), roles)
    'get_default_qconfig("x86")'
    >>> suggestions.request(known.index(torch.sigmoid), roles)[:46]
    'QConfig(\\n    activation=FixedQParamsObserver.w'
    """

    def __init__(self, backend: BackendConfig, reader: QConfigReader, judge: Judge) -> None:
        self._backend = backend
        self._entries = backend.shared_configs
        self._reader = reader
        self._judge = judge

    def request(self, entry: int, roles: Roles) -> str:
        """For an operator that matches ``entry``; below zero for modules that match none."""
        if entry < 0:
            return "default_qconfig" if self._default is None else self._default_code
        config = self._entries[entry]
        if self._default is not None and self._admits(entry, config, self._default, roles):
            return self._default_code
        nearest = self._judge.rule(entry, config, _NOTHING, roles).nearest
        if nearest is None:
            return ""
        return str(qconfig_fix(config.dtype_configs[nearest], _NOTHING, roles))

    @property
    def _default_code(self) -> str:
        return f"get_default_qconfig({literal(self._backend.name)})"

    @cached_property
    def _default(self) -> QConfig | None:
        try:
            return get_default_qconfig(self._backend.name)
        except BackquantError:  # a backend that is not registered under its name
            return None

    def _admits(
        self, entry: int, config: BackendPatternConfig, qconfig: QConfig, roles: Roles
    ) -> bool:
        where = self._default_code
        reader = self._reader
        requests = QConfigRequest(
            reader.activation(qconfig, where),
            reader.weight(qconfig, where),
            reader.output(qconfig, where),
        )
        return self._judge.rule(entry, config, requests, roles).dtype_config is not None


# Rules of a QConfigMapping that applied to no node.


def unused_rules(
    table: RuleTable,
    decisions: Mapping[str, Decision],
    scopes: Mapping[str, Scope],
    fusions: Iterable[Fusion] = (),
) -> tuple[tuple[RuleRef, ...], tuple[str, ...]]:
    """Rules that applied to no node; and notes on those that probably have a mistake in them.

    >>> from backquant.qconfig import QConfigMapping
    >>> table = RuleTable(QConfigMapping().set_module_name("decodr", None))
    >>> unused_rules(table, {}, {"relu": Scope("decoder", None)})[1]
    ('module_name "decodr" matches no module (did you mean "decoder"?)',)
    """
    used = {decision.rule for decision in decisions.values()}
    unused = tuple(rule for rule in table.rules if rule not in used)
    paths = _module_paths(scopes)
    fused = _fused_into(scopes, fusions)
    notes = (_note(rule, table, paths, fused) for rule in unused)
    return unused, tuple(note for note in notes if note)


def _module_paths(scopes: Mapping[str, Scope]) -> dict[str, None]:
    paths: dict[str, None] = {}
    for scope in scopes.values():
        path = label(scope.path)
        while path and path not in paths:
            paths[path] = None
            path = path.rpartition(".")[0]
    return paths


def _fused_into(scopes: Mapping[str, Scope], fusions: Iterable[Fusion]) -> dict[str, str]:
    into: dict[str, str] = {}
    for fusion in fusions:
        root = scopes.get(fusion.root)
        for name in fusion.nodes:
            scope = scopes.get(name)
            if root is not None and scope is not None and name != fusion.root:
                into[label(scope.path)] = label(root.path)
    return into


def _note(rule: RuleRef, table: RuleTable, paths: dict[str, None], fused: dict[str, str]) -> str:
    target = table.targets[rule]
    if rule.kind is RuleKind.MODULE_NAME_REGEX:
        return f'module_name_regex "{target}" applies to no module'
    if rule.kind is RuleKind.OBJECT_TYPE:
        return ""
    name = label(target if rule.kind is RuleKind.MODULE_NAME else target[0])
    text = f'{rule.kind.value} "{rule.key}"'
    if name in fused:
        return f'{text} does nothing: "{name}" became a part of "{fused[name]}"'
    if name and name not in paths:
        meant = did_you_mean(name, paths, most=2, quote='"{}"'.format)
        return f"{text} matches no module" + (f" ({meant})" if meant else "")
    return f"{text} applies to no operator"
