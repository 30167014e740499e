from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.ao.quantization.backend_config import utils as oracle_utils

from backquant.backend_config import (
    BackendConfig,
    entry_to_pretty_str,
    pattern_to_human_readable,
)


def test_patterns_equal_pytorchs(
    oracle: Any, to_ours: Callable[[Any], BackendConfig], translated: Callable[[Any], Any]
) -> None:
    theirs = oracle._pattern_complex_format_to_config
    ours = to_ours(oracle)._pattern_complex_format_to_config
    for our_key, their_key in zip(ours, theirs, strict=True):
        readable = oracle_utils.pattern_to_human_readable(their_key)
        assert pattern_to_human_readable(our_key) == translated(readable)


def test_every_dispatched_function_gets_its_name() -> None:
    for name in ("fractional_max_pool3d", "max_pool1d", "adaptive_max_pool2d"):
        assert pattern_to_human_readable(getattr(F, name)) == f"torch.nn.functional.{name}"
    assert pattern_to_human_readable((nn.ReLU, (F.max_pool2d, "view"))) == (
        nn.ReLU,
        ("torch.nn.functional.max_pool2d", "view"),
    )


def test_entries_equal_pytorchs(oracle: Any) -> None:
    for entry in oracle.to_dict()["configs"]:
        assert entry_to_pretty_str(entry) == oracle_utils.entry_to_pretty_str(entry)


def test_an_entry_of_ours() -> None:
    entry = {
        "pattern": (F.max_pool2d, "view"),
        "dtype_configs": [{"is_dynamic": True}, {}],
        "num_tensor_args_to_observation_type": {},
        "root_module": None,
    }
    assert entry_to_pretty_str(entry) == (
        "{\n"
        "  'pattern': ('torch.nn.functional.max_pool2d', 'view'),\n"
        "  'dtype_configs': [\n"
        "    {\n"
        "      'is_dynamic': True,\n"
        "    },\n"
        "    {\n"
        "    },\n"
        "  ],\n"
        "  'num_tensor_args_to_observation_type': {\n"
        "  },\n"
        "  'root_module': None,\n"
        "}"
    )
    assert entry_to_pretty_str(entry) == oracle_utils.entry_to_pretty_str(entry)
