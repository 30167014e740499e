from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as ao

from backquant import observe
from backquant.observe import defaults

# The range of a histogram is our own: see test_histogram.py.
ROUNDING = [n for n in defaults.__all__ if "fake_quant" in n and "histogram" not in n]
HISTOGRAM = {"histogram", "upsample_rate", "dst_nbins"}


def settings(module: Any) -> dict[str, Any]:
    """Plain attributes and buffers of an observer, with those of the observer inside of it."""
    found = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    found.update({k: v.tolist() for k, v in module.named_buffers(recurse=False)})
    for name, child in module.named_children():
        found[name] = (type(child).__name__, settings(child))
    return {k: v for k, v in found.items() if k not in HISTOGRAM}


@pytest.mark.parametrize("name", defaults.__all__)
def test_defaults_make_what_the_oracle_makes(name: str, oracle: Callable[..., Any]) -> None:
    ours, theirs = getattr(observe, name)(), oracle(name)
    assert type(ours).__name__ == type(theirs).__name__
    mine = settings(ours)
    for key, value in settings(theirs).items():
        if isinstance(value, tuple) and isinstance(value[1], dict):
            assert mine[key][0] == value[0]
            assert value[1].items() <= mine[key][1].items()
        else:
            assert mine[key] == value, key


def test_every_default_of_the_oracle_is_here() -> None:
    names = {*ao.observer.__all__, *ao.fake_quantize.__all__}
    wanted = {n for n in names if "default" in n or "range_neg" in n}
    assert wanted == set(defaults.__all__)


@pytest.mark.parametrize("name", ROUNDING)
def test_default_fake_quantizers_round_as_the_oracle(name: str, oracle: Callable[..., Any]) -> None:
    ours, theirs = getattr(observe, name)(), oracle(name)
    for step in range(3):
        x = torch.randn(4, 6) * (step + 1)
        assert torch.equal(ours(x), theirs(x))
