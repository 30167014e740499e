"""``MODEL`` and ``--inputs`` on the command line: a factory by import path, example inputs by shape.

``module:name`` names a module (the current folder is searched first) and in it a model, a pair
``(model, example_inputs)``, or a function or class that makes one of these without arguments. A name that
ends in ``.pt2`` is that of a file with an exported program.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backquant.backend_config import BackendConfig, get_backend_config
from backquant.backend_config.installed import is_spec_file
from backquant.backend_config.validate import Finding
from backquant.errors import BackquantError, UsageError, did_you_mean
from backquant.graph.export import load_exported

_IMPORTLIB = str(Path(importlib.__file__).parent)


def import_object(text: str, what: str) -> Any:
    """The object that ``package.module:name`` names; ``what`` is the argument it was given as.

    Raises ``UsageError`` for text of another form, a module that does not exist or fails to import,
    and a name that it has not.

    >>> import_object("math:pi", "MODEL")
    3.141592653589793
    """
    module_name, separator, name = text.partition(":")
    if not separator or not module_name or not name:
        raise UsageError(
            f"{text!r} is not of the form module:name",
            where=what,
            fix=f"write {what} as package.module:name, e.g. mymodels:make_resnet",
        )
    target = _import(module_name, f"{what} {text}")
    for part in name.split("."):
        if not hasattr(target, part):
            raise UsageError(
                f"{module_name!r} has no {part!r}", where=f"{what} {text}", fix=_has(target, part)
            )
        target = getattr(target, part)
    return target


def _import(module_name: str, where: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _failed(f"the module {module_name!r} fails to import", where, error) from error
        raise UsageError(
            f"there is no module {error.name!r}", where=where, fix=_spelled(module_name)
        ) from error
    except Exception as error:
        raise _failed(f"the module {module_name!r} fails to import", where, error) from error


def _spelled(module_name: str) -> str:
    if module_name.endswith(".py") or "/" in module_name:
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        return f"name the module, not its file: {dotted}:name"
    return f"run from the folder that holds {module_name.split('.', maxsplit=1)[0]}, or install it"


def _has(target: Any, wanted: str) -> str:
    public = sorted(name for name in dir(target) if not name.startswith("_"))
    has = "it has: " + ", ".join(public[:12]) + (", …" if len(public) > 12 else "")
    return did_you_mean(wanted, public, has, most=3)


def _failed(what: str, where: str, error: Exception) -> UsageError:
    """The error for a failure in the user's own code, with the line where it happened."""
    if isinstance(error, SyntaxError):
        line = f"{error.filename}:{error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if not f.filename.startswith(("<", _IMPORTLIB, __file__))]
        line = f"{own[-1].filename}:{own[-1].lineno}" if own else ""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return UsageError(
        f"{what}: {reason}",
        where=f"{where}, {line}" if line else where,
        fix="repair that line first",
    )


def load_model(text: str) -> tuple[nn.Module, Any]:
    """The model that ``MODEL`` names, and its example inputs (None where it gives none).

    Raises ``UsageError`` for anything that is or makes no ``nn.Module``, ``CaptureError`` for a file that
    holds no exported program.
    """
    if text.endswith(".pt2"):
        return load_exported(text), None
    found = import_object(text, "MODEL")
    made = found if isinstance(found, nn.Module | tuple) else call(found, text, "MODEL")
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{text} gives {type(model).__name__}, not an nn.Module",
            where=f"MODEL {text}",
            fix="return model, or (model, example_inputs)",
        )
    return model, inputs


def call(factory: Any, text: str, what: str) -> Any:
    """What ``factory`` makes. Raises ``UsageError`` when it cannot be called without arguments."""
    fix = "name a function or class without required arguments"
    if not callable(factory):
        kind = type(factory).__name__
        raise UsageError(
            f"{text} is a {kind}, and cannot be called", where=f"{what} {text}", fix=fix
        )
    if needed := _required(factory):
        raise UsageError(
            f"{text} needs arguments: {', '.join(needed)}", where=f"{what} {text}", fix=fix
        )
    try:
        return factory()
    except BackquantError:
        raise
    except Exception as error:
        raise _failed(f"{text} cannot be called", f"{what} {text}", error) from error


