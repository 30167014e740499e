"""Functions as text, and back: only what a graph of tensor operators calls.

A file names functions, and loading it must not run anything else. These are admitted, each found by
looking it up, never by importing what a file asks for:

1. Functions of torch (and their bindings), ``torch.nn.functional``, ``torch.linalg``, ``torch.fft`` and
   ``torch.special``, and ``torch.ops.aten`` operators, whose names are in the table of
   ``backquant.artifact.operators``.
2. ``torch.ops.quantized_decomposed``: what reference models are made of.
3. The operators of ``operator`` that ``torch.fx`` records, functions of ``math``, a few builtins.
4. The functions of ``backquant.lower.kernels`` that lowering writes into graphs (``kernels.FUNCTIONS``), and
   the few of other rooms that capture and conversion write.
5. With ``allow=("package",)``: functions and classes *defined* in that package (what it merely imports
   is not), and ``torch.ops.package``. With ``allow=("torch.linalg.svd",)``: that function of torch.

Names in ``_DENIED`` touch files or foreign memory and are refused in every case.
"""

from __future__ import annotations

import builtins
import importlib
import math
import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import get_overridable_functions

from backquant.artifact import kernels
from backquant.artifact.operators import is_admitted
from backquant.errors import ArtifactError
from backquant.graph import (
    is_of_tensors,
    register_quantized_decomposed,
)

# of our own namespace
_OWN_OPS = (
    "quantize_float8",
    "dequantize_float8",
    "quantize_rounded",
    "requantize",
    "quantize_blocks",
    "dequantize_blocks",
    "grouped_linear",
)
OP_NAMESPACES = ("aten", "quantized_decomposed")

_DENIED = frozenset({"from_file", "save", "load", "frombuffer", "from_numpy", "set_"})
_MATH = (
    "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp expm1 fabs floor "
    "fmod gamma gcd hypot isclose isfinite isinf isnan isqrt lcm ldexp lgamma log log10 log1p log2 modf "
    "pow prod radians remainder sin sinh sqrt tan tanh trunc"
)
# Functions of backquant, beside kernels, that capture and conversion write into graphs.
_OWN = frozenset(
    {
        "backquant.convert.custom_modules.dequantize_all",
        "backquant.graph.in_place.put",
        "backquant.graph.objects.part",
    }
)
_words = re.compile(r"\w+").findall
_OPERATORS = _words(
    "abs add and_ concat contains eq floordiv ge getitem gt iadd iand ifloordiv ilshift imatmul imod "
    "imul index inv invert ior ipow irshift is_ is_not isub itruediv ixor le lshift lt matmul mod mul "
    "ne neg not_ or_ pos pow rshift setitem sub truediv truth xor"
)
_BUILTINS = _words(
    "abs bool complex divmod float getattr int len list max min pow range round slice sum tuple"
)
# (prefix of paths, module), nearest spelling first
_HOMES: tuple[tuple[str, Any], ...] = (
    ("torch", torch),
    ("torch.nn.functional", torch.nn.functional),
    ("torch.linalg", torch.linalg),
    ("torch.fft", torch.fft),
    ("torch.special", torch.special),
    *(
        (f"torch._C.{name}", getattr(torch._C, name))
        for name in _words("_nn _linalg _fft _special")
    ),
)
_OVERRIDABLE = (
    torch,
    torch.functional,
    torch.nn.functional,
    torch.linalg,
    torch.fft,
    torch.special,
)


# Python functions of torch that take tensors or a list of them. A trace follows a list into the binding.
_OF_LISTS = _words(
    "atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors cartesian_prod chain_matmul einsum "
    "meshgrid"
)
_PACKING = ("pack_padded_sequence", "pad_packed_sequence", "pack_sequence", "pad_sequence")
_ALSO = frozenset(f"torch.nn.utils.rnn.{name}" for name in _PACKING)


@cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Every function of rules 2 and 3 by its path."""
    table = {f"operator.{name}": getattr(operator, name) for name in _OPERATORS}
    table |= {f"builtins.{name}": getattr(builtins, name) for name in _BUILTINS}
    table |= {
        f"math.{name}": value
        for name, value in vars(math).items()
        if isinstance(value, BuiltinFunctionType) and name in _words(_MATH)
    }
    for path, function in _all_torch_functions().items():
        if is_admitted(path.rpartition(".")[2]) or path in _ALSO:
            table[path] = function
    return table


@cache
def _all_torch_functions() -> dict[str, Callable[..., Any]]:
    """Every function of torch that takes tensors, those that only ``allow`` admits among them."""
    return dict(_torch_functions())


def _torch_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    dispatched = get_overridable_functions()
    tensor_functions = {f for home in _OVERRIDABLE for f in dispatched.get(home, ())}
    for prefix, home in _HOMES:
        for name, found in vars(home).items():
            value = _of_torch(found, name) if home is torch else found
            if name.startswith("_") or name in _DENIED or isinstance(value, type):
                continue
            if not isinstance(value, FunctionType | BuiltinFunctionType):
                continue
            in_c = isinstance(value, BuiltinFunctionType) and prefix.startswith("torch._C.")
            functional = value.__module__ == prefix == "torch.nn.functional"
            if in_c or functional or value in tensor_functions or _is_native(value, name):
                yield f"{prefix}.{name}", value
    bindings = torch._C._VariableFunctions
    yield from (
        (f"torch._C._VariableFunctions.{name}", getattr(bindings, name)) for name in _OF_LISTS
    )
    yield "torch._assert", torch._assert
    for name in _PACKING:
        yield f"torch.nn.utils.rnn.{name}", getattr(torch.nn.utils.rnn, name)


def _is_native(value: Any, name: str) -> bool:
    """Whether ``value`` is the generated binding ``torch._C._VariableFunctions.<name>``."""
    return bool(getattr(torch._C._VariableFunctions, name, None) == value)


def _of_torch(value: Any, name: str) -> Any:
    """``torch.<name>`` as torch defines it, where another package put its own in its place."""
    home = (getattr(value, "__module__", None) or "torch").partition(".")[0]
    native = getattr(torch._C._VariableFunctions, name, None)
    return value if native is None or home == "torch" else native


def _replaced() -> Iterator[tuple[Callable[..., Any], str]]:
    """What other packages put in the place of torch's functions, and the paths of these."""
    for name, value in vars(torch).items():
        if _of_torch(value, name) is not value:
            yield value, f"torch.{name}"


@cache
def _paths() -> dict[Callable[..., Any], str]:
    """The first path of every function, by the function."""
    paths: dict[Callable[..., Any], str] = {}
    for path, function in (*_functions().items(), *_all_torch_functions().items()):
        paths.setdefault(function, path)
    for function, path in _replaced():
        paths.setdefault(function, path)
    return paths


def function_path(function: Callable[..., Any], allow: Sequence[str] = ()) -> str:
    """The path under which ``find_function`` finds this very function again.

    Raises ``ArtifactError`` naming a function that has none (a lambda, a closure, a user's own).

    >>> function_path(operator.add), function_path(torch.nn.functional.relu)
    ('operator.add', 'torch.nn.functional.relu')
    >>> function_path(torch.ops.aten.relu.default)
    'torch.ops.aten.relu.default'
    """
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        path = f"torch.ops.{function}"
        find_function(path, allow)
        return path
    if isinstance(function, FunctionType | BuiltinFunctionType | type) and function in _paths():
        path = _paths()[function]
        find_function(path, allow)
        return path
    home = getattr(function, "__module__", None) or "?"
    path = f"{home}.{getattr(function, '__qualname__', type(function).__name__)}"
    try:
        if find_function(path, allow) is function:
            return path
    except ArtifactError:
        pass
    kind = "class" if isinstance(function, type) else "function"
    raise ArtifactError(
        f"the {kind} {path} cannot be stored: a file loads without your code",
        where=path,
        fix=_save_fix(path.split(".", maxsplit=1)[0], "<" in path),
    )


def _save_fix(package: str, is_local: bool) -> str:
    fix = "express it with torch operators, or keep the model in memory"
    if is_local or package in ("torch", "?", "__main__", *sys.stdlib_module_names):
        return fix
    return f'{fix}, or pass allow=("{package}",) to save and to load'


def find_function(path: str, allow: Sequence[str] = ()) -> Any:
    """The function at ``path``; see the rules above. Raises ``ArtifactError`` for anything else.

    >>> find_function("torch.nn.functional.relu") is torch.nn.functional.relu
    True
    >>> find_function("torch.os.system")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: 'torch.os.system' is no function that an artifact may name
      where  torch.os.system
      fix    do not load this file: no graph of tensor operators calls it
    """
    known = _functions().get(path)
    if known is None and path in allow:
        known = _all_torch_functions().get(path)
    if known is not None:
        return known
    if path.startswith("torch.ops."):
        return _find_op(path, allow)
    if path in kernels.FUNCTIONS or path in _OWN:
        return find_defined(path, "function")
    if path.startswith(f"{kernels.PACKAGE}."):
        raise _no_kernel(path)
    if is_within(path, allow):
        return find_defined(path, "function")
    raise stranger(path, "function")


