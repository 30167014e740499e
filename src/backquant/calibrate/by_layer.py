"""Calibration in the order of layers: all batches go through one part of the model before the next begins.

1. Each weight is read once for many batches, where a call of the model for every batch reads all of them each
   time. What passes from one part to the next is kept for each of these batches; nothing else is.
2. A part ends where the weights that it reads are more than ``PART`` bytes.
3. An observer that is used in several parts sees the values of one part for all batches first. So those whose
   state depends on the order are refused; that of the others is the same as after ``calibrate``, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import fx

from backquant.calibrate.batches import check_set, check_some, inputs_of
from backquant.calibrate.feed import CalibrationReport, check_interface, misfit, unseen_observers
from backquant.calibrate.inputs import (
    bound_arguments,
    check_values,
    described,
    measured_inputs,
)
from backquant.calibrate.observers import site_observers, unchanged_on_error
from backquant.calibrate.packed import PackedConvolutions
from backquant.calibrate.progress import Progress
from backquant.calibrate.redundant_observers import measured_again, passing_through
from backquant.calibrate.resume import check_mergeable
from backquant.errors import BackquantError, InputError
from backquant.graph import get_module
from backquant.graph.export import interface_of

PART = 64 << 20  # bytes
_AT_ONCE = 32  # batches


def calibrate_by_layer(
    prepared: fx.GraphModule, batches: Iterable[Any], *, progress: Progress | None = None
) -> CalibrationReport:
    """``calibrate`` in the order of layers. Raises as it does, and ``ConfigError`` for observers whose
    state depends on the order of values. After an error the observers hold parts of batches.

    >>> from torch import nn
    >>> from backquant import get_default_qconfig_mapping, prepare_fx
    >>> model = nn.Sequential(nn.Linear(2, 2)).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 2))
    >>> calibrate_by_layer(prepared, [torch.zeros(1, 2), torch.ones(3, 2)])
    CalibrationReport(batches=2, unseen=())
    """
    check_set(batches)
    batches = inputs_of(prepared, batches)
    check_mergeable(prepared)
    observers, parts = site_observers(prepared), list(parts_of(prepared, PART))
    iterator, done, fitted = iter(batches), 0, ""
    packed = PackedConvolutions.of(prepared, observers.values())
    with torch.no_grad(), passing_through(prepared, measured_again(prepared)):
        while some := list(islice(iterator, _AT_ONCE)):
            try:
                with unchanged_on_error(observers.values() if packed else ()):
                    words = _measured(prepared, some, done, parts, fitted, packed)
            except InputError:
                if not packed:
                    raise
                packed = PackedConvolutions()  # as ``calibrate`` does
                words = _measured(prepared, some, done, parts, fitted, packed)
            done, fitted = done + len(some), words
            if progress is not None:
                progress(done, None)
    check_some(done, batches)
    return CalibrationReport(done, unseen_observers(prepared, observers))


def _measured(
    prepared: fx.GraphModule,
    some: list[Any],
    first: int,
    parts: list[list[fx.Node]],
    fitted: str,
    packed: PackedConvolutions,
) -> str:
    """Let ``some`` batches, which are counted from ``first``, through all parts; words for the last one."""
    runs = [_Run.of(prepared, batch, first + place) for place, batch in enumerate(some)]
    with packed.used():
        for part in parts:
            for run in runs:
                run.through(part, fitted)
            packed.forget()  # a second copy of the weights of one part, not of all
    return runs[-1].words


def parts_of(prepared: fx.GraphModule, most: int) -> Iterator[list[fx.Node]]:
    """Rule 2: the nodes of ``prepared`` in order, part by part.

    >>> model = fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    >>> [[node.name for node in part] for part in parts_of(model, 30)]
    [['input_1', '_0', '_1'], ['output']]
    """
    part: list[fx.Node] = []
    size = 0
    for node in prepared.graph.nodes:
        if size > most:
            yield part
            part, size = [], 0
        part.append(node)
        size += _bytes_read(prepared, node)
    yield part


def _bytes_read(prepared: fx.GraphModule, node: fx.Node) -> int:
    if node.op == "call_module":
        module = get_module(prepared, str(node.target))
        return sum(p.numel() * p.element_size() for p in module.parameters())
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        value = getattr(get_module(prepared, owner), name)
        return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
    return 0


@dataclass
class _Run:
    """One batch on its way; ``words`` describe it."""

    prepared: fx.GraphModule
    interpreter: fx.Interpreter
    bound: Any
    index: int
    words: str

    @classmethod
    def of(cls, prepared: fx.GraphModule, batch: Any, index: int) -> _Run:
        bound = bound_arguments(prepared, batch, index)
        check_values(bound, index, measured_inputs(prepared))
        interface = interface_of(prepared)
        if interface is not None:
            check_interface(interface, bound, index)
        words = described(bound)
        bound.apply_defaults()
        interpreter = fx.Interpreter(prepared)
        interpreter.extra_traceback = False
        args = prepared.graph.process_inputs(*bound.args, *bound.kwargs.values())
        interpreter.args_iter = iter(args)
        interpreter.env = {}
        return cls(prepared, interpreter, bound, index, words)

    def through(self, part: list[fx.Node], fitted: str) -> None:
        """Compute the nodes of ``part``, and forget what nobody reads behind them."""
        own = self.interpreter
        try:
            for node in part:
                own.env[node] = own.run_node(node)
                for used in own.user_to_last_uses.get(node, ()):
                    del own.env[used]
        except BackquantError:
            raise
        except Exception as error:
            raise misfit(self.prepared, self.bound, self.index, fitted, error) from error
