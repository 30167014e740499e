"""Exports of models that do something else while they are exported than when they are called."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import nn

from backquant.errors import CaptureError
from backquant.graph import Captured
from backquant.graph.export import ExportedModel, ExportOptions, capture_export
from backquant.graph.export.as_called import as_called
from backquant.graph.own_thread import untold_of_capture
from backquant.operators.aten import AtenSpeller
from backquant.pipeline.faithful import agrees

_AS_CALLED = (
    "arguments that a call leaves out, such as masks, were left out in the export, too: with what the model "
    "makes for them while it is exported it does not run"
)


_FIXED = (
    "sizes are those of the example inputs: a change in place is written as values for one size"
)


_UNTOLD = (
    "exported as if it were called: parts of the model fail where it asks whether it is exported, and makes "
    "less then, such as no mask"
)


def exported_as_called(model: nn.Module, example_inputs: Any, options: ExportOptions) -> Captured:
    """``model``, exported. Where that graph gives other values than the model, or parts of the model cannot
    be exported, it is exported again in another way:

    1. without the arguments that the call leaves out (``backquant.graph.export.as_called``);
    2. without telling the model that it is exported; where all parts that failed are of one class, no
       further than to the same failure of one of them;
    3. for fixed input sizes.
    """
    captured, failure = _attempted(model, example_inputs, options)
    failed = set() if captured is None else captured.whole.keys() - options.whole.keys()
    is_same = isinstance(model, ExportedModel) or _agrees(captured, model, example_inputs)
    if captured is not None and is_same and (not failed or isinstance(model, ExportedModel)):
        return captured
    known = _alike(captured, model, failed) if is_same and captured is not None else {}
    others = [(replace(options, around=untold_of_capture, known=known), _UNTOLD)]
    if not is_same and captured is not None:
        others.insert(0, (replace(options, around=as_called), _AS_CALLED))
        if options.dynamic_shapes is None:
            others.append((replace(options, dynamic_shapes={}), _FIXED))
    for other, note in () if isinstance(model, ExportedModel) else others:
        again, _ = _attempted(model, example_inputs, other)
        if again is None or not _agrees(again, model, example_inputs):
            continue
        if not is_same or _is_less(again.whole.keys() - options.whole.keys(), failed):
            return replace(again, notes=(*again.notes, note))
    if captured is None:
        assert failure is not None
        raise failure
    return captured


def _attempted(
    model: nn.Module, example_inputs: Any, options: ExportOptions
) -> tuple[Captured | None, CaptureError | None]:
    try:
        return capture_export(model, example_inputs, AtenSpeller(), options), None
    except CaptureError as error:
        return None, error


def _alike(captured: Captured, model: nn.Module, failed: Collection[str]) -> dict[str, str]:
    """The reasons for which modules failed, by path, where these are all of one class."""
    kinds = {type(model.get_submodule(path)) for path in failed}
    return {path: captured.whole[path] for path in failed} if len(kinds) == 1 else {}


def _is_less(left: Collection[str], failed: Collection[str]) -> bool:
    """Whether all of ``left`` lies within modules that failed before, and not all of these did now.

    >>> _is_less(["a.b"], {"a"}), _is_less(["a"], {"a"}), _is_less(["c"], {"a"})
    (True, False, False)
    """
    inside = all(any(f"{path}.".startswith(f"{top}.") for top in failed) for path in left)
    return inside and set(left) != set(failed)


def _agrees(captured: Captured | None, model: nn.Module, example_inputs: Any) -> bool:
    return captured is not None and agrees(captured.module, model, example_inputs)
