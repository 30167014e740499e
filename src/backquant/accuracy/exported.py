"""An exported file, in the runtime that it is for, beside the float model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from backquant.accuracy.comparison import Comparison, OutputError
from backquant.accuracy.figures import ErrorSums, Metric, measured_metric
from backquant.calibrate.batches import first_batch
from backquant.deploy.session import Loaded, load_exported
from backquant.errors import InputError, UsageError
from backquant.graph.example import call
from backquant.graph.objects import tensors_of
from backquant.graph.silence import quiet
from backquant.pipeline.plan import evaluation_copy


class ExportedModel(nn.Module):
    """A loaded file that is called like ``model``, and returns what that returns."""

    def __init__(self, loaded: Loaded, path: Path, model: nn.Module, example: Any) -> None:
        super().__init__()
        self._loaded, self._path = loaded, path
        self._signature = inspect.signature(model.forward)
        self._form = pytree.tree_structure(call(model, example))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One call. Raises ``InputError`` for inputs that the file does not take."""
        bound = self._signature.bind(*args, **kwargs)
        named = dict(bound.arguments)
        if set(named) == set(self._loaded.inputs):  # an export from keywords has their order
            named = {name: named[name] for name in self._loaded.inputs}
        leaves = pytree.tree_leaves(list(named.values()))
        inputs = [part for leaf in leaves for part in tensors_of(leaf) or [leaf]]
        arrays = [one.detach().numpy() if isinstance(one, torch.Tensor) else one for one in inputs]
        try:
            with quiet():
                results = self._loaded.run(arrays)
        except Exception as error:
            sizes = ", ".join(f"{name} {list(size)}" for name, size in self._loaded.inputs.items())
            given = ", ".join(str(list(one.shape)) for one in inputs if hasattr(one, "shape"))
            raise InputError(
                f"{self._path.name} does not take inputs of the sizes {given}; it takes {sizes} "
                "(None: any size)",
                where=str(self._path),
                fix="batches of these sizes, or a file that was exported with dynamic_shapes",
            ) from error
        tensors = [torch.as_tensor(result) for result in results]
        if len(tensors) != self._form.num_leaves:
            raise UsageError(
                f"{self._path.name} gives {len(tensors)} outputs, the model {self._form.num_leaves}",
                where=str(self._path),
                fix="the file that was exported from this model",
            )
        return pytree.tree_unflatten(tensors, self._form)


def compared_file(
    model: nn.Module, path: Path, data: Iterable[Any], to: str | None, metric: Metric | None
) -> Comparison:
    """The outputs of the file at ``path`` beside those of ``model``. ``to``: its target, where known.

    Raises ``UsageError`` for a file without a runtime here, or of another model, or that takes and gives
    integers; ``InputError`` for batches of sizes that it does not take.
    """
    loaded = load_exported(path, 1, to)
    if path.with_suffix(".qparams.json").exists():
        raise UsageError(
            f"{path.name} takes or gives integers, and the float model floats",
            where=str(path),
            fix="export it once more with integer_io=False, and compare that file",
        )
    frozen = evaluation_copy(model)
    example, batches = first_batch(data, "data")
    exported = ExportedModel(loaded, path, frozen, example)
    sums: list[ErrorSums] = []
    count = 0
    for batch in batches:
        wanted, returned = (pytree.tree_leaves(call(one, batch)) for one in (frozen, exported))
        pairs = [
            (one, two)
            for one, two in zip(wanted, returned, strict=True)
            if isinstance(one, torch.Tensor) and one.is_floating_point()
        ]
        sums = sums or [ErrorSums() for _ in pairs]
        for total, pair in zip(sums, pairs, strict=True):
            total.add(*pair)
        count += 1
    outputs = tuple(
        OutputError(place, total.sqnr, total.cosine, total.largest)
        for place, total in enumerate(sums)
    )
    found = None
    if metric is not None:
        found = (
            measured_metric(metric, frozen, "the float model"),
            measured_metric(metric, exported, "the exported model"),
        )
    return Comparison(path.name, type(model).__name__, count, outputs=outputs, metric=found)
