"""Modules made from the table, and the finder that imports them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from backquant.ao.left_out import left_out
from backquant.ao.table import table

__all__ = ["Finder", "Mirror"]

_ROOT = "backquant.ao."


class Mirror(ModuleType):
    """A module of ``torch.ao`` by the table. A name is resolved when it is first read."""

    def __getattr__(self, name: str) -> Any:
        path = self.__name__.removeprefix(_ROOT)
        entry = table()[path].get(name)
        if entry is None:
            return _submodule(f"{path}.{name}", self.__name__, name)
        if entry.home.startswith("!"):
            value: Any = left_out(f"torch.ao.{path}.{name}", entry.home[1:])
        elif entry.home.startswith("="):
            value = json.loads(entry.home[1:])
        else:
            value = getattr(importlib.import_module(entry.home), entry.name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """A submodule that is imported does not hide a function of its name (``quantize``)."""
        clash = isinstance(value, Mirror) and name in table()[self.__name__.removeprefix(_ROOT)]
        if not clash:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        path = self.__name__.removeprefix(_ROOT)
        return sorted({*super().__dir__(), *table()[path], *_children(path)})


def _children(path: str) -> list[str]:
    below = (other[len(path) + 1 :] for other in table() if other.startswith(path + "."))
    return [name for name in below if "." not in name]


def _submodule(path: str, module: str, name: str) -> ModuleType:
    if path in table():
        return importlib.import_module(_ROOT + path)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class Finder(MetaPathFinder, Loader):
    """Finds the modules of the table, and makes them.

    >>> Finder().find_spec("backquant.ao.quantization.no_such_module") is None
    True
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """The spec of a module of the table; each is a package where others are below it."""
        inner = fullname.removeprefix(_ROOT)
        if inner == fullname or inner not in table():
            return None
        return ModuleSpec(fullname, self, is_package=bool(_children(inner)))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module that resolves its names by the table."""
        return Mirror(spec.name, f"What ``torch.ao.{spec.name.removeprefix(_ROOT)}`` offers.")

    def exec_module(self, module: ModuleType) -> None:
        """Names that ``import *`` brings; the packages of one that has no names."""
        path = module.__name__.removeprefix(_ROOT)
        starred = [name for name, entry in table()[path].items() if entry.starred]
        module.__dict__["__all__"] = starred or _children(path)
