"""Reasons in words, with the place in the backend and the fix in code."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from torch import fx

from backquant.backend_config import BackendConfig
from backquant.graph import GraphIndex, Scope
from backquant.match.fixes import mapping_call, qconfig_code
from backquant.match.index import PatternIndex
from backquant.match.names import op_name, pattern_text
from backquant.match.plan import Match, Reason
from backquant.match.rules import Hit
from backquant.match.verdict import Asks, Roles, Ruling, tensor_text

__all__ = ["ReasonWriter"]

_NEAREST = 3


class ReasonWriter:
    """Writes the reasons for one graph and one backend.

    >>> from torch import nn
    >>> from backquant.backend_config import BackendPatternConfig
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.LeakyReLU()))
    >>> backend = BackendConfig("b").set_backend_pattern_config(BackendPatternConfig(nn.ReLU))
    >>> graph = GraphIndex(gm)
    >>> writer = ReasonWriter(backend, graph, PatternIndex(backend), {})
    >>> writer.no_entry(graph.nodes["_0"]).admitted
    'b has no entry for LeakyReLU; nearest: ReLU'
    """

    def __init__(
        self,
        backend: BackendConfig,
        graph: GraphIndex,
        patterns: PatternIndex,
        scopes: Mapping[str, Scope],
    ) -> None:
        self._name = backend.name or "the backend"
        self._entries = backend.configs
        self._graph = graph
        self._patterns = patterns
        self._scopes = scopes
        self._operators: list[str] | None = None

    def place(self, entry: int, dtype_config: int) -> str:
        """``x86, entry "Conv2d", dtype config 1 of 1``."""
        config = self._entries[entry]
        count = len(config.dtype_configs)
        name = pattern_text(config.normal_pattern)
        return f'{self._name}, entry "{name}", dtype config {dtype_config + 1} of {count}'

    def no_entry(self, node: fx.Node) -> Reason:
        """The backend does not know the operator (or only within longer patterns)."""
        key = self._graph.key(node)
        assert key is not None
        name = op_name(key.op)
        longer = self._patterns.containing(key)
        if longer:
            texts = [f'"{pattern_text(c.pattern)}"' for c in longer[:_NEAREST]]
            more = f" and {len(longer) - _NEAREST} more" if len(longer) > _NEAREST else ""
            admitted = f"{self._name} has {name} only within {', '.join(texts)}{more}"
            return Reason(node.name, "no-entry", name, admitted, place=self._name)
        admitted = f"{self._name} has no entry for {name}"
        near = self._nearest(name)
        if near:
            admitted += f"; nearest: {', '.join(near)}"
        return Reason(node.name, "no-entry", name, admitted, place="")

    def _nearest(self, name: str) -> list[str]:
        if self._operators is None:
            keys = self._patterns.anchors()
            self._operators = list(dict.fromkeys(op_name(key.op) for key in keys))
        plain = {other: other.rpartition(".")[2].strip("()_").lower() for other in self._operators}
        wanted = name.rpartition(".")[2].strip("()_").lower()
        same = [other for other, text in plain.items() if text == wanted]
        close = get_close_matches(wanted, set(plain.values()), n=_NEAREST, cutoff=0.6)
        similar = [other for text in close for other, t in plain.items() if t == text]
        return list(dict.fromkeys([*same, *similar]))[:_NEAREST]

    def not_traced(self, node: fx.Node) -> Reason:
        """The module was left whole, so nothing inside of it is seen."""
        module = self._graph.module_of(node)
        return Reason(
            node.name,
            "not-traced",
            op_name(type(module)),
            "only what was traced; this module was left whole (non-traceable)",
        )

    def no_qconfig(self, node: fx.Node, hit: Hit) -> Reason:
        """No rule asks for quantization, or one asks to skip."""
        if hit.rule is not None:
            return Reason(
                node.name, "qconfig-none", f"{hit.rule} is None: skip", "", place=""
            )
        call = mapping_call(node, self._path(node), hit, f'get_default_qconfig("{self._name}")')
        return Reason(
            node.name, "qconfig-none", "no rule of the QConfigMapping applies", "", fix=call
        )

    def tensor_count(self, node: fx.Node, match: Match, count: int) -> Reason:
        """The entry has no observation type for this number of tensor arguments."""
        config = self._entries[match.entry]
        known = ", ".join(map(str, config._num_tensor_args_to_observation_type))
        return Reason(
            node.name,
            "tensor-count",
            f"{count} tensor arguments",
            f"{known} tensor arguments",
            place=f'{self._name}, entry "{match.pattern}"',
        )

    def refused(
        self,
        node: fx.Node,
        match: Match,
        hit: Hit,
        asks: Asks,
        roles: Roles,
        ruling: Ruling,
    ) -> tuple[Reason, ...]:
        """One reason per refusal, those of the nearest dtype config first and with the fix."""
        nearest = ruling.nearest
        if nearest is None:
            place = f'{self._name}, entry "{match.pattern}"'
            return (Reason(node.name, "no-dtype-config", "", "no dtype config", place=place),)
        config = self._entries[match.entry].dtype_configs[nearest]
        fix = mapping_call(node, self._path(node), hit, qconfig_code(config, asks, roles))
        order = [nearest, *(i for i in range(len(ruling.refused)) if i != nearest)]
        reasons = []
        for position in order:
            for role, refusal in ruling.refused[position]:
                ask = asks.weight if role == "weight" else asks.activation
                whole = refusal.rule in ("quant-range", "dtype", "dtype-token") and role != "bias"
                asked = tensor_text(role, ask) if whole and ask else f"{role} {refusal.asked}"
                reasons.append(
                    Reason(
                        node=node.name,
                        rule=refusal.rule,
                        asked=asked,
                        admitted=f"{role} {refusal.admitted}",
                        fix="" if reasons else fix,
                        place=self.place(match.entry, position),
                    )
                )
        return tuple(reasons)

    def _path(self, node: fx.Node) -> str:
        scope = self._scopes.get(node.name)
        return scope.path if scope is not None else ""
