"""Reasons in words, with the place in the backend and the fix in code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache
from typing import Any

from torch import fx

from backquant.backend_config import BackendConfig, DTypeConfig, GraphPattern, QDQRules
from backquant.backend_config.describe import describe_dtype
from backquant.graph import GraphIndex, Scope
from backquant.match.conditions import as_products
from backquant.match.fixes import mapping_call, qconfig_fix
from backquant.match.matcher import Candidate, Matcher, Miss, PatternIndex
from backquant.match.occurrences import Occurrence
from backquant.match.plan import Decision, Reason
from backquant.match.refusal import Refusal, entry_text, op_name
from backquant.match.roles import requested_kind
from backquant.match.rules import Hit
from backquant.match.verdict import QConfigRequest, Roles, Ruling, tensor_text
from backquant.operators import find, spellings
from backquant.qconfig import QuantType
from backquant.reason_codes import ReasonCode

_NEAREST = 3


@dataclass(frozen=True)
class Refused:
    """A request that no dtype config of an entry admits."""

    occurrence: Occurrence
    hit: Hit
    requests: QConfigRequest
    roles: Roles
    ruling: Ruling


def _in_float(backend: BackendConfig) -> bool:
    """Whether the products of attention are in float by default, if the description has them."""
    rules = () if backend.defaults is None else backend.defaults.leave_float
    products, softmax = spellings("matmul"), spellings("softmax")
    return any(
        not {*products}.isdisjoint(rule.operators) and not {*softmax}.isdisjoint(rule.after)
        for rule in rules
    )


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
        self._entries = backend.shared_configs
        self._takes_apart = (backend.qdq or QDQRules()).attention == "whole" and not _in_float(
            backend
        )
        self._graph = graph
        self._patterns = patterns
        self._scopes = scopes
        self._misses = NearMisses(graph, patterns)

    def place(self, entry: int, dtype_config: int) -> str:
        """``x86, entry "Conv2d", dtype config 1 of 1``."""
        config = self._entries[entry]
        count = len(config.dtype_configs)
        name = entry_text(config)
        return f'{self._name}, entry "{name}", dtype config {dtype_config + 1} of {count}'

    def no_entry(self, node: fx.Node) -> Reason:
        """The backend does not know the operator (or only within longer patterns)."""
        key = self._graph.key(node)
        assert key is not None
        name = op_name(key.op)
        longer = self._patterns.containing(key)
        if longer:
            texts = [f'"{entry_text(c.config)}"' for c in longer[:_NEAREST]]
            more = f" and {len(longer) - _NEAREST} more" if len(longer) > _NEAREST else ""
            admitted = f"{self._name} has {name} only within {', '.join(texts)}{more}"
            miss = self._misses.text(node)
            admitted += f"; {miss}" if miss else ""
        else:
            admitted = f"{self._name} has no entry for {name}"
        same = self._same_operator(key.op)
        near = self._nearest(name)
        if same:
            admitted += f", but {'it has ' * bool(longer)}one for {same}, the same operator"
        elif near and not longer:
            admitted += f"; nearest: {', '.join(near)}"
        elif not longer and (related := self._recurrent(key.op)):
            admitted += f"; of recurrent layers it has {', '.join(related)}"
        fix = self._as_products(node)
        if same and not isinstance(key.op, type):
            fix = (
                f"write it as {same}; quantize() keeps that in float where it is slower on integers"
            )
        return Reason(node.name, ReasonCode.NO_ENTRY, f"{name}, quantized", admitted, fix=fix)

    def _as_products(self, node: fx.Node) -> str:
        """What quantizes attention where the backend has integer products; nothing for any other node."""
        if as_products(node) is None or not self._takes_apart:
            return ""
        anchors = (find(key.op) for key in self._patterns.anchors())
        if not any(known is not None and known.name == "matmul" for known in anchors):
            return ""
        return (
            'set_qdq(QDQRules(attention="products")) on the BackendConfig writes it as matrix products and a '
            "softmax, on integers: slower on x86 wherever it was measured (docs/speed.md)"
        )

    def _same_operator(self, op: Any) -> str:
        """Another spelling of ``op`` that the backend has an entry for; nothing if it has none."""
        known, alone = find(op), self._patterns.alone
        if known is None or op in known.aten or op in alone:
            return ""
        found = [call for call in known.calls if call in alone]
        found.sort(key=lambda call: isinstance(call, type) is not isinstance(op, type))
        return op_name(found[0]) if found else ""

    def _recurrent(self, op: Any) -> tuple[str, ...]:
        """The recurrent operators that the backend has entries for, if ``op`` is one."""
        known = find(op)
        if known is None or known.family != "recurrent":
            return ()
        anchors = [key.op for key in self._patterns.anchors()]
        found = (
            a for a in anchors if (other := find(a)) is not None and other.family == "recurrent"
        )
        return tuple(dict.fromkeys(map(op_name, found)))

    def _nearest(self, name: str) -> tuple[str, ...]:
        return _nearest_of(name, self._patterns.names)

    def not_traced(self, node: fx.Node) -> Reason:
        """The module was left whole, so nothing inside of it is seen."""
        module = self._graph.module_of(node)
        return Reason(
            node.name,
            ReasonCode.NOT_TRACED,
            op_name(type(module)) if module is not None else "",
            "only what was traced; this module was left whole (non-traceable)",
        )

    def other_kind(self, node: fx.Node, kinds: Iterable[QuantType], asked: Decision) -> Reason:
        """The module's class is mapped to an observed class, for another kind of quantization."""
        kind = requested_kind(asked.asked_activation, asked.asked_weight)
        module = self._graph.module_of(node)
        name = op_name(type(module))
        return Reason(
            node.name,
            ReasonCode.CUSTOM_MODULE,
            f"{name}, {'no known kind of' if kind is None else kind.key} quantization",
            f"{name} as custom module: {', '.join(known.key for known in kinds)}",
            place="PrepareCustomConfig.set_float_to_observed_mapping",
        )

    def no_qconfig(self, node: fx.Node, hit: Hit, request: str) -> Reason:
        """No rule asks for quantization (``request`` is what could be asked), or one asks to skip."""
        if hit.rule is not None:
            return Reason(node.name, ReasonCode.QCONFIG_NONE, f"{hit.rule} is None: skip", "")
        fix = request and mapping_call(node, self._path(node), hit, request)
        return Reason(
            node.name, ReasonCode.QCONFIG_NONE, "no rule of the QConfigMapping applies", "", fix=fix
        )

    def tensor_count(self, occurrence: Occurrence) -> Reason:
        """The entry has no observation type for this number of tensor arguments."""
        config = self._entries[occurrence.match.entry]
        known = ", ".join(map(str, config._num_tensor_args_to_observation_type))
        return Reason(
            occurrence.anchor.name,
            ReasonCode.TENSOR_COUNT,
            f"{occurrence.tensors} tensor arguments",
            f"{known} tensor arguments",
            place=f'{self._name}, entry "{occurrence.match.pattern}"',
        )

    def refused(self, request: Refused) -> tuple[Reason, ...]:
        """One reason per refusal, those of the nearest dtype config first and with the fix."""
        match, node = request.occurrence.match, request.occurrence.anchor
        refused, nearest = request.ruling.refused, request.ruling.nearest
        if nearest is None:
            place = f'{self._name}, entry "{match.pattern}"'
            return (
                Reason(node.name, ReasonCode.NO_DTYPE_CONFIG, "", "no dtype config", place=place),
            )
        config = self._entries[match.entry].dtype_configs[nearest]
        code = str(qconfig_fix(config, request.requests, request.roles))
        fix = mapping_call(node, self._path(node), request.hit, code)
        # Another QConfig is no fix for refusals of the operator itself, or of how its bias is computed.
        unmet = [refusal for role, refusal in refused[nearest] if role == "operator"]
        computed = [r for role, r in refused[nearest] if role == "bias" and r.fix]
        if unmet or len(computed) == len(refused[nearest]):
            stated = (refusal.fix for refusal in (*unmet, *computed) if refusal.fix)
            fix = "; ".join(dict.fromkeys(stated))
        reasons: list[Reason] = []
        for position in (nearest, *(i for i in range(len(refused)) if i != nearest)):
            dtype_config = self._entries[match.entry].dtype_configs[position]
            for role, broken in _by_tensor(refused[position]).items():
                reasons.append(
                    Reason(
                        node=node.name,
                        rule=broken[0].rule,
                        asked=_requested(role, broken, request.requests),
                        admitted=_admitted(role, broken, dtype_config),
                        fix="" if reasons else fix,
                        place=self.place(match.entry, position),
                    )
                )
        return tuple(reasons)

    def _path(self, node: fx.Node) -> str:
        scope = self._scopes.get(node.name)
        return scope.path if scope is not None else ""


