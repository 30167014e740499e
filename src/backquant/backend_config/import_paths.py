"""Import paths: the spelling of classes and callables in a spec file, both ways.

``path_of`` finds the shortest public path that leads back to the same object. ``Resolver`` walks a path
inside an allow-list. Invariants of resolving:

1. Nothing is imported but packages that the caller allows by name, their parents, and rooms of backquant
   that describe models: what torch has not loaded is not there.
2. Every module on the way, and the module that defines the object found, is in the allow-list, so
   that ``torch.os.system`` does not resolve although ``torch`` is allowed.
3. What is found is of a kind that descriptions are made of (``is_named``), unless the caller allows it.
4. Nothing found is called.
"""

from __future__ import annotations

import importlib
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import get_overridable_functions

from backquant.backend_config.naming import operator_name
from backquant.errors import SpecError, literal, nearest, quoted

__all__ = ["IMPORTED", "is_named", "is_operator"]


# What a description may name: classes of modules, operators of tensors, fusers and observers of ours.
#
# A fuser, a factory and a module class are called when a model is quantized; so what torch has beside modules
# and operators (loaders, compilers, its C functions) is no name of a description, although it lies in torch.


# Rooms whose modules are imported when a file names what is in them: they define, and do nothing else.
IMPORTED = tuple(
    f"backquant.{room}" for room in ("backend_config", "nn", "observe", "operators", "qconfig")
)
_MODULES = ("torch.nn.modules.", "torch.ao.nn.", "backquant.nn.")
_CALLED = tuple(f"{room}." for room in IMPORTED)
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme, bool, int, float, str)
_HOMES = (torch.nn.functional, torch.functional)
_KINDS = (FunctionType, BuiltinFunctionType, MethodDescriptorType)
_NOT_OPERATORS = frozenset({"from_file", "from_numpy", "frombuffer"})


def is_named(found: Any, path: str) -> bool:
    """Whether a description may name ``found``, which ``path`` led to.

    >>> is_named(nn.Conv2d, "torch.nn.Conv2d"), is_named(torch.add, "torch.add")
    (True, True)
    >>> is_named(torch.load, "torch.load"), is_named(torch._C._abort, "torch._C._abort")
    (False, False)
    """
    if isinstance(found, _CONSTANTS):
        return True
    home = f"{getattr(found, '__module__', '')}."
    if isinstance(found, type) and issubclass(found, nn.Module):
        return home.startswith((*_MODULES, *_CALLED))
    if isinstance(found, (type, FunctionType)) and home.startswith(_CALLED):
        return True
    if path.startswith("builtins."):
        return True  # a list of its own, in ``names``
    return is_operator(found)


def is_operator(found: Any) -> bool:
    """Whether ``found`` computes with tensors: a registered operator, a function or method of torch.

    >>> is_operator(torch.relu), is_operator(torch.ops.aten.relu.default), is_operator(nn.ReLU)
    (True, True, False)
    """
    if isinstance(found, (OpOverload, OpOverloadPacket)):
        return True
    name = getattr(found, "__name__", "")
    if not callable(found) or name in _NOT_OPERATORS:
        return False
    if getattr(operator, name, None) is found:
        return isinstance(found, BuiltinFunctionType) and name != "call"
    return isinstance(found, _KINDS) and found in _operators()


@cache
def _operators() -> frozenset[Callable[..., Any]]:
    """Functions of torch on tensors, and methods of tensors."""
    known = [f for functions in get_overridable_functions().values() for f in functions]
    natives = torch._C._VariableFunctions
    known += [getattr(natives, name) for name in dir(natives) if not name.startswith("__")]
    for home in _HOMES:
        for value in vars(home).values():
            is_own = isinstance(value, FunctionType) and value.__module__ == home.__name__
            if is_own or isinstance(value, BuiltinFunctionType):
                known.append(value)
    return frozenset(f for f in known if isinstance(f, _KINDS))


# What is wrong with a spec file: values with file, line and field, and the error that carries them.

MOST_TOLD = 200  # problems of one file; each may ask for the nearest of thousands of words
_LONGEST = 400  # of what is told of one problem; a file may hold names of any length


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a file.

    >>> print(Problem("x.yaml", 3, "entries[0].patern", "unknown field", 'did you mean "pattern"?'))
    x.yaml:3: entries[0].patern: unknown field; did you mean "pattern"?
    """

    file: str
    line: int | None
    field: str
    message: str
    fix: str = ""

    @property
    def place(self) -> str:
        """``file:line: field``, as far as each is known."""
        file = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(part for part in (file, _short(self.field)) if part)

    def __str__(self) -> str:
        tail = f"; {self.fix}" if self.fix else ""
        return _short(f"{self.place}: {self.message}{tail}")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


class SpecFileError(SpecError):
    """A spec file is malformed. ``problems`` lists everything that was found, in file order."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        more = len(self.problems) - 1
        what = _short(first.message) + (f" (and {more} more)" if more else "")
        super().__init__(
            what,
            where="\n         ".join(p.place if p is first else str(p) for p in self.problems),
            fix=_short(first.fix),
        )


