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


def resized(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    names: Sequence[str],
    size: Callable[[int, int | None], int],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs, repeated or cut to another size along every axis of free size.

    Args:
        args: positional inputs, tensors of any shape and dtype among them.
        kwargs: keyword inputs.
        dynamic_shapes: as in ``torch.export``: ``{name: {axis: label}}``, or one ``{axis: label}`` per
            input; for a list or a dict of tensors one of such. Other entries leave their input as it is.
        names: of the inputs, in the order of ``args``.
        size: of the present size and of the greatest that may be (``"batch<=8"``), the size.

    >>> args, _ = resized((torch.ones(1, 3),), {}, {"x": {0: "batch"}}, ["x"], two_for_one)
    >>> args[0].shape
    torch.Size([2, 3])
    """
    if not isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = dict(zip(names, dynamic_shapes or (), strict=False))
    named = dict(zip(names, args, strict=False))
    made = [_resized(x, dynamic_shapes.get(name), size) for name, x in named.items()]
    rest = {name: _resized(x, dynamic_shapes.get(name), size) for name, x in kwargs.items()}
    return (*made, *args[len(made) :]), rest


def two_for_one(size: int, most: int | None) -> int:  # noqa: ARG001
    """``torch.export`` takes an axis of size 1 for a constant, whatever ``dynamic_shapes`` says of it."""
    return 2 if size == 1 else size


def twice_if_allowed(size: int, most: int | None) -> int:
    """Twice as long, where that may be.

    >>> twice_if_allowed(2, None), twice_if_allowed(3, 5)
    (4, 3)
    """
    return 2 * size if most is None or 2 * size <= most else size


def _resized(value: Any, axes: Any, size: Callable[[int, int | None], int]) -> Any:
    if isinstance(value, (list, tuple)) and isinstance(axes, (list, tuple)):
        made = [_resized(item, own, size) for item, own in zip(value, axes, strict=False)]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict) and isinstance(axes, Mapping):
        return {key: _resized(item, axes.get(key), size) for key, item in value.items()}
    if not isinstance(value, torch.Tensor) or not isinstance(axes, Mapping):
        return value
    for axis, label in axes.items():
        is_free = label not in (None, torch.export.Dim.STATIC) and not isinstance(label, int)
        if is_free and -value.dim() <= axis < value.dim():
            have = value.shape[axis]
            wanted = size(have, _most(label))
            if wanted != have:
                value = torch.cat([value] * -(-wanted // have), axis).narrow(axis, 0, wanted)
    return value


def _most(label: Any) -> Any:
    """The bound of a free axis; torch.export has an infinity of its own."""
    text = label.partition("<=")[2] if isinstance(label, str) else ""
    return int(text) if text else getattr(label, "max", None)


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
    usual = torch.empty(tensor.shape, device="meta").stride()
    if tensor.layout is not torch.strided or tensor.stride() == usual:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