def _by_tensor(refused: tuple[tuple[str, Refusal], ...]) -> dict[str, list[Refusal]]:
    """Refusals by role; equal ones of input and output as those of the activation."""
    found: dict[str, list[Refusal]] = {}
    for role, refusal in refused:
        found.setdefault(role, []).append(refusal)
    if found.get("input") and found.get("input") == found.get("output"):
        del found["output"]
        return {("activation" if role == "input" else role): r for role, r in found.items()}
    return found


def _requested(role: str, broken: list[Refusal], requests: QConfigRequest) -> str:
    """The request, with those parts that were refused for more than dtype and range."""
    if role == "operator":
        return ", ".join(dict.fromkeys(refusal.asked for refusal in broken))
    request = {"weight": requests.weight, "output": requests.of_output}.get(
        role, requests.activation
    )
    if role == "bias" or request is None or any(refusal.rule in _WHOLE for refusal in broken):
        return f"{role} {broken[0].asked}"
    parts = [refusal.asked for refusal in broken if refusal.rule not in _IN_TEXT]
    return ", ".join([tensor_text(role, request), *parts])


def _admitted(role: str, broken: list[Refusal], config: DTypeConfig) -> str:
    """The whole demand on a tensor, not only the part that was broken."""
    if role == "operator":
        return ", ".join(dict.fromkeys(refusal.admitted for refusal in broken))
    if role == "bias" or any(refusal.rule in _WHOLE for refusal in broken):
        return f"{role} {broken[0].admitted}"
    demands = {
        "weight": config.weight_dtype_with_constraints,
        "output": config.output_dtype_with_constraints,
    }
    demand = demands.get(role, config.input_dtype_with_constraints)
    notes = [r.admitted for r in broken if r.rule == ReasonCode.DYNAMIC]
    notes += [
        "the same storage under another name" for r in broken if r.rule == ReasonCode.DTYPE_TOKEN
    ]
    whole = f"{role} {describe_dtype(demand)}"
    notes += [
        r.admitted for r in broken if r.rule == ReasonCode.CH_AXIS and r.admitted not in whole
    ]
    return ", ".join([whole, *notes])


