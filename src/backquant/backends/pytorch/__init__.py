"""PyTorch's own backend configs, entry by entry: what ``backquant.ao`` gives by PyTorch's names.

The files hold PyTorch's claims as they are. ``backquant.get_backend_config`` corrects those that no kernel
keeps; here they stay, and an operator without a kernel runs in the reference model's arithmetic. Engine and
defaults, which PyTorch does not write into a config, are those of the backend of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from backquant.backend_config import BackendConfig, get_backend_config

__all__ = [
    "get_executorch_backend_config",
    "get_fbgemm_backend_config",
    "get_native_backend_config",
    "get_native_backend_config_dict",
    "get_onednn_backend_config",
    "get_qnnpack_backend_config",
    "get_tensorrt_backend_config",
    "get_tensorrt_backend_config_dict",
    "get_test_only_legacy_native_backend_config",
    "get_test_only_legacy_native_backend_config_dict",
    "get_x86_backend_config",
]


def _config(file: str, like: str) -> BackendConfig:
    ours = get_backend_config(like)
    config = BackendConfig.load(str(files(__name__).joinpath(f"{file}.yaml")))
    return config.set_engine(ours.engine).set_defaults(ours.defaults)


def _dict(get: Callable[[], BackendConfig]) -> dict[str, Any]:
    return get().to_dict()


get_executorch_backend_config = functools.partial(_config, "executorch", "executorch")
get_fbgemm_backend_config = functools.partial(_config, "fbgemm", "fbgemm")
get_native_backend_config = functools.partial(_config, "native", "native")
get_onednn_backend_config = functools.partial(_config, "onednn", "onednn")
get_qnnpack_backend_config = functools.partial(_config, "qnnpack", "qnnpack")
get_tensorrt_backend_config = functools.partial(_config, "tensorrt", "tensorrt")
get_test_only_legacy_native_backend_config = functools.partial(_config, "legacy_native", "native")
get_x86_backend_config = functools.partial(_config, "x86", "x86")

get_native_backend_config_dict = functools.partial(_dict, get_native_backend_config)
get_tensorrt_backend_config_dict = functools.partial(_dict, get_tensorrt_backend_config)
get_test_only_legacy_native_backend_config_dict = functools.partial(
    _dict, get_test_only_legacy_native_backend_config
)
