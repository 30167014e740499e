"""What PyTorch's entries claim and none of its kernels keeps: our descriptions differ there, on purpose.

``docs/conformance`` has a script for each. ``as_kept`` makes of PyTorch's config what its kernels keep; a
claim listed here that PyTorch's config does not have is an error.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import backend_config as torch_backends
from torch.nn import functional as F

#: No integer kernel, in any engine: what floors gives no integers, and a resize reads undefined memory.
_NO_KERNEL: tuple[Any, ...] = (operator.floordiv, "resize_")
#: QNNPACK's transposed kernel gives wrong numbers in three dimensions.
_TRANSPOSED_3D = (
    nn.ConvTranspose3d,
    (nn.ConvTranspose3d, nn.BatchNorm3d),
    F.conv_transpose3d,
)
_ENGINES = ("x86", "onednn", "fbgemm", "qnnpack", "native")
REMOVED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*_ENGINES, "tensorrt"), _NO_KERNEL),
    "qnnpack": (*_NO_KERNEL, *_TRANSPOSED_3D),
}
#: Engines whose zero points are 0: TensorRT refuses a file that has another.
SYMMETRIC = ("tensorrt",)
#: Only modules become a dynamic linear kernel with one of these behind it.
_TAILS = tuple((F.linear, tail) for tail in (nn.LeakyReLU, F.leaky_relu, nn.Tanh, torch.tanh))
#: Uses that a kernel does not take, by the name of the operator: ours have a condition there.
CONDITIONS = {
    name: {"ConvTranspose2d", "conv_transpose2d"} for name in _ENGINES if name != "qnnpack"
}


def as_kept(name: str, config: Any) -> Any:
    """``config`` of PyTorch, changed to what the kernels behind it keep."""
    entries = config._pattern_complex_format_to_config
    for pattern in REMOVED.get(name, ()):
        found = [e for e in entries.values() if e.pattern == pattern]
        assert len(found) == 1, pattern
        [key] = [k for k, e in entries.items() if e is found[0]]
        del entries[key]
    changed = 0
    for key, shared in list(entries.items()):
        entry = entries[key] = copy.copy(shared)  # PyTorch's configs share their entries
        before = entry.dtype_configs
        entry.set_dtype_configs(_configs(name, entry.pattern, before))
        changed += entry.dtype_configs != before
    assert bool(changed) == (name in ("onednn", "qnnpack"))
    return beside_numbers(config)


def beside_numbers(config: Any) -> Any:
    """``config`` of PyTorch in which what an operator gives beside a number is observed on its own.

    PyTorch's shares the observer of what it reads, so that ``x * 0.01`` keeps a hundredth of its steps.
    """
    entries = config._pattern_complex_format_to_config
    for key, shared in list(entries.items()):
        by_count = shared._num_tensor_args_to_observation_type
        if by_count:
            entries[key] = copy.copy(shared)
            entries[key]._set_num_tensor_args_to_observation_type({**by_count, 1: by_count[2]})
    return config


def _configs(name: str, pattern: Any, configs: list[Any]) -> list[Any]:
    if name == "qnnpack":  # float16 weights: only FBGEMM has kernels for them
        return [c for c in configs if c.input_dtype != torch.float16]
    if name == "onednn" and pattern in _TAILS:
        return [c for c in configs if not c.is_dynamic]
    if name == "onednn" and configs and configs[0].input_dtype == torch.float:
        # tables of qint8 have no kernel; those that other engines have are oneDNN's, too
        others = torch_backends.get_fbgemm_backend_config().configs
        return next(e.dtype_configs for e in others if e.pattern is pattern)
    return configs
