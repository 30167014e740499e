"""Running ``torch.export``: which sizes are dynamic, and which modules cannot be exported.

Without ``dynamic_shapes`` the sizes that the model does not fix stay free, as in a symbolic trace
(``Dim.AUTO``): all sizes of tensors of up to three dimensions (batch, sequence, features), and the batch
of larger ones (images). A batch of one is exported as a batch of two, since export takes sizes of one for
constants. A part in which that fails stays whole; where it fails outside of parts, sizes are those of the
example inputs.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.dynamic_shapes import _combine_args
from torch.utils import _pytree as pytree

from backquant.errors import CaptureError
from backquant.graph.capture import by_parts, is_packages
from backquant.graph.example import with_distinct_tensors
from backquant.graph.export.numbers import (
    NotANumberError,
    keeps_numbers,
    kept_as_numbers,
    lengths_as_sizes,
    plain_comparisons,
    wants_plain_truth,
)
from backquant.graph.export.opaque import (
    NotExportedError,
    OpaqueCall,
    Trial,
    opaque_calls,
    recurrent_by_shape,
)
from backquant.graph.export.signature import by_keyword, named_keywords
from backquant.graph.fixed_data import passing_asserts, unchecked_notes
from backquant.graph.interception import user_line
from backquant.graph.own_thread import without_attention_fastpath
from backquant.graph.silence import quiet, without_warnings

# Dynamic shapes as users write them: names in place of ``torch.export.Dim``.


# torch's message for a dynamic size that the model's code fixes
_FIXED = re.compile(
    r"You marked (\S+) as dynamic but your code specialized it to be a constant \((\d+)\)"
)


def fixed_size(reason: str) -> tuple[str, int] | None:
    """The dynamic size that a model fixes, and to what, by torch's reason for not exporting it.

    >>> fixed_size("You marked n as dynamic but your code specialized it to be a constant (4).")
    ('n', 4)
    """
    found = _FIXED.search(reason)
    return (found[1], int(found[2])) if found else None


def as_dims(dynamic_shapes: Any) -> Any:
    """``dynamic_shapes`` with names as ``Dim`` objects, one for each name; ``"batch<=64"`` has a bound.

    >>> shapes = as_dims({"x": {0: "batch"}, "y": {0: "batch"}})
    >>> shapes["x"][0] is shapes["y"][0], shapes["x"][0].__name__
    (True, 'batch')
    """
    dims: dict[str, Any] = {}

    def converted(value: Any) -> Any:
        if isinstance(value, str):
            name, _, bound = value.partition("<=")
            return dims.setdefault(name, Dim(name, max=int(bound)) if bound else Dim(name))
        if isinstance(value, Mapping):
            return {key: converted(item) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            made = [converted(item) for item in value]
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
        return value

    return converted(dynamic_shapes)


def of_all_inputs(dynamic_shapes: Any, inputs: Mapping[str, Any]) -> Any:
    """``dynamic_shapes`` by name with what ``inputs`` has besides, of fixed sizes: an export asks for all.

    >>> of_all_inputs({"x": {0: "batch"}}, {"x": torch.zeros(4), "mask": None, "pair": (torch.zeros(2), 1)})
    {'x': {0: 'batch'}, 'mask': None, 'pair': (None, None)}
    """
    if not isinstance(dynamic_shapes, Mapping):
        return dynamic_shapes
    others = {name: value for name, value in inputs.items() if name not in dynamic_shapes}
    return {**dynamic_shapes, **_free(others, lambda _: None)}


def is_record(value: Any) -> bool:
    """Whether it is of a class that is registered to hold tensors: an export asks for sizes of its parts."""
    kind = pytree._get_node_type(value)
    return kind in pytree.SUPPORTED_NODES and kind not in pytree.BUILTIN_TYPES


def check_dims(dynamic_shapes: Any, inputs: Mapping[str, Any]) -> None:
    """Raise CaptureError for an input, or a dimension of a tensor, that ``inputs`` (by name) have not.

    Containers of tensors are left to ``torch.export``.

    >>> check_dims({"x": {2: "length"}}, {"x": torch.zeros(4, 8)})
    Traceback (most recent call last):
    backquant.errors.CaptureError: 'x' has no dimension 2: its shape is [4, 8]
      where  dynamic_shapes['x']
      fix    the dimensions are 0 to 1: {'x': {0: 'batch'}}
    """
    if isinstance(dynamic_shapes, Mapping):
        given = dict(dynamic_shapes)
    elif isinstance(dynamic_shapes, (tuple, list)):
        given = dict(zip(inputs, dynamic_shapes, strict=False))
    else:
        return
    for name, sizes in given.items():
        if name not in inputs:
            raise CaptureError(
                f"the model has no input {name!r}",
                where=f"dynamic_shapes[{name!r}]",
                fix=f"dynamic_shapes={ {one: {0: 'batch'} for one in inputs}!r}",
            )
        if isinstance(inputs[name], torch.Tensor) and isinstance(sizes, Mapping):
            _check_dimensions(name, inputs[name], sizes)


def _check_dimensions(name: str, tensor: torch.Tensor, sizes: Mapping[Any, Any]) -> None:
    rank = tensor.dim()
    for dimension in sizes:
        if not isinstance(dimension, int) or not -rank <= dimension < rank:
            known = f"are 0 to {rank - 1}" if rank > 1 else "is 0"
            raise CaptureError(
                f"{name!r} has no dimension {dimension!r}: its shape is {list(tensor.shape)}",
                where=f"dynamic_shapes[{name!r}]",
                fix=f"the dimensions {known}: {{{name!r}: {{0: 'batch'}}}}"
                if rank
                else "leave it out",
            )


@dataclass(frozen=True)
class Exported:
    """An exported program with the modules that stayed whole, and why.

    ``opaque``: reason by path; ``calls``: their calls by the key in the graph.
    """

    program: ExportedProgram
    opaque: dict[str, str] = field(default_factory=dict)
    calls: dict[str, OpaqueCall] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


_SEQUENCE = 3  # dimensions of batch × sequence × features


@dataclass(frozen=True)
class _Attempt:
    """Inputs and dynamic sizes of one trial."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any
    note: str = ""
    is_doubled: bool = False


