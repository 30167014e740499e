"""What a reference model knows about itself, and the working copy of a conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from backquant.backend_config import BackendConfig, LeaveFloat
from backquant.dtypes import ObservedQParams, QParams
from backquant.errors import UsageError
from backquant.graph import GraphEditor
from backquant.match.plan import Plan, Reason
from backquant.observe.together import calculate_together
from backquant.prepare import KeptGraphModule, ObserverSource, Record, Role
from backquant.prepare.record import QParamsKey
from backquant.qconfig import ConvertCustomConfig, QConfigMapping

# What ``convert_fx`` may be asked for beyond what the prepared model says.


#: Takes a tensor that conversion made and returns it, possibly in other memory (a mapped file).
Kept = Callable[[torch.Tensor], torch.Tensor]

#: The signature of ``calculate_together``.
Calculate = Callable[[Iterable[Any]], Mapping[int, tuple[torch.Tensor, torch.Tensor]]]


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """
    >>> as_it_is(torch.ones(1))
    tensor([1.])
    """
    return tensor


@dataclass(frozen=True)
class ConvertRequest:
    """``None``: as the model was prepared.

    ``qconfig_mapping``: that of prepare with some QConfigs replaced by ``None``. ``remove_qconfig``:
    drop the attributes ``qconfig`` of modules. ``leave_float``: rules for results beside those of the
    backend's ``qdq``; a note in the plan says how many results they leave in float. ``in_float``: matches
    of the plan, by position, that stay float after all, with the reasons. ``weight_qparams``: chosen ones, in
    PyTorch's dict, for the weights of modules, by path; the rest is measured. ``biases``: those that
    quantized modules get in place of their own, by path. ``kept``: takes each integer
    weight when it is made. ``calculate``: the qparams of histograms, by the ``id`` of the observer.

    >>> ConvertRequest().remove_qconfig
    True
    """

    custom: ConvertCustomConfig = field(default_factory=ConvertCustomConfig)
    qconfig_mapping: QConfigMapping | None = None
    backend_config: BackendConfig | None = None
    remove_qconfig: bool = True
    leave_float: tuple[LeaveFloat, ...] = ()
    in_float: Mapping[int, Reason] = field(default_factory=dict)
    weight_qparams: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    biases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    kept: Kept = as_it_is
    calculate: Calculate = calculate_together


def reference_state(module: nn.Module) -> Record:
    """The record of a reference model. Raises UsageError for any other.

    >>> reference_state(nn.ReLU())
    Traceback (most recent call last):
    ...
    backquant.errors.UsageError: this is not a reference model of backquant
      where  ReLU
      fix    reference = backquant.convert_to_reference_fx(prepared)
    """
    meta = getattr(module, "meta", None)
    state = meta.get("backquant") if isinstance(meta, dict) else None
    if not isinstance(state, Record) or not state.dialect:
        raise UsageError(
            "this is not a reference model of backquant",
            where=type(module).__name__,
            fix="reference = backquant.convert_to_reference_fx(prepared)",
        )
    return state


class ReferenceModel(KeptGraphModule):
    """A graph module of quantize and dequantize nodes; see ``reference_state``."""

    @property
    def report(self) -> Any:
        """What each operator became, and why, as after ``quantize``; made anew when it is read."""
        return reference_state(self).report(self)


class RatioUnit(NamedTuple):
    """Output / input scale of an operator, and of the first one that has the same weight."""

    own: float
    of_weight: float


@dataclass
class Conversion:
    """One conversion under way: ``module`` is the copy that is edited, ``plan`` is final.

    ``passed`` holds the inputs that a parent passes quantized to this standalone module; ``None``
    for a model that stands by itself.
    """

    module: ReferenceModel
    editor: GraphEditor
    prepared: Record
    plan: Plan
    source: ObserverSource
    dialect: str
    qparams: Mapping[str, ObservedQParams]  # by the site whose observer the group shares
    measured: Mapping[str, ObservedQParams] = field(
        default_factory=dict
    )  # before they are moved to scales that the hardware has
    nodes: dict[str, fx.Node] = field(default_factory=dict)  # by their name in the prepared graph
    ratio_units: Mapping[str, RatioUnit] = field(default_factory=dict)  # by the anchor of the match
    weight_floors: Mapping[str, torch.Tensor] = field(
        default_factory=dict
    )  # by the path of a module
    request: ConvertRequest = field(default_factory=ConvertRequest)
    passed: Mapping[int, QParams | None] | None = None
    inputs: dict[int, QParams | None] = field(default_factory=dict)
    outputs: dict[int | str, QParams | None] = field(default_factory=dict)
    # of each observed activation, by site: its dequantize node
    dequantized: dict[str, fx.Node] = field(default_factory=dict)
    # where a state_dict has the qparams: of each measured site, and of the quantize nodes that were written
    keys_of_sites: Mapping[str, QParamsKey] = field(default_factory=dict)
    keys: dict[str, QParamsKey] = field(default_factory=dict)

    @property
    def reads_weights(self) -> bool:
        """Whether weights are observed in the graph: those of functions, no parameters of modules."""
        return any(site.role is Role.WEIGHT for site in self.prepared.sites.sites)

    def quantized(self, node: str) -> bool:
        """Whether the node of this name is quantized by the final plan."""
        decision = self.plan.decisions.get(node)
        return decision is not None and decision.quantized
