"""The package: lazy sub-packages, and no class of the oracle missing."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import backquant.nn

PACKAGES = [
    "intrinsic",
    "intrinsic.qat",
    "qat",
    "qat.dynamic",
    "quantized.reference",
    "quantizable",
]


def test_sub_packages_load_when_asked_for() -> None:
    code = (
        "import sys, backquant.nn\n"
        "loaded = [m for m in sys.modules if m.startswith('backquant.nn.')]\n"
        "assert loaded == [], loaded\n"
        "backquant.nn.quantized.reference.Linear, backquant.nn.intrinsic.qat.ConvBn2d\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        backquant.nn.nothing  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES)
def test_names_of_the_oracle_exist(package: str) -> None:
    """Every class of PyTorch's package of the same name, except the lowered ones."""
    ours = importlib.import_module(f"backquant.nn.{package}")
    theirs = importlib.import_module(f"torch.ao.nn.{package}")
    names = [name for name in dir(theirs) if isinstance(getattr(theirs, name), type)]
    public = [name for name in names if not name.startswith("_")]
    assert public
    for name in public:
        cls = getattr(ours, name)
        assert cls.__name__ == name
        assert cls.__module__.startswith(f"backquant.nn.{package}")