@lru_cache(maxsize=4096)
def _nearest_of(name: str, operators: tuple[str, ...]) -> tuple[str, ...]:
    """The operators whose names are most like ``name``, the same in another spelling first."""
    plain = {other: other.rpartition(".")[2].strip("()_").lower() for other in operators}
    wanted = name.rpartition(".")[2].strip("()_").lower()
    same = [other for other, text in plain.items() if text == wanted]
    close = get_close_matches(wanted, set(plain.values()), n=_NEAREST, cutoff=0.6)
    similar = [other for text in close for other, t in plain.items() if t == text]
    return tuple(dict.fromkeys([*same, *similar]))[:_NEAREST]


# Refusals that the text of the request already shows (dtype, range), and those that are told without it.
_IN_TEXT = (ReasonCode.QUANT_RANGE, ReasonCode.DTYPE, ReasonCode.DTYPE_TOKEN)
_WHOLE = (ReasonCode.NO_TENSOR, ReasonCode.NO_OBSERVER)


# Why a longer pattern nearly matched: the candidate that got furthest, and where it stopped.


class NearMisses:
    """The nearest miss of each node, found for all nodes at once when the first is asked for.

    >>> import torch
    >>> from backquant.backend_config import BackendConfig, BackendPatternConfig
    >>> swish = GraphPattern(["x"], {"gate": (torch.sigmoid, "x"), "out": (torch.mul, "x", "gate")},
    ...     name="swish")
    >>> backend = BackendConfig("b").set_backend_pattern_config(BackendPatternConfig(swish))
    >>> graph = GraphIndex(fx.symbolic_trace(lambda x, y: torch.mul(y, torch.sigmoid(x))))
    >>> print(NearMisses(graph, PatternIndex(backend)).text(graph.nodes["mul"]))
    for "swish", 'x' and 'y' would have to be one value
    """

    def __init__(self, graph: GraphIndex, patterns: PatternIndex) -> None:
        self._graph = graph
        self._patterns = patterns

    def text(self, node: fx.Node) -> str:
        """The entry whose pattern fitted the nodes around ``node`` best, and where it failed; empty if
        none did."""
        nearest = self._nearest.get(node)
        if nearest is None:
            return ""
        candidate, miss = nearest
        return f'for "{entry_text(candidate.config)}", {_text(candidate, miss)}'

    @cached_property
    def _nearest(self) -> dict[fx.Node, tuple[Candidate, Miss]]:
        matcher = Matcher(self._graph, self._patterns)
        found: dict[fx.Node, tuple[int, Candidate, Miss]] = {}
        for anchor in self._graph.calls():
            key = self._graph.key(anchor)
            for candidate in self._patterns.candidates(key) if key is not None else ():
                if len(candidate.pattern.nodes) == 1:
                    continue
                for miss in matcher.misses_at(anchor, candidate):
                    _keep_nearest(found, candidate, miss)
        return {node: (candidate, miss) for node, (_, candidate, miss) in found.items()}


