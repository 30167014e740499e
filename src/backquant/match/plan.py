"""The plan: what `match` decided for every node, as data that prints, compares and serialises.

Invariants

1. A plan names nodes, modules and rules; it holds no node, tensor, module or callable.
2. Every ``call_*`` node of the graph it was made for has exactly one ``Decision``.
3. A decision whose outcome is ``FLOAT`` has at least one reason; ``QUANTIZED`` has a match and, for
   patterns, a dtype config.
4. Nodes of one match share one verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch

from backquant.backend_config import BackendConfig
from backquant.dtypes import Granularity
from backquant.errors import ConfigError
from backquant.identifiers import labelled
from backquant.json_text import from_plain_data, plain_data

# Not written where they are empty: plans that were written before have none.
_SELDOM = ("separate_layers", "by_sample")

# Fields of plans that were written before, and their names now.
_NAMES = {"apart": "separate_layers"}


class Outcome(str, Enum):
    """What becomes of a node."""

    QUANTIZED = "quantized"  # its pattern was admitted
    FLOAT = "float"  # it computes in float; the decision says why
    NOT_TENSOR = "not_tensor"  # shape arithmetic and the like: nothing to quantize


class MatchKind(str, Enum):
    """What decides how the nodes of a match are quantized."""

    PATTERN = "pattern"
    STANDALONE = "standalone"
    CUSTOM_MODULE = "custom_module"


class RuleKind(str, Enum):
    """Which setter of QConfigMapping a rule came from, weakest first."""

    GLOBAL = "global"
    OBJECT_TYPE = "object_type"
    MODULE_NAME_REGEX = "module_name_regex"
    MODULE_NAME = "module_name"
    MODULE_NAME_OBJECT_TYPE_ORDER = "module_name_object_type_order"


@dataclass(frozen=True)
class RuleRef:
    """One rule of a QConfigMapping, by kind and position, with its key in readable form.

    ``index`` is the position among the rules of that kind, in the order of registration.

    >>> str(RuleRef(RuleKind.MODULE_NAME, 0, "encoder.fc"))
    'module_name "encoder.fc"'
    """

    kind: RuleKind
    index: int
    key: str

    def __str__(self) -> str:
        named = self.kind in (RuleKind.MODULE_NAME, RuleKind.MODULE_NAME_REGEX)
        key = f'"{self.key}"' if named else self.key
        return f"{self.kind.value} {key}".rstrip()


@dataclass(frozen=True)
class Reason:
    """Why a request was refused (or what was unusual): rule, what was asked, what is admitted.

    >>> print(Reason("fc2", "quant-range", "weight qint8 [-128, 127]", "weight qint8 [-127, 127]"))
    requested weight qint8 [-128, 127]
    supported weight qint8 [-127, 127]
    """

    node: str
    rule: str  # a ReasonCode, or a code of another package or of the TensorRT rules
    asked: str
    admitted: str
    fix: str = ""
    place: str = ""  # e.g. 'qnnpack, entry "Linear", dtype config 1 of 4'

    def __str__(self) -> str:
        lines = []
        if self.asked:
            lines.append(f"requested {self.asked}")
        if self.admitted or self.place:
            lines.append(f"supported {self.admitted}" + (f"   {self.place}" if self.place else ""))
        if self.fix:
            lines.append("fix       " + self.fix.replace("\n", "\n          "))
        return "\n".join(lines)


@dataclass(frozen=True)
class TensorRequest:
    """What a QConfig asks for one tensor, as data (for reports; prepare builds from the rule).

    ``scale`` and ``zero_point`` are those of fixed qparams; ``spelled`` is the factory as code.
    """

    dtype: torch.dtype
    observer: str
    qscheme: str = ""
    quant_min: int | None = None
    quant_max: int | None = None
    eps: float | None = None
    is_dynamic: bool = False
    ch_axis: int | None = None
    scale: float | None = None
    zero_point: int | None = None
    is_fake_quantize: bool = False
    spelled: str = ""
    granularity: str = ""  # set for groups, blocks and tokens; for others the qscheme says it

    @property
    def is_fixed(self) -> bool:
        """Whether the qparams are given instead of measured."""
        return self.scale is not None

    @property
    def is_per_channel(self) -> bool:
        """Whether each channel gets qparams of its own."""
        return not self.granularity and self.qscheme.startswith("per_channel")

    @property
    def shared_over(self) -> Granularity:
        """What one scale is for.

        >>> TensorRequest(torch.qint8, "O", qscheme="per_channel_affine", ch_axis=1).shared_over.words
        'per channel along axis 1'
        """
        if self.granularity:
            return Granularity.parse(self.granularity)
        if self.is_per_channel:
            return Granularity("per_channel", axis=self.ch_axis)
        return Granularity("per_tensor")

    @property
    def is_symmetric(self) -> bool:
        """Whether the zero point is fixed in the middle of the range."""
        return self.qscheme.endswith("_symmetric")


@dataclass(frozen=True)
class Fusion:
    """Modules (and functional tails) that become one fused module. Names of the unfused graph.

    ``bound`` holds, for each node of the entry's normal pattern, the name of the graph node bound
    to it (``""`` for literals and for arguments that are no nodes); ``extra_inputs`` are appended
    to the arguments of the root.
    """

    entry: int
    pattern: str
    nodes: tuple[str, ...]  # dataflow order; the last is the anchor
    root: str
    fused_module: str  # import path of the class
    bound: tuple[str, ...] = ()
    extra_inputs: tuple[str, ...] = ()

    @property
    def anchor(self) -> str:
        """The last node: whose value the fused module computes."""
        return self.nodes[-1]


@dataclass(frozen=True)
class PortUse:
    """An input or the output of a graph pattern in one occurrence.

    ``values``: the nodes that are bound to it (several when it is a list). ``readers``: the operators
    of the match that read an input; none for the output. ``role`` and ``shares_with`` are those of
    the entry's ``Port``.
    """

    name: str
    values: tuple[str, ...]
    readers: tuple[str, ...]
    role: str
    shares_with: str = ""


@dataclass(frozen=True)
class Match:
    """One occurrence of an entry's pattern.

    ``ports`` are those of a graph pattern; ``open_readers`` its operators whose arguments it does not
    list, which are observed as those of the root of any other pattern are. ``weighted``: its operators
    whose modules become reference modules.
    """

    entry: int  # index into BackendConfig.configs; -1 for standalone and custom modules
    pattern: str  # human readable
    nodes: tuple[str, ...]  # dataflow order; the last is the anchor
    root: str  # the node whose inputs are observed and whose module becomes a reference module
    kind: MatchKind = MatchKind.PATTERN
    ports: tuple[PortUse, ...] = ()
    open_readers: tuple[str, ...] = ()
    weighted: tuple[str, ...] = ()

    @property
    def readers(self) -> tuple[str, ...]:
        """The operators whose inputs are observed."""
        if not self.ports:
            return (self.root,)
        named = (name for port in self.ports for name in port.readers)
        return tuple(dict.fromkeys((*self.open_readers, *named)))

    @property
    def carriers(self) -> tuple[str, ...]:
        """The operators whose weights are those of the match."""
        return self.weighted if self.ports else (self.root,)

    @property
    def anchor(self) -> str:
        """The last node: whose output is observed."""
        return self.nodes[-1]


@dataclass(frozen=True)
class Predicate:
    """A constraint that only measured scales can answer; see ``recheck``.

    ``rule`` is ``"scale-max"`` or ``"scale-set"`` (every scale is at most ``bound``),
    ``"power-of-two-scale"``, ``"requantization-ratio"`` (each is at most ``bound``, at least ``-bound`` of a
    negative one, a power of two where it is None), ``"bias-step"`` (each beside a bias is at most ``bound``),
    ``"bias-range"`` (no bias has more than ``bound`` steps),
    or ``"zero-point"`` (``bound`` is the sign of the only values with room).
    """

    node: str  # anchor of the match
    role: str  # "input", "output", "weight"; "ratio", "bias step": input × weight / output; "bias": in steps
    rule: str
    bound: float | None
    admitted: str
    place: str


@dataclass(frozen=True)
class Decision:
    """What becomes of one node, and why."""

    node: str
    operator: str  # readable: "Conv2d", "torch.add", ".view()"
    module_path: str  # dotted path of the module the node calls or lives in
    outcome: Outcome
    match: int | None = None  # index into Plan.matches
    dtype_config: int | None = None  # index into the entry's dtype_configs
    rule: RuleRef | None = None  # which QConfigMapping rule applied; None: none did
    asked_activation: TensorRequest | None = None
    asked_weight: TensorRequest | None = None
    observation: str = ""  # name of the ObservationType that applies to this occurrence
    reasons: tuple[Reason, ...] = ()
    asked_output: TensorRequest | None = None  # None: outputs are requested as asked_activation

    @property
    def quantized(self) -> bool:
        """Whether the node's pattern was admitted."""
        return self.outcome is Outcome.QUANTIZED

    def refused(self, *reasons: Reason) -> Decision:
        """The same node in float, with these reasons after those that it has.

        >>> found = Decision("fc", "Linear", "fc", Outcome.QUANTIZED).refused(Reason("", "no-entry", "", ""))
        >>> found.outcome.value, found.reasons[0].node
        ('float', 'fc')
        """
        own = (replace(reason, node=self.node) for reason in reasons)
        return replace(
            self, outcome=Outcome.FLOAT, dtype_config=None, reasons=(*self.reasons, *own)
        )

    def __str__(self) -> str:
        """The decision as a paragraph, with the reasons of the nearest dtype config."""
        what = {
            Outcome.QUANTIZED: "is quantized",
            Outcome.FLOAT: "stays float",
            Outcome.NOT_TENSOR: "computes no tensor",
        }[self.outcome]
        lines = [f"{self.module_path or self.node}  {self.operator}  {what}"]
        for position, reason in enumerate(self.reasons):
            if reason.place != self.reasons[0].place:
                break  # the rest are refusals of dtype configs that fit less well
            text = str(reason).splitlines()
            rule = str(self.rule)
            if position == 0 and self.rule is not None and rule not in reason.asked:
                text[0] += f"   QConfigMapping: {rule}"
            lines += [f"  {line}" for line in text]
        return labelled("\n".join(lines))