def suggestion(word: str, known: Iterable[str]) -> str:
    """A question naming the nearest known word, or the list of known words when none is near.

    >>> suggestion("patern", ["pattern", "root_module"])
    'did you mean "pattern"?'
    >>> suggestion("x", ["pattern", "root_module"])
    'known: pattern, root_module'
    """
    names = list(dict.fromkeys(known))
    starts = [name for name in names if word and name.lower().startswith(word.lower())]
    near = next(iter([*nearest(word, names), *starts]), "")
    if near:
        return f"did you mean {quoted(near)}?"
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"known: {shown}" if names else ""


DEFAULT_ALLOW = ("torch", "operator", "backquant", "builtins")

# builtins that torch.fx records as call_function targets; the others (eval, open, …) are refused
_BUILTINS = frozenset(
    ("abs", "bool", "divmod", "float", "getattr", "int", "len", "max", "min", "pow", "round", "sum")
)

# C modules whose functions are known by the name of a public module
_ALIASES = {"_operator": "operator"}
_PART = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# constants of torch that print as their own import path
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)


class SpellingError(ValueError):
    """A name that does not resolve, or an object that has no name: what, the fix, and where.

    ``path`` leads from the value being read to the part that is wrong.
    """

    def __init__(self, what: str, fix: str = "", path: tuple[str | int, ...] = ()) -> None:
        self.what = what
        self.fix = fix
        self.path = path
        super().__init__(f"{what}; {fix}" if fix else what)


class _Within:
    """Packages and modules, by their names."""

    def __init__(self, roots: Iterable[str]) -> None:
        self.roots = tuple(roots)
        self._starts = tuple(f"{root}." for root in self.roots)

    def has(self, name: str) -> bool:
        """Whether ``name`` is one of them, or of something in them."""
        return name in self.roots or name.startswith(self._starts)

    def is_below(self, name: str) -> bool:
        """Whether one of them is in ``name``."""
        return any(root.startswith(f"{name}.") for root in self.roots)


_TORCH = _Within(("torch",))


