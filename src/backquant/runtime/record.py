"""The protocol of what runs a lowered graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from backquant.graph.export import Interface
from backquant.lower.machine import EngineInfo
from backquant.lower.rule import KernelUse
from backquant.match.plan import Reason
from backquant.prepare import Record
from backquant.qconfig import QConfigMapping


class Executor(Protocol):
    """Runs a lowered graph on the model's arguments, and gives what the interpreted graph gives for them.

    >>> import torch
    >>> from backquant.runtime.replay import Replays
    >>> executor: Executor = Replays(torch.nn.ReLU())
    >>> executor(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


# The record of a lowered model: the one that its reference model had, and what the lowering did.


@dataclass(frozen=True)
class LoweredRecord(Record):
    """A ``Record`` with one more step.

    5. lower: ``engine``, what the model runs on (``None``: the reference model itself); ``kernels`` and
       ``left_in_float``, what the lowering did; ``interface``, what ``torch.export`` knows of the inputs and
       the output.

    A pickle holds neither the QConfigMapping nor the custom config, which may name functions that cannot be
    pickled: the plan has what came of them.

    >>> from backquant import BackendConfig, QConfigMapping
    >>> from backquant.match import Plan
    >>> before = Record(Plan("x86"), BackendConfig("x86"), QConfigMapping())
    >>> LoweredRecord(**vars(before)).plan is before.plan
    True
    """

    engine: EngineInfo | None = None
    kernels: tuple[KernelUse, ...] = ()
    left_in_float: tuple[Reason, ...] = ()
    interface: Interface | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "qconfig_mapping": QConfigMapping(), "custom": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> LoweredRecord:
        return self