def export_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic_shapes: Any = None,
    whole: dict[str, str] | None = None,
    known: Mapping[str, str] = MappingProxyType({}),
) -> Exported:
    """Export ``model``, a copy in evaluation mode that nobody else uses.

    Args:
        args, kwargs: example inputs.
        dynamic_shapes: as ``torch.export.export`` takes it, or with names of sizes; ``None``: what the
            model leaves free.
        whole: paths of modules that stay whole, each with the reason.
        known: paths and reasons of modules that another export failed in: where this one fails first in one
            of them for the same reason, it is given up.

    A module in which the export fails stays whole, too, and its reason is recorded. Others of its class
    are then tried all in one export: a model may have dozens that fail alike.

    Raises:
        CaptureError: the model's own ``forward`` cannot be exported, or not with these shapes.

    >>> exported = export_model(nn.ReLU(), (torch.zeros(2, 3),), {})
    >>> [node.name for node in exported.program.graph.nodes]
    ['input', 'relu', 'output']
    """
    args, kwargs = with_distinct_tensors((args, kwargs), model)
    asked = as_dims(by_keyword(inspect.signature(model.forward), dynamic_shapes))
    with named_keywords(model, kwargs):
        sizes = of_all_inputs(asked, _combine_args(model, args, kwargs))
        return _with_parts(model, args, kwargs, sizes, dict(whole or {}), known)


def _with_parts(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    opaque: dict[str, str],
    known: Mapping[str, str],
) -> Exported:
    """The program with those parts whole in which the export fails, too."""
    kinds: set[type[nn.Module]] = set()
    while True:
        trial = Trial([p for p, m in model.named_modules() if type(m) in kinds and p not in opaque])
        try:
            found = _exported(model, args, kwargs, dynamic_shapes, opaque, trial)
        except NotExportedError as failure:
            path = _not_whole(failure.path, opaque)
            given_up = not opaque and known.get(path) == failure.reason
            if not trial.failed:
                if not path or dynamic_shapes is not None or given_up:
                    told = failure if path else failure.of_the_model()
                    raise explained(told, model, dynamic_shapes) from failure.__cause__
                opaque[path] = failure.reason
                kinds.add(type(model.get_submodule(path)))
        else:
            if not trial.failed:
                return found
        for path, error in trial.failed.items():
            inner = failure_of(error, model)
            opaque[_not_whole(inner.path, opaque) or path] = inner.reason