class BySample(NamedTuple):
    """How the input of a layer is scaled sample by sample: the number of its axes. ``channels``: what the
    output channels are divided by, where they are rounded in one range; empty where they are not. ``parts``:
    into how many parts the input channels are divided, each scaled by itself."""

    axes: int
    channels: tuple[float, ...] = ()
    parts: int = 1


@dataclass(frozen=True)
class Plan:
    """One decision per node, in graph order.

    ``no_tensors`` names the nodes whose value is certainly no float tensor (sizes, masks).
    ``separate_layers`` and ``by_sample`` say how the captured graph was changed before it was matched: the
    nodes of recurrent layers that became one call for each layer, and of those whose inputs are scaled
    sample by sample.
    """

    backend: str
    fusions: tuple[Fusion, ...] = ()
    matches: tuple[Match, ...] = ()
    decisions: dict[str, Decision] = field(default_factory=dict)
    unused_rules: tuple[RuleRef, ...] = ()
    notes: tuple[
        str, ...
    ] = ()  # e.g. 'module_name "decodr.fc1" matches no module (did you mean …)'
    unreached_entries: tuple[int, ...] = ()
    predicates: tuple[Predicate, ...] = ()
    no_tensors: tuple[str, ...] = ()
    separate_layers: tuple[str, ...] = ()
    by_sample: Mapping[str, BySample] = field(default_factory=dict)

    def refuse(self, reasons: Iterable[Reason]) -> Plan:
        """The plan in which the matches that ``reasons`` name, by any of their nodes, stay float after all.

        The one way to turn what is planned to float. What other operators become does not change.

        >>> Plan("x86").refuse([]) == Plan("x86")
        True
        """
        by_match: dict[int, list[Reason]] = {}
        for reason in reasons:
            match = self.decisions[reason.node].match
            assert match is not None, f"{reason.node} is in no match"
            by_match.setdefault(match, []).append(reason)
        decisions = dict(self.decisions)
        for index, found in by_match.items():
            for name in self.matches[index].nodes:
                decisions[name] = decisions[name].refused(*found)
        return replace(self, decisions=decisions) if by_match else self

    def explain(self, reasons: Mapping[str, Reason]) -> Plan:
        """The plan with these reasons in place of the first ones of nodes that stay float, by name.

        >>> Plan("x86").explain({}) == Plan("x86")
        True
        """
        decisions = dict(self.decisions)
        for name, reason in reasons.items():
            if not decisions[name].quantized:
                decisions[name] = replace(decisions[name], reasons=(reason,))
        return replace(self, decisions=decisions)

    def noted(self, *notes: str) -> Plan:
        """The plan with these notes after those that it has.

        >>> Plan("x86").noted("by hand").notes
        ('by hand',)
        """
        return replace(self, notes=(*self.notes, *notes))

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able values; the inverse of ``from_dict``.

        >>> Plan("x86").to_dict()["backend"]
        'x86'
        """
        values: dict[str, Any] = plain_data(self)
        values["decisions"] = list(values["decisions"].values())
        return {name: item for name, item in values.items() if item or name not in _SELDOM}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Read back what ``to_dict`` wrote. Raises ``ConfigError`` for a missing or unknown field.

        >>> Plan.from_dict(Plan("x86").to_dict()) == Plan("x86")
        True
        """
        try:
            named = {_NAMES.get(name, name): value for name, value in values.items()}
            listed = {item["node"]: item for item in named["decisions"]}
            made: Plan = from_plain_data(cls, {**named, "decisions": listed})
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ConfigError(f"this is no plan: {error}", where="Plan.from_dict") from error
        return made


