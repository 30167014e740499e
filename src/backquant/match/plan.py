"""The plan: what `match` decided for every node, as data that prints, compares and serialises.

Invariants

1. A plan names nodes, modules and rules; it holds no node, tensor, module or callable.
2. Every ``call_*`` node of the graph it was made for has exactly one ``Decision``.
3. A decision whose outcome is ``FLOAT`` has at least one reason; ``QUANTIZED`` has a match and a
   dtype config.
4. Nodes of one match share one verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

__all__ = [
    "Decision",
    "Fusion",
    "Match",
    "MatchKind",
    "Outcome",
    "Plan",
    "Reason",
    "RuleKind",
    "RuleRef",
    "TensorAsk",
    "Verdict",
]


class Outcome(str, Enum):
    """What becomes of a node."""

    QUANTIZED = "quantized"  # its pattern was admitted
    FLOAT = "float"  # it computes in float; the decision says why
    NOT_TENSOR = "not_tensor"  # shape arithmetic and the like: nothing to quantize


class MatchKind(str, Enum):
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
    """

    kind: RuleKind
    index: int
    key: str

    def __str__(self) -> str:
        return f"{self.kind.value} {self.key}".rstrip()


@dataclass(frozen=True)
class Reason:
    """Why a request was refused (or what was unusual): rule, what was asked, what is admitted."""

    node: str
    rule: str  # short code, e.g. "weight-range", "dtype-token", "no-entry", "qconfig-none"
    asked: str
    admitted: str
    fix: str = ""
    place: str = ""  # e.g. 'qnnpack, entry "Linear", dtype config 1 of 4'


@dataclass(frozen=True)
class Verdict:
    """``ok`` with the reasons against (empty when ok)."""

    ok: bool
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class TensorAsk:
    """What a QConfig asks for one tensor, as data (for reports; prepare builds from the rule)."""

    dtype: torch.dtype
    observer: str
    qscheme: str = ""
    quant_min: int | None = None
    quant_max: int | None = None
    eps: float | None = None
    is_dynamic: bool = False


@dataclass(frozen=True)
class Fusion:
    """Modules (and functional tails) that become one fused module. Names of the unfused graph."""

    entry: int
    pattern: str
    nodes: tuple[str, ...]  # dataflow order; the last is the anchor
    root: str
    fused_module: str  # import path of the class


@dataclass(frozen=True)
class Match:
    """One occurrence of an entry's pattern."""

    entry: int  # index into BackendConfig.configs; -1 for standalone and custom modules
    pattern: str  # human readable
    nodes: tuple[str, ...]  # dataflow order; the last is the anchor
    root: str  # whose inputs are observed and whose module becomes a reference module
    kind: MatchKind = MatchKind.PATTERN

    @property
    def anchor(self) -> str:
        return self.nodes[-1]


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
    asked_activation: TensorAsk | None = None
    asked_weight: TensorAsk | None = None
    observation: str = ""  # name of the ObservationType that applies to this occurrence
    reasons: tuple[Reason, ...] = ()

    @property
    def quantized(self) -> bool:
        return self.outcome is Outcome.QUANTIZED


@dataclass(frozen=True)
class Plan:
    """One decision per node, in graph order."""

    backend: str
    fusions: tuple[Fusion, ...] = ()
    matches: tuple[Match, ...] = ()
    decisions: dict[str, Decision] = field(default_factory=dict)
    unused_rules: tuple[RuleRef, ...] = ()
    notes: tuple[str, ...] = ()  # e.g. 'module_name "decodr.fc1" matches no module (did you mean …)'
    unreached_entries: tuple[int, ...] = ()
