"""The mirror's backend configs against the installed PyTorch's, entry by entry and in order."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch.ao.quantization.backend_config.utils  # noqa: F401 (PyTorch's configs need it)

from backquant.interop import to_torch_ao

NAMES = ["executorch", "fbgemm", "native", "onednn", "qnnpack", "tensorrt", "x86"]


def _get(package: str, name: str) -> Any:
    file = "native" if "native" in name else name
    module = importlib.import_module(f"{package}.ao.quantization.backend_config.{file}")
    return getattr(module, f"get_{name}_backend_config")()


def _comparable(value: Any) -> Any:
    """Fusers are made anew by every call: what they are made of instead."""
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if getattr(value, "__closure__", None):
        cells = tuple(_comparable(cell.cell_contents) for cell in value.__closure__)
        return (value.__module__, value.__qualname__, cells)
    return value


@pytest.mark.parametrize("name", [*NAMES, "test_only_legacy_native"])
def test_word_for_word(name: str) -> None:
    theirs = _comparable(_get("torch", name).to_dict())
    ours = _comparable(
        to_torch_ao(_get("backquant", name), without=("engine", "defaults")).to_dict()
    )
    assert ours["name"] == theirs["name"]
    assert len(ours["configs"]) == len(theirs["configs"])
    for one, other in zip(ours["configs"], theirs["configs"], strict=True):
        assert one == other
