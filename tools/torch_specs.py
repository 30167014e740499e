"""PyTorch's own backend configs, as descriptions that ``conform`` tries.

What they do not say is added: the engine, and how far results may be off, both as our description of the same
engine has them. Nothing else is changed, so that what is judged is what PyTorch claims.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import backquant
from backquant.backend_config import BackendConfig, DTypeConfig, Tolerance

_ROOM = "torch.ao.quantization.backend_config"
#: By the name of PyTorch's getter: the engine whose kernels stand behind it.
ENGINES = {
    "x86": "x86",
    "onednn": "onednn",
    "fbgemm": "fbgemm",
    "qnnpack": "qnnpack",
    "native": "fbgemm",
    "executorch": "qnnpack",
    "qnnpack_pt2e": "qnnpack",
    "tensorrt": "integer_reference",
}
_MODULES = {"qnnpack_pt2e": "_qnnpack_pt2e"}


def torch_spec(name: str) -> BackendConfig:
    """PyTorch's description of this name.

    >>> len(torch_spec("x86").configs)
    192
    """
    importlib.import_module(f"{_ROOM}.utils")  # PyTorch's own getters fail without it
    module = importlib.import_module(f"{_ROOM}.{_MODULES.get(name, name)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        theirs = getattr(module, f"get_{name}_backend_config")()
        found: BackendConfig = backquant.from_torch_ao(theirs)
    stated = _Stated(backquant.get_backend_config(name))
    for entry in found.configs:
        pattern = str(entry.normal_pattern)
        entry.set_dtype_configs([stated.within(pattern, c) for c in entry.dtype_configs])
    return found.set_engine(ENGINES[name])


class _Stated:
    """The tolerances of a description: of the same pattern, else of the same dtypes."""

    def __init__(self, ours: BackendConfig) -> None:
        self._of: dict[Any, Tolerance | None] = {}
        for entry in ours.configs:
            for config in entry.dtype_configs:
                for key in _keys(str(entry.normal_pattern), config):
                    self._of.setdefault(key, config.tolerance)

    def within(self, pattern: str, config: DTypeConfig) -> DTypeConfig:
        keys = _keys(pattern, config)
        tolerance = next((self._of[key] for key in keys if key in self._of), None)
        if tolerance is None:
            return config
        return DTypeConfig.from_dict({**config.to_dict(), "tolerance": tolerance})


def _keys(pattern: str, config: DTypeConfig) -> tuple[Any, ...]:
    """From the nearest: PyTorch gives a weight dtype to some operators that have no weight."""
    dtypes = (config.input_dtype, config.output_dtype, config.is_dynamic)
    weighted = (*dtypes, config.weight_dtype)
    return ((pattern, *weighted), (pattern, *dtypes), weighted, dtypes)
