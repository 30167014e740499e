"""Backends by name. Descriptions live above this room and are imported when asked for."""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from pathlib import Path
from typing import Any

from backquant.backend_config.config import BackendConfig
from backquant.errors import (
    BackquantError,
    SpecError,
    UnknownBackendError,
    UsageError,
    did_you_mean,
)

Backend = str | os.PathLike[str] | BackendConfig
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
    "compressed_tensors",
    "gptq",
    "awq",
    "mlx",
    "gguf",
)
_SUFFIXES = (".yaml", ".yml", ".json")


def list_backends() -> list[str]:
    """Names of all backends: those of this package, then those of other packages by name.

    >>> list_backends()[:4]
    ['native', 'fbgemm', 'qnnpack', 'x86']
    """
    return list(_targets())


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
        from backquant.backend_config import files

        return files.load_file(Path(name_or_path))
    name = str(name_or_path)
    if name in _BUILT_IN:  # what is installed is not searched
        return _build(name, _module_of(name))
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


def get_native_backend_config() -> BackendConfig:
    """The union of the backends that PyTorch brings along (fbgemm, qnnpack).

    >>> get_native_backend_config().name
    'native'
    """
    return get_backend_config("native")


def get_native_backend_config_dict() -> dict[str, Any]:
    """``get_native_backend_config()`` as a dict.

    >>> sorted(get_native_backend_config_dict())[0]
    'configs'
    """
    return get_native_backend_config().to_dict()


def get_fbgemm_backend_config() -> BackendConfig:
    """Server CPUs, fbgemm kernels.

    >>> get_fbgemm_backend_config().name
    'fbgemm'
    """
    return get_backend_config("fbgemm")


def get_qnnpack_backend_config() -> BackendConfig:
    """Mobile CPUs, qnnpack and xnnpack kernels.

    >>> get_qnnpack_backend_config().name
    'qnnpack'
    """
    return get_backend_config("qnnpack")


def get_x86_backend_config() -> BackendConfig:
    """Server CPUs, the faster of fbgemm and oneDNN.

    >>> get_x86_backend_config().name
    'x86'
    """
    return get_backend_config("x86")


def get_onednn_backend_config() -> BackendConfig:
    """Server CPUs, oneDNN kernels and fusions.

    >>> get_onednn_backend_config().name
    'onednn'
    """
    return get_backend_config("onednn")


def get_onnxruntime_backend_config() -> BackendConfig:
    """ONNX Runtime's CPU provider, by way of an ONNX file.

    >>> get_onnxruntime_backend_config().name
    'onnxruntime'
    """
    return get_backend_config("onnxruntime")


def get_openvino_backend_config() -> BackendConfig:
    """OpenVINO's CPU plugin.

    >>> get_openvino_backend_config().name
    'openvino'
    """
    return get_backend_config("openvino")


def get_tensorrt_fp8_backend_config() -> BackendConfig:
    """NVIDIA TensorRT, FP8 E4M3.

    >>> get_tensorrt_fp8_backend_config().name
    'tensorrt_fp8'
    """
    return get_backend_config("tensorrt_fp8")


def get_tensorrt_backend_config() -> BackendConfig:
    """TensorRT, by way of the reference model.

    >>> get_tensorrt_backend_config().name
    'tensorrt'
    """
    return get_backend_config("tensorrt")


def get_tensorrt_backend_config_dict() -> dict[str, Any]:
    """``get_tensorrt_backend_config()`` as a dict.

    >>> sorted(get_tensorrt_backend_config_dict())[0]
    'configs'
    """
    return get_tensorrt_backend_config().to_dict()


def get_executorch_backend_config() -> BackendConfig:
    """ExecuTorch's CPU kernels.

    >>> get_executorch_backend_config().name
    'executorch'
    """
    return get_backend_config("executorch")


def get_qnnpack_pt2e_backend_config() -> BackendConfig:
    """qnnpack on graphs of aten operators, as ``torch.export`` gives them.

    >>> get_qnnpack_pt2e_backend_config().name
    'qnnpack_pytorch_2.0_export'
    """
    return get_backend_config("qnnpack_pt2e")


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

    >>> is_spec_file("x86"), is_spec_file("mine.yaml"), is_spec_file(Path("mine"))
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


def _build(name: str, target: str) -> BackendConfig:
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
    if not isinstance(config, BackendConfig):
        raise SpecError(
            f"backend {name!r} gave {type(config).__name__}, not a BackendConfig",
            where=place,
            fix="def backend_config() -> BackendConfig: ...",
        )
    return config
