"""The oracle (PyTorch's qconfigs), and comparisons with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as ao

# The oracle's histogram keeps its state otherwise.
HISTOGRAM = {"histogram", "upsample_rate", "dst_nbins"}


def _settings(module: Any) -> dict[str, Any]:
    """Class, plain attributes and buffers of an observer, and those of the one inside of it."""
    found: dict[str, Any] = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    found.update({k: v.tolist() for k, v in module.named_buffers(recurse=False)})
    found.update({k: _settings(child) for k, child in module.named_children()})
    found["class"] = type(module).__name__
    return {k: v for k, v in found.items() if k not in HISTOGRAM}


def _covers(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return all(k in ours and _covers(ours[k], v) for k, v in theirs.items())
    return bool(ours == theirs)


@pytest.fixture(scope="session")
def assert_same_qconfig(quietly: Callable[..., Any]) -> Callable[[Any, Any], None]:
    """Both make observers of the same class name with the same settings."""

    def check(ours: Any, theirs: Any) -> None:
        assert (ours is None) == (theirs is None)
        if ours is None:
            return
        for role in ("activation", "weight"):
            mine, other = (quietly(getattr(q, role)) for q in (ours, theirs))
            assert _covers(_settings(mine), _settings(other)), (role, mine, other)

    return check


@pytest.fixture(scope="session")
def assert_same_mapping(
    assert_same_qconfig: Callable[[Any, Any], None],
) -> Callable[[Any, Any], None]:
    """Same keys per kind, in the same order, and the same QConfig for each."""

    def check(ours: Any, theirs: Any) -> None:
        assert_same_qconfig(ours.global_qconfig, theirs.global_qconfig)
        for kind in (
            "object_type_qconfigs",
            "module_name_regex_qconfigs",
            "module_name_qconfigs",
            "module_name_object_type_order_qconfigs",
        ):
            mine, others = getattr(ours, kind), getattr(theirs, kind)
            assert list(mine) == list(others), kind
            for key, other in others.items():
                assert_same_qconfig(mine[key], other)

    return check


@pytest.fixture(scope="session")
def fbgemm_defaults() -> Any:
    """A backend's defaults that lead to PyTorch's mapping for fbgemm: a worked example."""
    from torch import nn
    from torch.nn import functional as F

    from backquant.backend_config import BackendDefaults, DefaultOverride, QuantDefault

    signed = {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric}
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    transposed += (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    return BackendDefaults(
        activation=QuantDefault("histogram", reduce_range=True),
        weight=QuantDefault(
            "per_channel_minmax", dtype=torch.qint8, qscheme=torch.per_channel_symmetric
        ),
        overrides=(
            DefaultOverride(("reshape",), QuantDefault("reuse_input"), QuantDefault("noop")),
            DefaultOverride(transposed, weight=QuantDefault("minmax", **signed)),
            DefaultOverride((F.layer_norm, nn.LayerNorm), weight=QuantDefault("placeholder")),
            DefaultOverride((nn.PReLU,), QuantDefault("histogram"), QuantDefault("minmax")),
        ),
    )


@pytest.fixture(scope="session")
def oracle(quietly: Callable[..., Any]) -> Callable[..., Any]:
    """Call one of PyTorch's functions quietly, by name."""
    return lambda name, *args, **kwargs: quietly(getattr(ao, name), *args, **kwargs)
