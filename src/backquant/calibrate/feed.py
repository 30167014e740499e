"""Feeding data to the observers of a prepared model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from backquant.calibrate.batches import check_set, check_some, count_of, inputs_of
from backquant.calibrate.inputs import (
    bound_arguments,
    check_values,
    described,
    measured_inputs,
)
from backquant.calibrate.observers import (
    prepared_parts,
    saw_data,
    site_observers,
    unchanged_on_error,
)
from backquant.calibrate.packed import PackedConvolutions
from backquant.calibrate.progress import Progress
from backquant.calibrate.redundant_observers import called_directly, measured_again, passing_through
from backquant.errors import BackquantError, InputError, first_line
from backquant.graph.devices import other_devices
from backquant.graph.export import Interface, interface_of
from backquant.prepare import prepared_state


@dataclass(frozen=True)
class UnseenObserver:
    """An observer that no data reached; ``value`` is the node whose value it should have seen."""

    site: str
    value: str


@dataclass(frozen=True)
class CalibrationReport:
    """How many batches were measured, and which observers saw none of them."""

    batches: int
    unseen: tuple[UnseenObserver, ...] = ()


def calibrate(
    prepared: fx.GraphModule,
    batches: Iterable[Any],
    *,
    progress: Progress | None = None,
    first: int = 0,
) -> CalibrationReport:
    """Run ``prepared`` on every batch, without gradients, so that its observers measure.

    Args:
        prepared: from ``insert_observers``; its observers are updated, its training flags are not
            touched.
        batches: any iterable. A batch is a tensor (the first argument), a tuple of positional
            arguments, or a dict of keyword arguments.
        progress: called with (batches done, batches in all or None) after each.
        first: the number of the first batch, where others were measured before.

    Raises:
        CalibrationError: there is no batch, or one holds NaN, infinite values or no values.
        InputError: a batch does not fit the model; names the batch, what it holds, what fitted.
        UsageError: the model is not prepared.

    A refused batch leaves the observers as the batches before it did. What operators only
    move within the reach of one observer is measured once (``measured_again``).

    >>> from backquant.backend_config import BackendConfig
    >>> from backquant.match.plan import Plan
    >>> from backquant.prepare import Record, insert_observers
    >>> from backquant.qconfig import QConfigMapping
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    >>> prepared = insert_observers(gm, Record(Plan("x86"), BackendConfig("x86"), QConfigMapping()))
    >>> calibrate(prepared, [torch.zeros(1, 2), {"input": torch.ones(3, 2)}])
    CalibrationReport(batches=2, unseen=())
    """
    run, measured = _Run(prepared), measured_inputs(prepared)
    check_set(batches)
    batches = inputs_of(prepared, batches)
    interface = interface_of(prepared)
    total = count_of(batches)
    done, fitted = first, ""
    for index, batch in enumerate(batches, first):
        bound = bound_arguments(prepared, batch, index)
        check_values(bound, index, measured)
        if interface is not None:
            check_interface(interface, bound, index)
        try:
            run(bound)
        except BackquantError:
            raise
        except Exception as error:
            raise misfit(prepared, bound, index, fitted, error) from error
        done, fitted = done + 1, described(bound)
        if progress is not None:
            progress(done, total)
    check_some(done, batches)
    return CalibrationReport(done, unseen_observers(prepared, run.observers))


class _Run:
    """Runs of ``prepared`` in which its observers measure; one that raises leaves them as they were."""

    def __init__(self, prepared: fx.GraphModule) -> None:
        self.observers = site_observers(prepared)
        self._prepared, self._modules = prepared, tuple(prepared.modules())
        self._again = measured_again(prepared)
        self._packed = PackedConvolutions.of(prepared, self.observers.values())

    def __call__(self, bound: inspect.BoundArguments) -> None:
        if self._packed:
            try:
                self._once(bound)
            except BackquantError:
                raise
            except Exception:
                # It may be the order of memory: again without, which says what else it is.
                self._packed = PackedConvolutions()
            else:
                return
        self._once(bound)

    def _once(self, bound: inspect.BoundArguments) -> None:
        prepared = self._prepared
        with (
            torch.no_grad(),
            unchanged_on_error(self.observers.values()),
            passing_through(prepared, self._again),
            called_directly(prepared, self._modules),
            self._packed.used(),
        ):
            # The call of the base class: that of GraphModule prints its own traceback.
            nn.Module.__call__(prepared, *bound.args, **bound.kwargs)


def check_interface(interface: Interface, bound: inspect.BoundArguments, index: int) -> None:
    """Whether the batch has the sizes that the model was exported for."""
    try:
        interface.check((), bound.arguments)
    except InputError as error:
        raise InputError(
            f"batch {index} does not fit the model: {error.what}",
            where=f"batch {index}: {error.where}",
            fix=error.fix,
        ) from error


def misfit(
    prepared: fx.GraphModule,
    bound: inspect.BoundArguments,
    index: int,
    fitted: str,
    error: Exception,
) -> InputError:
    """What ``error`` says about a batch; ``fitted``: what fitted before."""
    reason = first_line(error)
    expected = f"like those before: {fitted}" if fitted else _expected(prepared)
    elsewhere = other_devices(prepared, bound.arguments)
    if elsewhere is not None:
        device, given = elsewhere
        return InputError(
            f"batch {index} is on {given}, and the model on {device}",
            where=f"batch {index}: {described(bound)}",
            fix=f"batches on {device}: batch.to({str(device)!r})",
        )
    return InputError(
        f"batch {index} does not fit the model: {reason}",
        where=f"batch {index}: {described(bound)}",
        fix=f"give batches {expected}",
    )


def _expected(prepared: fx.GraphModule) -> str:
    """What the first operators that read an input say about its shape."""
    facts = []
    for node in prepared.graph.nodes:
        if node.op != "call_module" or not node.all_input_nodes:
            continue
        source = node.all_input_nodes[0]
        while source.op == "call_module" and str(source.target) in prepared_state(prepared).sites:
            source = source.all_input_nodes[0]
        size = _input_size(prepared.get_submodule(str(node.target)))
        if source.op == "placeholder" and size:
            facts.append(f"whose {source.name!r} has {size} for {node.target!r}")
    return "that fit: " + ", ".join(facts) if facts else "of the shapes that the model takes"


def _input_size(module: nn.Module) -> str:
    inner = module[0] if isinstance(module, nn.Sequential) and len(module) else module
    for name in ("in_features", "in_channels", "num_features"):
        if isinstance(getattr(inner, name, None), int):
            return f"{name}={getattr(inner, name)}"
    return ""


def unseen_observers(
    prepared: fx.GraphModule, observers: Mapping[str, nn.Module]
) -> tuple[UnseenObserver, ...]:
    """Those of ``observers`` that no data reached."""
    values = {
        f"{prefix}{site.name}": f"{prefix}{site.value}"
        for prefix, part in prepared_parts(prepared)
        for site in prepared_state(part).sites.sites
    }
    return tuple(
        UnseenObserver(name, values.get(name, name))
        for name, observer in observers.items()
        if not saw_data(observer)
    )
