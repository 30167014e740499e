"""``quantize_parts``: every part of a model that a capture takes is quantized by itself."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from backquant.api.arguments import given_model
from backquant.api.flow import Flow, Options
from backquant.api.partly_quantized import PartlyQuantized, with_parts
from backquant.backend_config.config import Backend
from backquant.calibrate.batches import (
    called_on_example,
    count_of,
    example_and_set,
    first_batch,
    inputs_of,
    kept_set,
)
from backquant.errors import (
    CaptureError,
    CoverageError,
    InputError,
    UsageError,
    first_line,
)
from backquant.graph import as_arguments
from backquant.graph.clone import own_buffers, own_in_place, with_own_state
from backquant.graph.costs import MultiplyAdds
from backquant.pipeline.plan import evaluation_copy
from backquant.qconfig import PrepareCustomConfig
from backquant.report.document import percent
from backquant.report.model import given_requirement
from backquant.runtime import QuantizedModel

# What the parts of a model are called with while the model computes a batch.


_BYTES = 256 << 20  # of calls that are kept


@dataclass
class Seen:
    """What one run shows of a module: how often it is called, and the multiply-adds of all calls; of the
    model itself also the operators of which these are not known."""

    calls: int = 0
    multiply_adds: int = 0
    uncounted: tuple[str, ...] = ()


class CallsOf(Iterable[Any]):
    """The calls of ``part`` while ``model``, which contains it, computes ``batches``: one item a call, in the
    form of a batch. The part itself does not run at the last of ``most`` calls for a batch, nor what is
    behind it; more calls are not looked at. Of a set that is gone over again, what 256 MB hold is kept.

    >>> part = nn.Linear(2, 3)
    >>> model = nn.Sequential(nn.ReLU(), part, nn.Softmax(-1))
    >>> [args] = CallsOf(model, part, 1, [torch.tensor([[-1.0, 1.0]])])
    >>> args
    (tensor([[0., 1.]]),)
    """

    def __init__(
        self, model: nn.Module, part: nn.Module, most: int, batches: Iterable[Any]
    ) -> None:
        self._model, self._part, self._most, self._batches = model, part, most, batches
        self._held: dict[int, list[Any]] = {}
        self._room = _BYTES

    def __iter__(self) -> Iterator[Any]:
        for place, batch in enumerate(self._batches):
            found = self._held.get(place)
            if found is None:
                found = self._of(batch)
                size = sum(
                    leaf.nbytes for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)
                )
                if size <= self._room:
                    self._room -= size
                    self._held[place] = found
            yield from found

    def _of(self, batch: Any) -> list[Any]:
        found: list[Any] = []

        def seen(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(as_batch(part, *_copied((args, kwargs))))
            if len(found) >= self._most:
                raise _EnoughError

        handle = self._part.register_forward_pre_hook(seen, with_kwargs=True)
        try:
            run(self._model, batch)
        except _EnoughError:
            pass
        finally:
            handle.remove()
        return found


class CallsEach(CallsOf, Sized):
    """``CallsOf`` of a part that is called once for each batch of a set whose length is known."""

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def calls_of(model: nn.Module, part: nn.Module, most: int, batches: Iterable[Any]) -> CallsOf:
    """``CallsOf``; with a length where each batch makes one call.

    >>> part = nn.ReLU()
    >>> len(calls_of(nn.Sequential(part), part, 1, [torch.ones(1)]))
    1
    """
    kind = CallsEach if most == 1 and count_of(batches) is not None else CallsOf
    return kind(model, part, most, batches)


class _EnoughError(BaseException):
    """Ends a run; not an ``Exception``, which a model may catch."""


def _copied(values: Any) -> Any:
    """What is called next may write to its arguments."""
    return tree_map_only(torch.Tensor, torch.Tensor.clone, values)


def as_batch(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call in the form of a batch: a tuple, or a dict by name where some are named.

    >>> as_batch(nn.Linear(1, 1), (3,), {}), as_batch(nn.Linear(1, 1), (), {"input": 3})
    ((3,), {'input': 3})
    """
    if not kwargs:
        return args
    bound = inspect.signature(part.forward).bind(*args, **kwargs).arguments
    kinds = {name: each.kind for name, each in inspect.signature(part.forward).parameters.items()}
    named: dict[str, Any] = {}
    for name, value in bound.items():
        if kinds[name] is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def changes_inputs(part: nn.Module, batch: Any) -> bool:
    """Whether a call writes to its inputs, or adds to a dict or list of them: the model that calls it may
    read them afterwards.

    >>> changes_inputs(nn.ReLU(inplace=True), (-torch.ones(2),)), changes_inputs(nn.ReLU(), (-torch.ones(2),))
    (True, False)
    """
    given = _copied(batch)
    _run(part, given)
    before, after = tree_flatten(batch), tree_flatten(given)
    if before[1] != after[1]:
        return True
    pairs = zip(before[0], after[0], strict=True)
    return not all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


