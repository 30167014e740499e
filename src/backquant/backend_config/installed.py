"""Backends by name: of this package and of others, which live above this room."""

from __future__ import annotations

import importlib
import os
from copy import copy
from functools import cache
from importlib import metadata
from typing import Any

from backquant.backend_config.description import Description
from backquant.errors import SpecError, UnknownBackendError, did_you_mean

_GROUP = "backquant.backends"

#: The backends of this package; they need no installed metadata and cannot be replaced.
_BUILT_IN = (
    "native",
    "fbgemm",
    "qnnpack",
    "x86",
    "onednn",
    "tensorrt",
    "executorch",
    "qnnpack_pt2e",
    "onnxruntime",
    "openvino",
    "xnnpack",
    "inductor_x86",
    "tensorrt_fp8",
    "x86_lowbit",
    "litert",
    "litert_micro",
    "litert_16x8",
    "compressed_tensors",
    "gptq",
    "awq",
    "mlx",
    "torchao",
    "gguf",
)
_SUFFIXES = (".yaml", ".yml", ".json")


def list_backends() -> list[str]:
    """Names of all backends: those of this package, then those of other packages by name.

    >>> list_backends()[:4]
    ['native', 'fbgemm', 'qnnpack', 'x86']
    """
    return list(_targets())


def installed_backend(name: str) -> Description:
    """The description that a package offers under this name: a new object. Those of this package share their
    entries (see ``Description``).

    Raises ``UnknownBackendError`` with the nearest names, ``SpecError`` for a broken description.

    >>> installed_backend("x86").engine
    'x86'
    """
    if name in _BUILT_IN:  # what is installed is not searched
        return copy(_built_in(name))
    targets = _targets()
    if name not in targets:
        raise _unknown(name, list(targets))
    if len(targets[name]) > 1:
        raise SpecError(
            f"several installed packages offer a backend {name!r}: {', '.join(targets[name])}",
            where=f"entry points {_GROUP}",
            fix="uninstall all but one",
        )
    return _build(name, targets[name][0])


@cache
def _built_in(name: str) -> Description:
    return _build(name, _module_of(name)).shared()


def _module_of(built_in: str) -> str:
    return f"backquant.backends.{built_in}"


def _targets() -> dict[str, list[str]]:
    """Entry point values by backend name; more than one value: a conflict."""
    targets = {name: [_module_of(name)] for name in _BUILT_IN}
    found: dict[str, list[str]] = {}
    for point in metadata.entry_points(group=_GROUP):
        if point.name not in targets and point.value not in found.setdefault(point.name, []):
            found[point.name].append(point.value)
    return {**targets, **{name: sorted(found[name]) for name in sorted(found)}}


def is_spec_file(name_or_path: str | os.PathLike[str]) -> bool:
    """Whether this names a file, not a backend: by its suffix, or a path separator.

    >>> is_spec_file("x86"), is_spec_file("mine.yaml"), is_spec_file("./mine")
    (False, True, True)
    """
    if isinstance(name_or_path, os.PathLike):
        return True
    separators = [s for s in (os.sep, os.altsep, "/") if s]
    return name_or_path.endswith(_SUFFIXES) or any(s in name_or_path for s in separators)


#: What people call a backend that has another name here.
_BY_OTHER_NAMES = {
    **dict.fromkeys(("cpu", "intel", "amd", "int8", "pytorch"), "x86"),
    **dict.fromkeys(("ort", "onnx", "onnx_runtime"), "onnxruntime"),
    **dict.fromkeys(("cuda", "gpu", "trt", "nvidia"), "tensorrt"),
    **dict.fromkeys(("tflite", "tensorflow_lite"), "litert"),
    **dict.fromkeys(("arm", "mobile"), "qnnpack"),
    "ov": "openvino",
}


def _unknown(name: str, known: list[str]) -> UnknownBackendError:
    usual = _BY_OTHER_NAMES.get(name.lower())
    meant = f"did you mean {usual!r}?" if usual in known else did_you_mean(name, known, most=3)
    fix = f"{meant} list_backends() names all" if meant else f"one of {known}"
    return UnknownBackendError(
        f"backend {name!r} is not supported", where=f"backend={name!r}", fix=fix
    )


def _build(name: str, target: str) -> Description:
    """Import ``module`` or ``module:attribute`` and call it or its ``backend_config``."""
    module_name, _, attribute = target.partition(":")
    place = f"entry point {name} = {target!r}"
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise SpecError(
            f"the description of backend {name!r} cannot be imported: {error}",
            where=place,
            fix=f"python -c 'import {module_name}'",
        ) from error
    for part in attribute.split(".") if attribute else ():
        found = getattr(found, part, None)
    factory = getattr(found, "backend_config", found)
    config = factory() if callable(factory) else None
    if not isinstance(config, Description):
        raise SpecError(
            f"backend {name!r} gave {type(config).__name__}, not a BackendConfig",
            where=place,
            fix="def backend_config() -> BackendConfig: ...",
        )
    return config


# The records of operators, for rooms below them.
