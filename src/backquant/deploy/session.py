"""An exported file, loaded by the runtime that it is for: what it gives, and how long its parts take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils import _pytree as pytree

from backquant.deploy.target import Target, check_installed, find_target, list_targets, usual_suffix
from backquant.errors import InputError, MissingExtraError, UsageError


class Loaded(Protocol):
    """A loaded file; arrays in and out, in the order of the model's."""

    @property
    def inputs(self) -> Mapping[str, Sequence[int | None]]:
        """The sizes of each input by its name, where the file has names; free ones are ``None``, or the
        greatest that may be."""
        ...

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """One call."""
        ...


@runtime_checkable
class LoadingTarget(Target, Protocol):
    """A target whose files can be run in this process."""

    def loaded(self, path: Path) -> Loaded:
        """Load a file that the target wrote, for one thread."""
        ...


class Session(Loaded, Protocol):
    """A loaded file that is timed."""

    def times(self, inputs: Sequence[Any], rounds: int) -> dict[str, float]:
        """Seconds of one call by the node of the reference graph that a layer was made for, the least of
        ``rounds``; under ``""`` what was made for none."""
        ...


@runtime_checkable
class RunningTarget(Target, Protocol):
    """A target whose runtime can run its files in this process."""

    def session(self, path: Path, threads: int) -> Session:
        """Load a file that the target wrote."""
        ...


def running_target(backend: str) -> RunningTarget | None:
    """The target that runs what is quantized for ``backend``; ``None`` where none does, or it is not
    installed.

    >>> running_target("tensorrt") is None
    True
    """
    for name in list_targets():
        target = find_target(name, Path(f"model{usual_suffix(name)}"))
        if target.backend == backend and isinstance(target, RunningTarget):
            try:
                check_installed(target)
            except MissingExtraError:
                return None
            return target
    return None


def load_exported(path: Path, threads: int, to: str | None = None) -> Loaded:
    """Load a file that ``export`` wrote in the runtime that it is for, with ``threads`` where that takes a
    number of them. ``to``: the target; default: by the suffix.

    Raises ``UsageError`` for a suffix that no target has, or whose target has no runtime here;
    ``InputError`` where there is no file; ``MissingExtraError`` where the runtime is not installed.

    >>> load_exported(Path("model.onnx"), 1)
    Traceback (most recent call last):
    backquant.errors.InputError: there is no file model.onnx
      where  model.onnx
      fix    the path that backquant.export was given
    """
    target = find_target(to, path)
    if not isinstance(target, LoadingTarget):
        raise UsageError(
            f"the files of {target.name} are not run here",
            where=str(path),
            fix="backquant.export to a target with a runtime: onnx, openvino, executorch, inductor",
        )
    if not path.is_file():
        raise InputError(
            f"there is no file {path}",
            where=str(path),
            fix="the path that backquant.export was given",
        )
    check_installed(target)
    return (
        target.session(path, threads) if isinstance(target, RunningTarget) else target.loaded(path)
    )


# Example inputs as exports need them: free sizes can be seen, and memory is in row-major order.