def _required(factory: Any) -> list[str]:
    """Arguments that a call must give."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def parse_inputs(texts: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Example tensors of the given shapes and dtypes, one per positional argument.

    Floating point values are random (with a fixed seed); integers are zero, which any embedding has.
    Raises ``UsageError`` for text of another form.

    >>> [tuple(t.shape) for t in parse_inputs(["1,3,8,8:float32", "2,5:int64"])]
    [(1, 3, 8, 8), (2, 5)]
    """
    return tuple(_parse_input(text) for text in texts)


def _parse_input(text: str) -> torch.Tensor:
    shape_text, _, dtype_text = text.partition(":")
    dtype = getattr(torch, dtype_text or "float32", None)
    sizes = shape_text.strip("()[] ").split(",") if shape_text else []
    if not isinstance(dtype, torch.dtype) or not all(size.strip().isdecimal() for size in sizes):
        raise UsageError(
            f"{text!r} is not a shape with a dtype",
            where="--inputs",
            fix="--inputs 1,3,224,224:float32   # sizes, a colon, a dtype of torch",
        )
    shape = tuple(map(int, sizes))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.zeros(shape, dtype=dtype)


def parse_requirement(texts: list[str] | None) -> float | tuple[str, ...] | None:
    """A share when one number is given, else module names."""
    if not texts:
        return None
    shares = [share for share in map(_number, texts) if share is not None]
    if shares and len(texts) > 1:
        raise UsageError(
            "a share of multiply-adds cannot be combined with module names or another share",
            where="--require " + " --require ".join(texts),
            fix=f"--require {shares[0]:g}   # or paths of modules only",
        )
    return shares[0] if shares else tuple(texts)


def parse_weights(text: str | None) -> str | dict[str, str | None] | None:
    """A dtype, or dtypes by path: those with "=" are of the named module, the one without of all others.

    >>> parse_weights("int4"), parse_weights("int8,embeddings=int4:64,head=float32")
    ('int4', {'': 'int8', 'embeddings': 'int4:64', 'head': None})
    """
    if text is None or "=" not in text:
        return text
    found: dict[str, str | None] = {}
    for part in text.split(","):
        path, _, dtype = part.strip().rpartition("=")
        found[path.strip()] = None if dtype.strip() == "float32" else dtype.strip()
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# ``BACKEND`` on the command line: a name or a file.


def load_backend(backend: str, allow: Sequence[str] | None = None) -> BackendConfig:
    """The description that ``BACKEND`` names; ``allow``: packages that a file may name classes from.

    >>> load_backend("x86").name
    'x86'
    """
    if is_spec_file(backend):
        return BackendConfig.load(backend, allow=tuple(allow or ()))
    return get_backend_config(backend)


def sound_backend(backend: str, allow: Sequence[str] | None = None) -> BackendConfig:
    """As ``load_backend``; raises ``SpecError`` for a file in which ``check`` finds an error.

    >>> sound_backend("x86").name
    'x86'
    """
    from backquant.api.arguments import sound_file

    if is_spec_file(backend):
        return sound_file(backend, tuple(allow or ()))
    return get_backend_config(backend)


def findings(backend: str, allow: Sequence[str] | None = None) -> list[Finding]:
    """Everything there is to say about a description, what only its engine knows included.

    Raises ``SpecError`` when there is no such file, ``UnknownBackendError`` when no such backend.

    >>> {finding.severity for finding in findings("x86")} <= {"note", "warning"}
    True
    """
    from backquant.api.arguments import description_findings, file_findings

    if is_spec_file(backend):
        return file_findings(backend, tuple(allow or ()))
    return description_findings(get_backend_config(backend))