def run(model: nn.Module, batch: Any) -> Any:
    """What ``model`` gives for a batch, without gradients; its buffers and the batch stay as they are."""
    return _run(model, _copied(batch))


def _run(model: nn.Module, batch: Any) -> Any:
    args, kwargs = as_arguments(batch)
    with torch.no_grad(), with_own_state(model):
        return model(*args, **kwargs)


def survey(model: nn.Module, batch: Any) -> dict[nn.Module, Seen]:
    """What a run of ``model``, a copy that nobody else uses, shows of each module that is called in it.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> [(type(part).__name__, seen.multiply_adds) for part, seen in survey(model, torch.ones(1, 2)).items()]
    [('Sequential', 6), ('Linear', 6), ('ReLU', 0)]
    """
    found: dict[nn.Module, Seen] = {}
    started: list[int] = []
    counter = MultiplyAdds()

    def begins(part: nn.Module, _: Any) -> None:
        found.setdefault(part, Seen()).calls += 1
        started.append(counter.count)

    def ends(part: nn.Module, *_: Any) -> None:
        found[part].multiply_adds += counter.count - started.pop()

    with ExitStack() as hooks, counter:
        for part in model.modules():
            if isinstance(part, torch.jit.ScriptModule):  # takes no hooks
                continue
            hooks.callback(part.register_forward_pre_hook(begins).remove)
            hooks.callback(part.register_forward_hook(ends).remove)
        run(model, batch)
    found[model].uncounted = tuple(dict.fromkeys(counter.unknown))
    return found


_PLAIN = (bool, int, float, str, type(None))
_BY_PARTS = (CaptureError, InputError, UsageError)  # of a part: what is in it may be captured


def quantize_parts(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    parts: Sequence[str] | None = None,
    backend: Backend | None = None,
    calibration: Iterable[Any] | None = None,
    weights: str | None = None,
    group_size: int | None = None,
    require: float | None = None,
    slower: str | None = None,
    recipe: str | os.PathLike[str] | Sequence[str] = "default",
    progress: bool = False,
) -> PartlyQuantized:
    """Quantize the parts of a ``model`` whose own ``forward`` no capture takes: a detector that sorts its
    boxes, a model that decides by values what it computes next. Its ``forward`` stays as it is.

    Parts are the submodules that multiply, from the outside to the inside: one that no capture takes is
    divided again. Each is calibrated with what ``model`` calls it with for the batches of ``calibration``;
    for each part the model runs up to its call, so that the time grows with the number of parts. Each has the
    plain attributes (numbers, texts) of the module that it takes the place of, but not its methods: one of
    which the model calls more is divided, too.

    Args:
        parts: paths of submodules, in place of those that are found.
        require: the least share (0 to 1) of the model's multiply-adds that must be quantized.

    The others are those of ``quantize``, for each part.

    Raises:
        CoverageError: nothing, or less than required, can be quantized; or not one of ``parts``.
        InputError, CalibrationError, EngineError, UsageError: as ``quantize``.

    >>> import torch
    >>> class Chosen(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.features, self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2)
    ...     def forward(self, x):
    ...         found = self.features(x)
    ...         return self.head(found[found.sum(1) > 1]).tolist()
    >>> made = quantize_parts(Chosen(), calibration=[torch.randn(64, 8)])
    >>> list(made.parts), made.coverage
    (['features', 'head'], 1.0)
    """
    required = _share(require)
    options = Options(
        backend,
        weights=weights,
        group_size=group_size,
        slower=slower,
        recipe=recipe,
        progress=progress,
    )
    frozen = evaluation_copy(given_model(model))
    example_inputs, calibration = example_and_set(frozen, example_inputs, calibration)
    calibration = kept_set(inputs_of(frozen, calibration))
    batches: Iterable[Any]
    if calibration is None:
        example, batches = example_inputs, [example_inputs]
    else:
        first, batches = first_batch(calibration)
        example = first if example_inputs is None else example_inputs
    called_on_example(frozen, example)
    parting = _Parting(frozen, example, batches, calibration is not None, options)
    if parts is None:
        parting.divide("", frozen)
    else:
        parting.take(parts)
    return parting.result(required)