class Resolver:
    """Finds objects by import path within an allow-list of packages.

    ``allow`` holds package names (``"mypkg"``) or dotted prefixes (``"mypkg.ops"``) that are trusted
    in addition to torch, operator, backquant and some builtins; and folders (``"../shared"``) whose files
    a file may extend.

    >>> Resolver().resolve("torch.nn.Conv2d")
    <class 'torch.nn.modules.conv.Conv2d'>
    >>> Resolver().resolve("torch.os.system")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    SpellingError: "torch.os.system" leads out of the allowed packages, to os
    """

    def __init__(self, allow: Iterable[str] = ()) -> None:
        allowed = tuple(allow)
        self.folders = tuple(Path(name).resolve() for name in allowed if _is_folder(name))
        trusted = [name for name in allowed if not _is_folder(name)]
        self.allow = tuple(dict.fromkeys((*DEFAULT_ALLOW, *trusted)))
        self._trusted, self._allowed = _Within(trusted), _Within(self.allow)
        self._imported = _Within((*IMPORTED, *trusted))
        self._found: dict[str, Any] = {}
        self._led_to: dict[str, Any] = {}

    def resolve(self, path: str) -> Any:
        """The object at ``path``. Raises SpellingError."""
        if path not in self._found:
            self._found[path] = self._named(path)
        return self._found[path]

    def _named(self, path: str) -> Any:
        parts = path.split(".")
        for part in parts:
            if not _PART.fullmatch(part):
                raise SpellingError(
                    f"{quoted(path)} is not an import path", 'write "torch.nn.Conv2d"'
                )
            if part.startswith("__"):
                raise SpellingError(
                    f"{quoted(path)} goes through {quoted(part)}", "name a public object"
                )
        if len(parts) < 2 or not self._allowed.has(path):
            raise SpellingError(
                f"{quoted(path)} is outside of the allowed packages ({', '.join(self.allow)})",
                f"if you trust it, allow it where the file is loaded: allow=({literal(parts[0])},)",
            )
        if path.startswith("torch.ops.") and parts[2] != "aten":
            self._register_operators(path)
        found = self._walk(path, path)
        self._check_home(found, path)
        if not is_named(found, path) and not self._trusted.has(path):
            raise SpellingError(
                f"{quoted(path)} is no module class, operator, fuser or observer",
                f'if you trust it, allow it by name: allow=("{path.rpartition(".")[0]}",)',
            )
        return found

    def _walk(self, name: str, path: str) -> Any:
        """What ``name``, with which ``path`` begins, leads to."""
        if name not in self._led_to:
            before, _, part = name.rpartition(".")
            here = self._walk(before, path) if before else None
            self._led_to[name] = (
                self._step(here, part, path, before) if before else self._import(name, path)
            )
        return self._led_to[name]

    def _register_operators(self, path: str) -> None:
        """Import the allowed packages, as far as they are installed: that registers their operators."""
        for name in self._trusted.roots:
            package = name.partition(".")[0]
            if package in sys.modules or find_spec(package) is not None:  # a script has no spec
                self._import(name, path, optional=True)

    def _step(self, here: Any, part: str, path: str, so_far: str) -> Any:
        try:
            found = self._attribute(here, part)
        except AttributeError:
            found = None
            if isinstance(here, ModuleType) and hasattr(here, "__path__"):
                found = self._import(f"{here.__name__}.{part}", path, optional=True)
            if found is None:
                known = [name for name in dir(here) if not name.startswith("_")]
                raise SpellingError(
                    f"{quoted(path)}: {so_far} has no {quoted(part)}", _nearest(part, known, so_far)
                ) from None
        except Exception as error:
            raise SpellingError(f"{quoted(path)} cannot be read: {error}") from error
        if isinstance(found, ModuleType) and not self._allows_module(found.__name__):
            raise SpellingError(
                f"{quoted(path)} leads out of the allowed packages, to {found.__name__}"
            )
        return found

    def _attribute(self, here: Any, part: str) -> Any:
        """What ``here`` holds; torch's modules are not asked for what they would import."""
        name = getattr(here, "__name__", "")
        if type(here) is not ModuleType or not _TORCH.has(name):
            return getattr(here, part)
        if part in vars(here) or self._trusted.has(f"{name}.{part}"):
            return getattr(here, part)
        raise AttributeError(part)

    def _allows_module(self, name: str) -> bool:
        """The module itself is allowed, or it is a parent of an allowed one."""
        return self._allowed.has(name) or self._allowed.is_below(name)

    def _import(self, name: str, path: str, optional: bool = False) -> ModuleType | None:
        if not self._allows_module(name):
            raise SpellingError(f"{quoted(path)} is outside of the allowed packages")
        loaded = sys.modules.get(name)
        if loaded is not None:
            return loaded
        if not self._imported.has(name) and not self._trusted.is_below(name):
            if optional:
                return None
            raise SpellingError(
                f"{quoted(path)}: the module {name} is not loaded",
                f"import it first, or allow it by name: allow=({literal(name)},)",
            )
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if optional and error.name == name:
                return None
            raise SpellingError(
                f"{quoted(path)}: the module {error.name} is not installed",
                "install the package that has it",
            ) from error
        except Exception as error:
            raise SpellingError(f"{quoted(path)}: importing {name} failed: {error}") from error

    def _check_home(self, found: Any, path: str) -> None:
        home = getattr(found, "__module__", None)
        if not isinstance(home, str):
            return
        home = _ALIASES.get(home, home)
        if home == "builtins":
            allowed = getattr(found, "__name__", "") in _BUILTINS or not callable(found)
        else:
            allowed = self._allowed.has(home)
        if not allowed:
            raise SpellingError(f"{quoted(path)} leads out of the allowed packages, to {home}")


def _is_folder(name: str) -> bool:
    return "/" in name or os.sep in name or name in (".", "..")


def _nearest(part: str, known: list[str], so_far: str) -> str:
    hint = suggestion(part, known)
    return hint.replace('"', f'"{so_far}.', 1) if hint.startswith("did you mean") else ""


def path_of(target: Any) -> str:
    """The shortest public import path that leads to ``target``. Raises SpellingError if there is none.

    >>> path_of(torch.nn.Conv2d), path_of(torch.add), path_of(getattr)
    ('torch.nn.Conv2d', 'torch.add', 'builtins.getattr')
    >>> path_of(torch.nn.functional.avg_pool2d), path_of(torch.ops.aten.add.Tensor)
    ('torch.nn.functional.avg_pool2d', 'torch.ops.aten.add.Tensor')
    >>> path_of(torch.channels_last), path_of(lambda x: x)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    SpellingError: <lambda> has no import path; define it with def or class at the top level of a module
    """
    path = str(target) if isinstance(target, _TORCH_CONSTANTS) else operator_name(target)
    if "." not in path:
        path = f"builtins.{path}"
    if _leads_to(path, target):
        return path
    name = getattr(target, "__qualname__", None) or repr(target)
    home = getattr(target, "__module__", None)
    raise SpellingError(
        f"{name}{f' (in {home})' if home else ''} has no import path",
        "define it with def or class at the top level of a module",
    )


def _leads_to(path: str, target: Any) -> bool:
    """Follow ``path`` through what is already imported; import nothing."""
    parts = path.split(".")
    if not all(_PART.fullmatch(part) for part in parts):
        return False
    for cut in range(len(parts) - 1, 0, -1):
        here: Any = sys.modules.get(".".join(parts[:cut]))
        for part in parts[cut:]:
            here = _own_attribute(here, part)
        if here is target:
            return True
    return False


def _own_attribute(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name, None)
    except Exception:  # a lazy attribute of a third party may raise anything
        return None
