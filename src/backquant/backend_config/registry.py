"""Backends by name or file, as PyTorch's module offers them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backquant.backend_config.config import BackendConfig
from backquant.backend_config.installed import installed_backend, is_spec_file
from backquant.errors import BackquantError, UsageError

Backend = str | os.PathLike[str] | BackendConfig


def get_backend_config(name_or_path: str | os.PathLike[str]) -> BackendConfig:
    """The description of a backend: a new object, by name or from a file.

    A ``Path``, or a string that ends in ``.yaml``, ``.yml`` or ``.json`` or holds a path separator,
    is a file. A name is looked up among the entry points of the group ``backquant.backends``; each
    names a module with ``backend_config() -> BackendConfig``, or such a function.
    Raises ``UnknownBackendError`` with the nearest names, ``SpecError`` for a broken description.

    >>> get_backend_config("x68")
    Traceback (most recent call last):
    backquant.errors.UnknownBackendError: backend 'x68' is not supported
      where  backend='x68'
      fix    did you mean 'x86'? list_backends() names all
    """
    if is_spec_file(name_or_path):
        return BackendConfig.load(Path(name_or_path))
    return BackendConfig.of(installed_backend(str(name_or_path)))


def resolve_backend(backend: Backend, error: type[BackquantError] = UsageError) -> BackendConfig:
    """A description as it is, or by name or file; ``error`` is raised for anything else.

    >>> resolve_backend("x86").name
    'x86'
    """
    if isinstance(backend, BackendConfig):
        return backend
    if not isinstance(backend, str | os.PathLike):
        raise error(
            f"a backend of type {type(backend).__name__} is not supported: "
            "it is no name, file or BackendConfig",
            where=f"backend={backend!r}"[:80],
            fix='backend="x86"; list_backends() names all',
        )
    return get_backend_config(backend)


def _getter(name: str, words: str) -> Callable[[], BackendConfig]:
    """``get_backend_config(name)`` as a function, under the name that it has in PyTorch."""

    def get() -> BackendConfig:
        return get_backend_config(name)

    get.__name__ = get.__qualname__ = f"get_{name}_backend_config"
    get.__doc__ = (
        f"{words}\n\n    >>> {get.__name__}() == get_backend_config({name!r})\n    True\n    "
    )
    return get


get_native_backend_config = _getter(
    "native", "The union of the backends that PyTorch brings along (fbgemm, qnnpack)."
)
get_fbgemm_backend_config = _getter("fbgemm", "Server CPUs, fbgemm kernels.")
get_qnnpack_backend_config = _getter("qnnpack", "Mobile CPUs, qnnpack and xnnpack kernels.")
get_x86_backend_config = _getter("x86", "Server CPUs, the faster of fbgemm and oneDNN.")
get_onednn_backend_config = _getter("onednn", "Server CPUs, oneDNN kernels and fusions.")
get_onnxruntime_backend_config = _getter(
    "onnxruntime", "ONNX Runtime's CPU provider, by way of an ONNX file."
)
get_openvino_backend_config = _getter("openvino", "OpenVINO's CPU plugin.")
get_tensorrt_fp8_backend_config = _getter("tensorrt_fp8", "NVIDIA TensorRT, FP8 E4M3.")
get_tensorrt_backend_config = _getter("tensorrt", "TensorRT, by way of the reference model.")
get_executorch_backend_config = _getter("executorch", "ExecuTorch's CPU kernels.")
get_qnnpack_pt2e_backend_config = _getter(
    "qnnpack_pt2e", "qnnpack on graphs of aten operators, as ``torch.export`` gives them."
)


def get_native_backend_config_dict() -> dict[str, Any]:
    """``get_native_backend_config()`` as a dict.

    >>> sorted(get_native_backend_config_dict())[0]
    'configs'
    """
    return get_native_backend_config().to_dict()


def get_tensorrt_backend_config_dict() -> dict[str, Any]:
    """``get_tensorrt_backend_config()`` as a dict.

    >>> sorted(get_tensorrt_backend_config_dict())[0]
    'configs'
    """
    return get_tensorrt_backend_config().to_dict()
