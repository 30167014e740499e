"""Copies of models whose modules, parameters and buffers have names that graphs can hold.

``torch.fx`` and ``torch.export`` write names into source (``backquant.identifiers``), so names are written
out before a capture, on a copy. The code of the model goes on to use its own: the copy answers to them.

1. A model whose names are all plain is returned as it is.
2. Modules with other names are of a subclass of their class in which attributes, keys of a ``ModuleDict`` and
   ``named_children`` have the user's names. What a ``forward`` reads of ``_modules``, or of
   ``named_parameters``, has the plain ones.
3. Modules that ``whole`` names stay as they are inside: nothing of them is written into source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from backquant.graph.clone import shallow_copy
from backquant.identifiers import attribute, identifier, label

_TABLES = ("_modules", "_parameters", "_buffers")


def with_plain_names(
    model: nn.Module, whole: Callable[[nn.Module], bool] = lambda _: False
) -> nn.Module:
    """``model`` if its names are plain, or a copy with such names that holds the same tensors.

    >>> model = nn.ModuleDict({"in": nn.ReLU(), "µ": nn.Tanh(), "μ": nn.ELU()})
    >>> copied = with_plain_names(model)
    >>> [name for name, _ in copied.named_modules()]
    ['', 'bqname_in', 'bqname__b5_', 'bqname__3bc_']
    >>> list(copied), copied["µ"], copied["μ"]
    (['in', 'µ', 'μ'], Tanh(), ELU(alpha=1.0))
    """
    if all(_is_plain(part, model) or whole(part) for part in model.modules()):
        return model
    copied = shallow_copy(model)
    for part in list(copied.modules()):
        if not (_is_plain(part, copied) or whole(part)):
            _rename(part, _plain(part, copied))
    return copied


def _plain(part: nn.Module, model: nn.Module) -> Callable[[str], str]:
    """How names in ``part`` of ``model`` are written."""
    return attribute if part is model else identifier


def _is_plain(part: nn.Module, model: nn.Module) -> bool:
    if isinstance(part, torch.jit.ScriptModule):  # shared by copies, and never taken apart
        return True
    plain = _plain(part, model)
    return all(plain(name) == name for table in _TABLES for name in getattr(part, table))


def _rename(part: nn.Module, plain: Callable[[str], str]) -> None:
    for key in _TABLES:
        own = getattr(part, key)
        vars(part)[key] = type(own)((plain(name), value) for name, value in own.items())
    part._non_persistent_buffers_set = set(map(plain, part._non_persistent_buffers_set))
    part.__class__ = _answering(type(part))  # type: ignore[arg-type]  # torch's classes are hashable


@functools.cache
def _answering(kind: type[nn.Module]) -> type[nn.Module]:
    """Rule 2: ``kind`` for modules whose tables have plain names."""
    bases = (_NamedByKey, kind) if issubclass(kind, nn.ModuleDict) else (_Named, kind)
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "stands_for": kind}
    return type(kind.__name__, bases, own)


def _blank(kind: type[nn.Module]) -> nn.Module:
    made = _answering(kind)  # type: ignore[arg-type]
    return made.__new__(made)


class _Named(nn.Module):
    def _plain(self, name: str) -> str:
        """The name in the tables, if there are any and they have one for the user's ``name``."""
        held = {key for table in _TABLES for key in self.__dict__.get(table, ())}
        return next((plain for plain in (identifier(name), attribute(name)) if plain in held), name)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(self._plain(name))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(self._plain(name), value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(self._plain(name))

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        for name, child in super().named_children():
            yield label(name), child

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kind: Any = type(self)
        return _blank, (kind.stands_for,), self.__dict__


class _NamedByKey(_Named, nn.ModuleDict):
    def _own(self) -> dict[str, nn.Module]:
        return {label(name): part for name, part in self._modules.items() if part is not None}

    def __getitem__(self, key: str) -> nn.Module:
        return super().__getitem__(self._plain(key))

    def __contains__(self, key: str) -> bool:
        return self._plain(key) in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._own())

    def keys(self) -> Any:
        return self._own().keys()

    def items(self) -> Any:
        return self._own().items()
