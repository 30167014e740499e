"""PyTorch's own backend configs, as descriptions that ``conform`` tries.

What they do not say is added: the engine, and how far results may be off, both as our description of the same
engine has them. Nothing else is changed, so that what is judged is what PyTorch claims.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from torch._ops import OpOverload

import backquant
from backquant.backend_config import BackendConfig, DTypeConfig, Tolerance
from backquant.operators.equivalents import with_export_spellings

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
    "tensorrt": None,  # its rules, and no kernels
}
_MODULES = {"qnnpack_pt2e": "_qnnpack_pt2e"}
#: What a description calls itself, where that is not the name of its getter.
_OTHER_NAMES = {"qnnpack_pytorch_2.0_export": "qnnpack_pt2e"}


def torch_spec(name: str) -> BackendConfig:
    """PyTorch's description of this name; for entries in operators of exported graphs those they stand for.

    >>> len(torch_spec("x86").configs)
    192
    >>> torch.nn.Linear in [entry.pattern for entry in torch_spec("qnnpack_pt2e").configs]
    True
    """
    name = _OTHER_NAMES.get(name, name)
    importlib.import_module(f"{_ROOM}.utils")  # PyTorch's own getters fail without it
    module = importlib.import_module(f"{_ROOM}.{_MODULES.get(name, name)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        theirs = getattr(module, f"get_{name}_backend_config")()
        found: BackendConfig = backquant.from_torch_ao(theirs)
    if name == "qnnpack_pt2e":
        found = _as_called(found)
    stated = _Stated(backquant.get_backend_config(name))
    for entry in found.configs:
        pattern = str(entry.normal_pattern)
        entry.set_dtype_configs([stated.within(pattern, c) for c in entry.dtype_configs])
    return found.set_engine(ENGINES[name])


def _as_called(found: BackendConfig) -> BackendConfig:
    """Each entry in aten operators as the modules and functions that are exported to these."""
    entries = [
        entry
        for entry in with_export_spellings(found).configs
        if not any(isinstance(node.op, OpOverload) for node in entry.normal_pattern.nodes)
    ]
    return BackendConfig(found.name).set_backend_pattern_configs(entries)


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
