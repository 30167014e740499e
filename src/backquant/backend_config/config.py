"""A description with what can be done with it: files, checks, differences."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from backquant.backend_config.description import Description
from backquant.backend_config.installed import installed_backend, is_spec_file
from backquant.errors import BackquantError, UsageError

if TYPE_CHECKING:
    from backquant.backend_config.diff import BackendDiff
    from backquant.backend_config.validate import Finding


class BackendConfig(Description):
    """The patterns that a backend quantizes, and how each becomes a reference pattern.

    Invariants

    1. There is one entry per pattern, whichever way the pattern is spelled; a later registration
       overrides the entry and keeps its place.
    2. ``engine`` is the name of the engine that runs the lowered model; None: there is only the
       reference model.
    3. ``qdq`` are the rules of a deployment target for that reference model; None: the default rules.
    4. ``slower`` are records of what is slower on integers there, for kernels that cannot be timed here.

    Two are equal when name, engine, defaults, qdq, slower, and the entries in their order are equal.

    >>> import torch
    >>> from backquant.backend_config import BackendPatternConfig, DTypeConfig
    >>> int8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
    >>> linear = BackendPatternConfig(torch.nn.Linear).add_dtype_config(int8)
    >>> backend = BackendConfig("mine").set_backend_pattern_config(linear)
    >>> [str(config.normal_pattern) for config in backend.configs]
    ['torch.nn.Linear']
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as YAML (``.yaml``, ``.yml``) or JSON (``.json``), under a temporary name first.

        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     BackendConfig("mine").save(pathlib.Path(folder, "mine.yaml"))
        ...     BackendConfig.load(pathlib.Path(folder, "mine.yaml")).name
        'mine'
        """
        from backquant.backend_config.files.store import save_file

        save_file(self, path)

    @classmethod
    def of(cls, description: Description) -> Self:
        """A description as a ``BackendConfig``, with the same entries.

        >>> BackendConfig.of(Description("mine"))
        BackendConfig('mine', configs=[])
        """
        if isinstance(description, cls):
            return description
        made = cls()
        made.__dict__.update(vars(description))
        return made

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, allow: Iterable[str] = ()) -> Self:
        """Read a description from a YAML or JSON file.

        ``allow``: packages besides torch and backquant that the file may name classes and functions of.

        Raises ``SpecError`` with file, line and field. See ``save`` for an example.
        """
        from backquant.backend_config.files.store import load_with_places

        return cls.of(load_with_places(path, tuple(allow)).config)

    def validate(self, engine: Any = None) -> list[Finding]:
        """What is wrong with this description, as findings; ``engine`` adds checks that only it can make.

        >>> import torch
        >>> from backquant.backend_config import BackendPatternConfig
        >>> mine = BackendConfig("mine").set_backend_pattern_config(BackendPatternConfig(torch.add))
        >>> [(found.severity, found.rule) for found in mine.validate()]
        [('warning', 'no-dtype-configs')]
        """
        from backquant.backend_config.validate import validate

        return validate(self, engine)

    def diff(self, other: BackendConfig) -> BackendDiff:
        """What differs between this backend and another, by operator and field.

        >>> import torch
        >>> from backquant.backend_config import BackendPatternConfig
        >>> mine = BackendConfig("mine").set_backend_pattern_config(BackendPatternConfig(torch.add))
        >>> [(change.kind, change.pattern) for change in mine.diff(BackendConfig("mine")).entries]
        [('removed', 'torch.add')]
        """
        from backquant.backend_config.diff import diff

        return diff(self, other)


# Backends by name or file, as PyTorch's module offers them.

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