def _keep_nearest(
    found: dict[fx.Node, tuple[int, Candidate, Miss]], candidate: Candidate, miss: Miss
) -> None:
    nodes = candidate.pattern.nodes
    operators = [
        value for i, value in miss.bound.items() if nodes[i].kind not in ("any", "literal")
    ]
    least = 1 if isinstance(candidate.config.pattern, GraphPattern) else 2
    if len(operators) < least:
        return
    for node in operators:
        if isinstance(node, fx.Node) and found.get(node, (0,))[0] < len(operators):
            found[node] = (len(operators), candidate, miss)


def _text(candidate: Candidate, miss: Miss) -> str:
    if miss.why == "used outside":
        inside = [value for value in miss.bound.values() if isinstance(value, fx.Node)]
        other = next(user for user in miss.value.users if user not in inside)
        return f"{miss.value.name!r} is also used outside of it, by {other.name!r}"
    if miss.why == "reads itself":
        return f"an input is its own operator {miss.value.name!r}"
    if miss.why == "other arguments":
        return f"{miss.value.name!r} is called with other arguments"
    if miss.why == "another value":
        first = miss.bound[miss.position]
        return f"{_value(first)} and {_value(miss.value)} would have to be one value"
    part = candidate.pattern.nodes[miss.position]
    expected = repr(part.op) if part.kind == "literal" else op_name(part.op)
    return f"{_value(miss.value)} stands where it has {expected}"


def _value(value: Any) -> str:
    return repr(value.name if isinstance(value, fx.Node) else value)
