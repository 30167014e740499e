"""Feeding data to the observers of a prepared model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import fx, nn
from typing_extensions import Self

from backquant.calibrate.batches import check_set, check_some, count_of, inputs_of
from backquant.calibrate.observers import (
    called_directly,
    custom_observers,
    measured_again,
    passing_through,
    prepared_parts,
    saw_data,
    site_observers,
    unchanged_on_error,
)
from backquant.calibrate.packed import PackedConvolutions
from backquant.errors import BackquantError, CalibrationError, InputError, first_line
from backquant.graph import as_arguments, get_module
from backquant.graph.devices import other_devices
from backquant.graph.edit import weighted_part
from backquant.graph.example import describe_value
from backquant.graph.example import inputs_of as named_inputs
from backquant.graph.export import Interface, interface_of
from backquant.graph.queries import inputs_behind
from backquant.observe import is_observer_or_fake_quantize, is_placeholder
from backquant.operators import moves_values
from backquant.prepare import Role, prepared_state

# One batch as a call of the model: argument names, and the checks before it is run.


def bound_arguments(model: fx.GraphModule, batch: Any, index: int) -> inspect.BoundArguments:
    """The arguments of ``model.forward`` that a batch gives: a tensor is the first, a tuple (or list)
    holds positional arguments, a dict keyword arguments.

    Raises InputError, naming the batch, when they do not match the parameters.

    >>> model = fx.symbolic_trace(lambda x, y: x + y)
    >>> list(bound_arguments(model, {"x": 1, "y": 2}, 0).arguments)
    ['x', 'y']
    """
    args, kwargs = as_arguments(batch)
    signature = inspect.signature(model.forward)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"batch {index} does not fit the model: {error}",
            where=f"batch {index}: {_spelled(args, kwargs)}",
            fix=named_inputs(model).replace("example_inputs=", "batch = ", 1)
            + "\nfor instance calibration=[(x,) for x, label in loader]",
        ) from error


def check_values(
    bound: inspect.BoundArguments, index: int, measured: Collection[str] | None = None
) -> None:
    """Refuse NaN, infinite values and empty tensors in the inputs of one batch.

    ``measured``: the arguments in which infinite values are refused; ``None``: all. In a mask that is added
    in float they mean something.

    Raises CalibrationError that names the batch and the input.

    >>> bound = bound_arguments(fx.symbolic_trace(lambda x: x), torch.tensor([1.0, float("nan")]), 3)
    >>> check_values(bound, 3)
    Traceback (most recent call last):
    ...
    backquant.errors.CalibrationError: input 'x' of batch 3 holds 1 NaN and 0 infinite values
      where  batch 3, input 'x': float32[2]
      fix    leave this batch out, or clean it: torch.nan_to_num(x)
    """
    for name, tensor in _named_tensors(bound.arguments):
        argument = name.partition(".")[0].partition("[")[0]
        where = f"batch {index}, input {name!r}: {describe_value(tensor)}"
        if tensor.numel() == 0:
            raise CalibrationError(
                f"input {name!r} of batch {index} holds no values",
                where=where,
                fix="leave empty batches out of the calibration set",
            )
        is_dense = tensor.layout is torch.strided
        if not is_dense or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        if not _all_finite(tensor):
            missing = int(torch.isnan(tensor).sum())
            endless = int(torch.isinf(tensor).sum())
            if not missing and measured is not None and argument not in measured:
                continue
            raise CalibrationError(
                f"input {name!r} of batch {index} holds {missing} NaN and {endless} infinite values",
                where=where,
                fix="leave this batch out, or clean it: torch.nan_to_num(x)",
            )


def measured_inputs(model: fx.GraphModule) -> frozenset[str]:
    """The arguments of ``model`` whose infinities reach an observer, or a quantization.

    >>> measured_inputs(fx.symbolic_trace(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)))
    frozenset({'x'})
    """
    values = [
        source
        for node in model.graph.nodes
        if _measures(model, node)
        for source in node.all_input_nodes[:1]
    ]
    found = inputs_behind(model, values, moves_values)
    return frozenset(str(node.target).lstrip("*") for node, _ in found)


def _measures(model: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "call_module":
        return "quantize_per_" in str(node.target) and "dequantize" not in str(node.target)
    called = get_module(model, str(node.target))
    return isinstance(called, fx.GraphModule) or is_observer_or_fake_quantize(called)


def described(bound: inspect.BoundArguments) -> str:
    """Names, dtypes and shapes of the tensors of one call.

    >>> described(bound_arguments(fx.symbolic_trace(lambda x: x), torch.zeros(2, 3), 0))
    'x: float32[2, 3]'
    """
    parts = [f"{name}: {describe_value(t)}" for name, t in _named_tensors(bound.arguments)]
    return ", ".join(parts) or "no tensors"


def _all_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite, by the extremes, which show NaN as well; much cheaper than a mask."""
    if tensor.is_complex():
        return bool(torch.isfinite(tensor).all())
    return math.isfinite(tensor.amin().item()) and math.isfinite(tensor.amax().item())