@dataclass
class _Parting:
    """A model in evaluation mode that is gone through part by part, and what was found."""

    frozen: nn.Module
    example: Any
    batches: Iterable[Any]
    calibrates: bool
    options: Options
    made: dict[str, QuantizedModel] = field(default_factory=dict)
    in_float: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seen = survey(self.frozen, self.example)
        self._done: set[nn.Module] = set()

    def divide(self, path: str, module: nn.Module) -> None:
        """Quantize the parts of ``module`` that can be, and those of the others."""
        for name, child in module.named_children():
            place = f"{path}.{name}" if path else name
            if child in self._done:
                continue
            self._done.add(child)
            seen = self.seen.get(child)
            if isinstance(child, torch.jit.ScriptModule):
                self.in_float[place] = "it is TorchScript, whose operators cannot be seen"
            elif not any(part in self.seen for part in child.modules()):
                self._not_called(place, child)
            # a list of modules, or one whose methods or parts are called
            elif seen is None or (seen.multiply_adds and self._tried(place, child, seen)):
                self.divide(place, child)

    def _not_called(self, path: str, part: nn.Module) -> None:
        if next(part.parameters(), None) is not None:
            self.in_float[path] = "the model does not call it for the first batch"

    def take(self, paths: Sequence[str]) -> None:
        """Quantize the parts at ``paths``.

        Raises ``UsageError`` for what is no part, ``CoverageError`` for one that cannot be quantized.
        """
        known = dict(self.frozen.named_modules(remove_duplicate=False))
        for path in paths:
            part = known.get(path)
            if not path or part not in self.seen:
                raise UsageError(
                    f"{path!r} is no part that the model calls",
                    where=f"parts={list(paths)!r}",
                    fix="parts=None   # finds them; paths are those of model.named_modules()",
                )
            self._tried(path, part, self.seen[part])
            if path not in self.made:
                raise CoverageError(
                    f"the part {path!r} cannot be quantized: {self.in_float[path]}",
                    where=f"parts={list(paths)!r}",
                    fix="parts=None  # divides it",
                )

    def _tried(self, path: str, part: nn.Module, seen: Seen) -> bool:
        """Quantize a part; whether it is worth dividing instead."""
        calls = calls_of(self.frozen, part, seen.calls, self.batches)
        first = next(iter(calls), None)
        if first is None:  # the example inputs are others
            self._not_called(path, part)
            return False
        if changes_inputs(part, first):
            self.in_float[path] = (
                "it changes its inputs in place, which the model may read afterwards"
            )
            return True
        data: dict[str, Any] = (
            {"calibration": calls} if self.calibrates else {"example_inputs": first}
        )
        kept = PrepareCustomConfig().set_preserved_attributes(_plain_attributes(part))
        try:
            made = Flow(replace(self.options, prepare_custom_config=kept)).run(part, **data)
        except CoverageError as error:
            self.in_float[path] = error.what
            return False
        except _BY_PARTS as error:
            self.in_float[path] = error.what
            return True
        if not made.report.quantized:  # slower="float"
            self.in_float[path] = "it is faster in float"
            return False
        unlike = self._unlike({**self.made, path: made}, made)
        if unlike:
            self.in_float[path] = unlike
            return True
        self.made[path] = made
        return False

    def _unlike(self, parts: Mapping[str, QuantizedModel], made: QuantizedModel) -> str:
        """Why the model cannot call ``made`` in place of its part; empty if it can."""
        calls: list[None] = []
        handle = made.register_forward_pre_hook(lambda *_: calls.append(None))
        try:
            run(with_parts(own_buffers(self.frozen), parts), self.example)
        except Exception as error:
            return f"the model fails with it: {type(error).__name__}: {first_line(error)}"
        finally:
            handle.remove()
        return "" if calls else "the model calls it by another way than its path"

    def result(self, required: float) -> PartlyQuantized:
        """Raises ``CoverageError`` where too little was quantized."""
        rest = with_parts(self.frozen, {path: nn.Identity() for path in self.made})
        own_in_place(rest)
        model = with_parts(rest, self.made)
        parts = {path: self.frozen.get_submodule(path) for path in self.made}
        counts = {path: self.seen[part].multiply_adds for path, part in parts.items()}
        whole = self.seen[self.frozen]
        found = PartlyQuantized(
            *(model, dict(self.made), counts, whole.multiply_adds, dict(self.in_float)),
            whole.uncounted,
        )
        if not self.made:
            raise self._refused(
                "no part of this model can be quantized", "none of its parts multiplies"
            )
        if required and not found.coverage >= required:
            done, asked = percent(found.coverage), percent(required)
            what = f"{done} of the multiply-adds are quantized, {asked} are required"
            raise self._refused(what, f"what is outside of {list(self.made)}")
        return found

    def _refused(self, what: str, else_where: str) -> CoverageError:
        rows = [f"{path}: {why}" for path, why in self.in_float.items()]
        return CoverageError(
            what,
            where="\n".join(rows) or else_where,
            fix="backquant.explain(part, inputs)  # has every reason of a part",
        )


def _share(require: Any) -> float:
    required = given_requirement(require)
    if isinstance(required, tuple):
        raise UsageError(
            "parts are not required by name",
            where=f"require={require!r}",
            fix=f"require=None, parts={list(required)!r}   # or the least share: require=0.9",
        )
    return 0.0 if required is None else required


def _plain_attributes(part: nn.Module) -> list[str]:
    return [
        name
        for name, value in vars(part).items()
        if not name.startswith("_") and name != "training" and _is_plain(value)
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