def with_two_on_free_axes(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any, names: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs, repeated along axes of free size where they have size 1.

    ``torch.export`` takes an axis of size 1 for a constant, whatever ``dynamic_shapes`` says of it.

    Args:
        args: positional inputs, tensors of any shape and dtype among them.
        kwargs: keyword inputs.
        dynamic_shapes: as in ``torch.export``: ``{name: {axis: label}}``, or one ``{axis: label}`` per
            input; for a list or a dict of tensors one of such. Other entries leave their input as it is.
        names: of the inputs, in the order of ``args``.

    >>> args, _ = with_two_on_free_axes((torch.ones(1, 3),), {}, {"x": {0: "batch"}}, ["x"])
    >>> args[0].shape
    torch.Size([2, 3])
    """
    return _with_grown(args, kwargs, dynamic_shapes, (names, _is_one))


def with_row_major(inputs: Any) -> Any:
    """The inputs with every tensor in row-major order.

    AOTInductor compiles for the strides of the examples, and ExecuTorch hands XNNPACK sizes in the order of
    the strides; neither looks at the strides of what it is called with.

    >>> with_row_major((torch.ones(2, 3).t(), 1))[0].stride()
    (2, 1)
    """
    return pytree.tree_map_only(torch.Tensor, row_major, inputs)


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy whose strides are those of a new tensor.

    ``contiguous`` passes over the strides of axes of size 1, and of empty tensors; ExecuTorch does not.

    >>> row_major(torch.ones(1, 4, 16).transpose(0, 1)).stride()
    (16, 16, 1)
    """
    if tensor.layout is not torch.strided or tensor.stride() == _strides(tensor.shape):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def with_twice_on_free_axes(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any, names: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs, repeated along every axis of free size that may be twice as long.

    Arguments as of ``with_two_on_free_axes``; ``"batch<=8"`` may be 8.

    >>> shapes = {"x": {0: "batch", 1: "length<=5"}}
    >>> args, _ = with_twice_on_free_axes((torch.ones(2, 3),), {}, shapes, ["x"])
    >>> args[0].shape
    torch.Size([4, 3])
    """
    return _with_grown(args, kwargs, dynamic_shapes, (names, _may_be_twice))


def with_sizes_on_free_axes(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    how: tuple[Sequence[str], float],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs, repeated or cut to another size along every axis of free size, within its bound.

    Args:
        args, kwargs, dynamic_shapes: as of ``with_two_on_free_axes``.
        how: names of the inputs, and the size (an integer), or how many times the present one (a float).

    >>> shapes = {"x": {0: "batch", 1: "length<=5"}}
    >>> how = ["x"], 7
    >>> with_sizes_on_free_axes((torch.ones(2, 3),), {}, shapes, how)[0][0].shape
    torch.Size([7, 5])
    """
    names, wanted = how

    def sized(value: torch.Tensor, axis: int, label: Any) -> torch.Tensor:
        have = value.shape[axis]
        size = wanted if isinstance(wanted, int) else round(wanted * have)
        most = _most(label)
        size = max(2, size if most is None or size <= most else int(most))
        return torch.cat([value] * -(-size // have), axis).narrow(axis, 0, size)

    return _with_changed(args, kwargs, dynamic_shapes, (names, sized))


def _is_one(size: int, label: Any) -> bool:  # noqa: ARG001
    return size == 1


def _may_be_twice(size: int, label: Any) -> bool:
    most = _most(label)
    return most is None or bool(2 * size <= most)


def _most(label: Any) -> Any:
    """The bound of a free axis; torch.export has an infinity of its own."""
    text = label.partition("<=")[2] if isinstance(label, str) else ""
    return int(text) if text else getattr(label, "max", None)


def _with_grown(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    how: tuple[Sequence[str], Callable[[int, Any], bool]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``how``: names of the inputs, and whether an axis of a size and a label is repeated."""
    names, grows = how

    def twice(value: torch.Tensor, axis: int, label: Any) -> torch.Tensor:
        return torch.cat([value, value], axis) if grows(value.shape[axis], label) else value

    return _with_changed(args, kwargs, dynamic_shapes, (names, twice))


_Change = Callable[[torch.Tensor, int, Any], torch.Tensor]


def _with_changed(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    how: tuple[Sequence[str], _Change],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``how``: names of the inputs, and what a tensor becomes along a free axis with a label."""
    names, change = how
    if not isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = dict(zip(names, dynamic_shapes or (), strict=False))
    grown = [
        _changed(x, dynamic_shapes.get(name), change) for x, name in zip(args, names, strict=False)
    ]
    rest = {name: _changed(x, dynamic_shapes.get(name), change) for name, x in kwargs.items()}
    return (*grown, *args[len(grown) :]), rest


def _changed(value: Any, axes: Any, change: _Change) -> Any:
    if isinstance(value, (list, tuple)) and isinstance(axes, (list, tuple)):
        made = [_changed(item, own, change) for item, own in zip(value, axes, strict=False)]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict) and isinstance(axes, Mapping):
        return {key: _changed(item, axes.get(key), change) for key, item in value.items()}
    if not isinstance(value, torch.Tensor) or not isinstance(axes, Mapping):
        return value
    for axis, label in axes.items():
        is_free = label not in (None, torch.export.Dim.STATIC) and not isinstance(label, int)
        if is_free and -value.dim() <= axis < value.dim():
            value = change(value, axis, label)
    return value