def _not_whole(path: str, opaque: Collection[str]) -> str:
    """``path``, or the nearest module around it that is not whole yet: what is inside of a whole module fails
    where other methods than ``forward`` are called.

    >>> _not_whole("vq.codebook", ["vq.codebook"]), _not_whole("vq", ["vq"])
    ('vq', '')
    """
    while path in opaque:
        path = path.rpartition(".")[0]
    return path


def explained(failure: NotExportedError, model: nn.Module, dynamic_shapes: Any) -> CaptureError:
    """The error that a user sees."""
    kind = type(model).__name__
    where = f"module {failure.path!r}" if failure.path else kind
    fix = "move these lines into a submodule: it then stays in float, and the rest is quantized"
    if not failure.path and is_packages(model):
        fix = by_parts(model) or fix
    reason = failure.reason
    if dynamic_shapes is not None:
        fix = "dynamic_shapes=None   # sizes that the model does not fix are then dynamic"
        fixed = fixed_size(str(failure.__cause__))
        if fixed is not None:
            reason = f"the model fixes the dynamic size {fixed[0]!r} to {fixed[1]}"
    return CaptureError(
        f"the model cannot be exported: {reason}",
        where=f"{where}, {failure.line}" if failure.line else where,
        fix=fix,
    )


def _exported(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    opaque: dict[str, str],
    trial: Trial,
) -> Exported:
    attempts = list(_attempts(model, args, kwargs, dynamic_shapes))
    for attempt in attempts:
        try:
            with opaque_calls(model, list(opaque), attempt.args, attempt.kwargs, trial) as calls:
                program, unchecked = _program(model, attempt)
        except Exception as error:
            failure = failure_of(error, model)
            is_over = attempt is attempts[-1] or failure.reason == DEPENDS or trial.failed
            if is_over or (attempt is attempts[-2] and _not_whole(failure.path, opaque)):
                raise failure from error  # of a part: it stays whole, and sizes stay free
            continue
        if attempt.is_doubled and _fixes_the_batch(program):
            continue
        notes = (attempt.note, *unchecked) if attempt.note else unchecked
        return Exported(program, opaque, calls, notes)
    raise AssertionError("there is always one attempt")


def _fixes_the_batch(program: ExportedProgram) -> bool:
    """Whether a program takes tensors of this first size alone."""
    inputs = set(program.graph_signature.user_inputs)
    values = (n.meta.get("val") for n in program.graph.nodes if n.name in inputs)
    return any(type(v.shape[0]) is int for v in values if isinstance(v, torch.Tensor) and v.dim())


def _program(model: nn.Module, attempt: _Attempt) -> tuple[ExportedProgram, tuple[str, ...]]:
    """The program, and notes about it.

    Where values of tensors decide, once more with ``assert`` statements about them that pass, and with
    integers that the model keeps as numbers.
    """
    try:
        return _with_numbers(model, attempt), ()
    except Exception as error:
        failure = failure_of(error, model)
        if failure.reason != DEPENDS or "assert" not in failure.line:
            raise
        with passing_asserts() as lines:
            program = _with_numbers(model, attempt)
    return program, unchecked_notes(lines)


def _with_numbers(model: nn.Module, attempt: _Attempt) -> ExportedProgram:
    try:
        return _run(model, attempt)
    except Exception as error:
        if failure_of(error, model).reason != DEPENDS or not keeps_numbers(model):
            raise
        try:
            with kept_as_numbers(model):
                return _run(model, attempt)
        except Exception as again:
            if any(isinstance(link, NotANumberError) for link in _chain(again)):
                raise error from None
            raise


def _run(model: nn.Module, attempt: _Attempt) -> ExportedProgram:
    try:
        return _by_torch(model, attempt)
    except TypeError as error:
        if not wants_plain_truth(error):
            raise
    with plain_comparisons():
        return _by_torch(model, attempt)