# The integer dtypes that a plan computes in, operator by operator.


@dataclass(frozen=True)
class IntegerDtype:
    """``operator`` computes on integers of ``dtype`` in one ``role``: input, output or weight."""

    operator: str
    role: str
    dtype: torch.dtype


def integer_dtypes(plan: Plan, config: BackendConfig) -> Iterator[IntegerDtype]:
    """The dtypes of each match that is quantized statically.

    What computes in float, dynamically or on weights alone needs no integer activations and is left out.
    """
    entries = config.shared_configs
    for match in plan.matches:
        decision = plan.decisions[match.anchor]
        if not decision.quantized or decision.dtype_config is None or match.entry < 0:
            continue
        chosen = entries[match.entry].dtype_configs[decision.dtype_config]
        if chosen.is_dynamic or not _is_integer(chosen.input_dtype, chosen.output_dtype):
            continue
        operator = f"{decision.module_path or match.anchor} ({match.pattern})"
        for role in ("input", "output", "weight"):
            dtype = getattr(chosen, f"{role}_dtype")
            if _is_integer(dtype):
                yield IntegerDtype(operator, role, dtype)


def _is_integer(*dtypes: torch.dtype | None) -> bool:
    return all(d is not None and not d.is_floating_point and not d.is_complex for d in dtypes)