def _find_op(path: str, allow: Sequence[str]) -> Any:
    parts = path.split(".")[2:]
    namespaces = (*OP_NAMESPACES, *(name for name in allow if name != "aten"))
    own = parts[:1] == ["backquant"] and "".join(parts[1:2]) in _OWN_OPS
    known = own or parts[0] in namespaces
    if parts[0] == "aten" and len(parts) > 1:
        known = is_admitted(*parts[1:3]) or path in allow
    if len(parts) not in (2, 3) or not known or parts[1] in _DENIED:
        asked = path if parts[0] in ("aten", "quantized", "onednn") else parts[0]
        raise ArtifactError(
            f"{path!r} is no operator that an artifact may name",
            where=path,
            fix=f'allow=("{asked}",)   # to save and to load, if you trust the file: an operator\n'
            "may read and write memory that is not its arguments'",
        )
    if parts[0] == "quantized_decomposed":
        register_quantized_decomposed()
    target = _registered(parts)
    if target is None and allow:
        _import_allowed(allow)
        target = _registered(parts)
    if not isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        raise ArtifactError(
            f"this build of torch has no operator {path}",
            where=path,
            fix="load the file with the torch version that its header names",
        )
    if parts[0] == "aten" and path not in allow and not _is_of_tensors(target):
        raise ArtifactError(
            f"{path!r} computes numbers of Python, or may",
            where=path,
            fix="functions of operator and math compute those",
        )
    return target


def _is_of_tensors(target: OpOverload | OpOverloadPacket) -> bool:
    """Whether it is an operator of tensors; of a packet, whose overload is chosen at the call, see ``total``.
    Its ``prim_`` overloads take a number for a dtype, and end the process."""
    if isinstance(target, OpOverload):
        return is_of_tensors(target)
    return not any(name.startswith("prim_") for name in target.overloads())


def _registered(parts: Sequence[str]) -> Any:
    target: Any = torch.ops
    for part in parts:
        target = getattr(target, part, None)
    return target


def _import_allowed(allow: Sequence[str]) -> None:
    """Packages register operators while they are imported; names that are no packages are left out."""
    for name in allow:
        package = name.partition(".")[0]
        if package in sys.modules or find_spec(package) is not None:  # a script has no spec
            with suppress(ModuleNotFoundError):
                importlib.import_module(name)


def _no_kernel(path: str) -> ArtifactError:
    return ArtifactError(
        f"this version of backquant has no kernel {path}",
        where=path,
        fix="load the file with the version of backquant that its header names",
    )


def is_within(path: str, packages: Sequence[str]) -> bool:
    """Whether ``path`` lies in one of ``packages`` (dotted names).

    >>> is_within("mylib.layers.act", ["mylib"]), is_within("mylibrary.act", ["mylib"])
    (True, False)
    """
    return any(path.startswith(package + ".") for package in packages)


def find_defined(path: str, kind: str) -> Any:
    """The object that its own ``__module__`` and ``__qualname__`` place at ``path``.

    What a module only imports from elsewhere has another ``__module__`` and is not found.
    """
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name + ".").startswith(error.name + "."):
                continue
            raise ArtifactError(
                f"{module_name} cannot be imported: {error}",
                where=path,
                fix="install what it needs",
            ) from error
        for part in parts[split:]:
            found = getattr(found, part, None)
        home = (getattr(found, "__module__", None), getattr(found, "__qualname__", None))
        if home == (module_name, ".".join(parts[split:])):
            return found
        break
    raise ArtifactError(
        f"there is no {kind} {path}",
        where=path,
        fix="load the file with the versions of the packages that wrote it",
    )


def stranger(path: str, kind: str) -> ArtifactError:
    """The error for a path outside of what an artifact may name."""
    package = path.split(".", maxsplit=1)[0]
    if path in _all_torch_functions():
        return ArtifactError(
            f"{path!r} is no {kind} that an artifact may name",
            where=path,
            fix=f'allow=("{path}",)   # to save and to load, if you trust the file: not all of torch\'s '
            "functions\ncheck what they read and write",
        )
    if package in ("torch", "backquant", *sys.stdlib_module_names):
        fix = "do not load this file: no graph of tensor operators calls it"
    else:
        fix = f'allow=("{package}",)   # if you trust the file'
    return ArtifactError(f"{path!r} is no {kind} that an artifact may name", where=path, fix=fix)