def _named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named_tensors(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for position, inner in enumerate(value):
            yield from _named_tensors(inner, f"{name}[{position}]")


def _spelled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    parts = [describe_value(value) for value in args]
    parts += [f"{name}={describe_value(value)}" for name, value in kwargs.items()]
    return "(" + ", ".join(parts) + ")"


# How far calibration is: any callable, or a bar on the terminal.


class Progress(Protocol):
    """Called after every batch that was measured."""

    def __call__(self, done: int, total: int | None) -> None:
        """``done`` batches of ``total`` (None: unknown)."""


@contextmanager
def spinner(title: str) -> Iterator[None]:
    """On a terminal: that something goes on, and for how long, on standard error; gone at the end.

    >>> with spinner("exporting"):
    ...     pass
    """
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    target = Console(stderr=True)
    quiet = not target.is_terminal
    with RichProgress(*columns, console=target, transient=True, disable=quiet) as shown:
        shown.add_task(title, total=None)
        yield


class ProgressBar:
    """A bar on standard error (rich), shown while the ``with`` block lasts.

    >>> with ProgressBar("calibrating", quiet=True) as progress:
    ...     progress(1, 2)
    """

    def __init__(self, title: str = "calibrating", *, quiet: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._done = 0
        self._task = self._bar.add_task(title, total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:  # what ended before its estimate is done
            self._bar.update(self._task, completed=self._done, total=self._done)
        self._bar.stop()

    def __call__(self, done: int, total: int | None) -> None:
        self._done = done
        self._bar.update(self._task, completed=done, total=total)


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
        self._packed.calling(lambda: self._once(bound))

    def _once(self, bound: inspect.BoundArguments) -> None:
        prepared = self._prepared
        with (
            torch.no_grad(),
            unchanged_on_error(self.observers.values()),
            passing_through(prepared, self._again),
            called_directly(prepared, self._modules),
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
        ) from error.__cause__


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
        fix=_as_floats(bound, reason) or f"give batches {expected}",
    )


def _as_floats(bound: inspect.BoundArguments, reason: str) -> str:
    """The fix where a model of one input complains of the type of its values; else empty."""
    values = list(bound.arguments.values())
    if len(values) != 1 or not isinstance(values[0], torch.Tensor) or "type" not in reason:
        return ""
    is_other = values[0].dtype != torch.float32
    return "calibration=[batch.float() for batch in batches]" if is_other else ""


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
    inner = weighted_part(module)
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


# Which observers of a prepared model need data before it can be converted.
#
# 1. Observers that measure at each call, hold a dtype only, or have fixed qparams need none.
# 2. A weight that depends on no input is measured at conversion.
# 3. Observers that saw data already need no more.
# 4. Those inside of standalone and custom modules count, too.


def waiting_for_data(prepared: fx.GraphModule) -> tuple[UnseenObserver, ...]:
    """The observers that calibration has to feed, in graph order; none if there is nothing to measure.

    Raises UsageError when the model is not prepared.
    """
    return tuple(
        waiting
        for prefix, part in prepared_parts(prepared)
        for waiting in (*_of_sites(part, prefix), *_of_custom_modules(part, prefix))
    )


def _of_sites(prepared: fx.GraphModule, prefix: str) -> Iterator[UnseenObserver]:
    sites = prepared_state(prepared).sites
    nodes = _from_inputs(prepared.graph)
    needed = {
        site.group for site in sites.sites if site.role is not Role.WEIGHT or site.name in nodes
    }
    for head in sites.groups():
        if head in needed and _waits(prepared.get_submodule(head)):
            yield UnseenObserver(f"{prefix}{head}", f"{prefix}{sites[head].value}")


def _of_custom_modules(prepared: fx.GraphModule, prefix: str) -> Iterator[UnseenObserver]:
    for name, observer in custom_observers(prepared).items():
        if not name.endswith(".weight_fake_quant") and _waits(observer):
            yield UnseenObserver(f"{prefix}{name}", f"{prefix}{name}")


def _waits(observer: nn.Module) -> bool:
    dynamic = getattr(observer, "is_dynamic", False) or is_placeholder(observer)
    return not dynamic and not saw_data(observer)


def _from_inputs(graph: fx.Graph) -> set[str]:
    """The names of all nodes whose value depends on an input."""
    reached: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(n.name in reached for n in node.all_input_nodes):
            reached.add(node.name)
    return reached
