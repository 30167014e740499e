"""What the parts of a model are called with while the model computes a batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from backquant.calibrate.batches import count_of
from backquant.graph import as_arguments
from backquant.graph.clone import with_own_state
from backquant.graph.costs import MultiplyAdds

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
