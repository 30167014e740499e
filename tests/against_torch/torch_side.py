"""PyTorch's side of comparisons: its backends by name, and its default mappings with simple observers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.ao.quantization import quantize_fx  # noqa: F401 (the backend configs need it imported first)
from torch.ao.quantization.backend_config import (
    get_executorch_backend_config,
    get_fbgemm_backend_config,
    get_native_backend_config,
    get_onednn_backend_config,
    get_qnnpack_backend_config,
    get_tensorrt_backend_config,
)
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config

TORCH_BACKENDS: dict[str, Callable[[], Any]] = {
    "native": get_native_backend_config,
    "fbgemm": get_fbgemm_backend_config,
    "qnnpack": get_qnnpack_backend_config,
    "x86": get_x86_backend_config,
    "onednn": get_onednn_backend_config,
    "tensorrt": get_tensorrt_backend_config,
    "executorch": get_executorch_backend_config,
}


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings: PyTorch warns of its own deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def min_max(mapping: Any, qconfig: Any, observer: Any) -> Any:
    """A default mapping of either side with min/max observers of the same settings in place of histograms."""
    general = mapping.global_qconfig
    with quietly():
        reduced = general.activation().reduce_range
    activation = observer.with_args(reduce_range=reduced)
    mapping.set_global(qconfig(activation, general.weight))
    for target, chosen in list(mapping.object_type_qconfigs.items()):
        if chosen is not None and "Histogram" in repr(chosen.activation):
            mapping.set_object_type(target, qconfig(activation, chosen.weight))
    return mapping