def _by_torch(model: nn.Module, attempt: _Attempt) -> ExportedProgram:
    with lengths_as_sizes(model) as asked:
        try:
            return _of_torch(model, attempt)
        except Exception:
            if not asked:
                raise
    return _of_torch(model, attempt)


def _of_torch(model: nn.Module, attempt: _Attempt) -> ExportedProgram:
    inputs = attempt.args, attempt.kwargs
    with quietly(), torch.no_grad(), _unmarked(inputs), recurrent_by_shape():
        return torch.export.export(
            model,
            attempt.args,
            attempt.kwargs,
            dynamic_shapes=attempt.dynamic_shapes,
            strict=False,
        )


@contextmanager
def _unmarked(inputs: Any) -> Iterator[None]:
    """Tensors keep the attributes that they had: an export that fails leaves marks of the sizes that were
    dynamic, which the next export of these tensors follows, whatever sizes it is asked for."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    before = [dict(tensor.__dict__) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, attributes in zip(tensors, before, strict=True):
            tensor.__dict__.clear()
            tensor.__dict__.update(attributes)


def _attempts(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> Iterator[_Attempt]:
    if dynamic_shapes is not None:
        yield _Attempt(args, kwargs, dynamic_shapes)
        return
    free = _free(_combine_args(model, args, kwargs), _free_sizes, _all_free)
    doubled = _doubled((args, kwargs))
    if doubled is not None:
        yield _Attempt(doubled[0], doubled[1], free, is_doubled=True)
    yield _Attempt(args, kwargs, free)
    note = "sizes are those of the example inputs: with dynamic sizes the model cannot be exported"
    yield _Attempt(args, kwargs, None, note)


def _free(
    tree: Any, free_of: Callable[[Any], Any], inside: Callable[[Any], Any] | None = None
) -> Any:
    """``free_of`` of each leaf; an instance of a class becomes the list of its parts, as export asks, with
    ``inside`` of the leaves in it."""

    def found(value: Any) -> Any:
        if not is_record(value):
            return free_of(value)
        parts = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0]
        return [_free(part, inside or free_of) for part in parts]

    return pytree.tree_map(found, tree, is_leaf=is_record)


def _all_free(leaf: Any) -> Any:
    """All sizes: the tensors of a cache grow in any dimension."""
    return dict.fromkeys(range(leaf.dim()), Dim.AUTO) if isinstance(leaf, torch.Tensor) else None


def _free_sizes(leaf: Any) -> Any:
    """All sizes of sequences and vectors, the batch of images and volumes."""
    if not isinstance(leaf, torch.Tensor):
        return None
    free = range(leaf.dim()) if leaf.dim() <= _SEQUENCE else range(1)
    return {i: Dim.AUTO if i in free else Dim.STATIC for i in range(leaf.dim())}


def _doubled(inputs: Any) -> Any:
    """The inputs twice along the first dimension, if that is 1 for every tensor; else ``None``."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    if not tensors or any(t.dim() == 0 or t.shape[0] != 1 for t in tensors):
        return None
    return pytree.tree_map(
        lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, torch.Tensor) else leaf, inputs
    )


@contextmanager
def quietly() -> Iterator[None]:
    """Without the exporter's warnings, and without attention kernels that hide their operators."""
    with quiet(), without_warnings(), without_attention_fastpath():
        yield


def failure_of(error: BaseException, model: nn.Module) -> NotExportedError:
    """Why an export failed, and in which module.

    >>> failure_of(ValueError("no"), nn.ReLU()).reason
    'no'
    """
    if isinstance(error, NotExportedError):
        return error
    paths = {id(module): path for path, module in model.named_modules()}
    found = ""
    line = ""
    for link in _chain(error):
        for frame, _ in traceback.walk_tb(link.__traceback__):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in paths:
                found = paths[id(owner)] or found
        line = user_line(link) or line
    return NotExportedError(_reason(error), found, line)


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


DEPENDS = "what it computes next depends on the values of a tensor"


def _reason(error: BaseException) -> str:
    """The exporter's reason in one sentence."""
    for link in _chain(error):
        kind = type(link).__name__
        if kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
            return DEPENDS
        if "data-dependent" in str(link) or "torch.cond" in str(link):
            return DEPENDS
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
