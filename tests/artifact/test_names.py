from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backquant.artifact import labels
from backquant.errors import ArtifactError
from backquant.identifiers import label

INJECTIONS = [
    "x; import os",
    'a"), __import__("os").system("id',
    "a\nimport os",
    "a'",
    "a\\",
    "__class__",
    "",
    "x=1",
    "x: int",
    "lambda",
]


@pytest.mark.parametrize(
    "name", ["view", "size", "contiguous", "softmax", "add_", "__getitem__", "get", "to"]
)
def test_methods_of_tensors_may_be_called(name: str) -> None:
    assert labels.check_method(name, "") == name


@pytest.mark.parametrize(
    "name",
    [
        *INJECTIONS,
        "__subclasses__",
        "__reduce_ex__",
        "__init__",
        "__call__",
        "__getattribute__",
        "numpy",
        "tofile",
        "dump",
        "system",
        "register_hook",
        "apply_",
        "map_",
        "storage",
        "untyped_storage",
        "set_",
        "backward",
        "format",
        "mro",
    ],
)
def test_other_methods_may_not(name: str) -> None:
    with pytest.raises(ArtifactError):
        labels.check_method(name, "node x")


def test_attributes_are_data(snapshot: Callable[..., None]) -> None:
    for name in ("shape", "dtype", "T", "ndim", "values", "indices", "device", "real"):
        assert labels.check_attribute(name, "") == name
    bad: list[Any] = [
        *INJECTIONS,
        "grad_fn",
        "__dict__",
        "_backward_hooks",
        "forward",
        "volatile",
        3,
        None,
    ]
    for name in bad:
        with pytest.raises(ArtifactError):
            labels.check_attribute(name, "")
    x = torch.zeros(2, 3)
    assert all(hasattr(x, n) for n in ("shape", "dtype", "T", "real"))


@pytest.mark.parametrize(
    "path", ["fc", "layers.0.weight", "block-1.conv", "a b.c", "_lifted_tensor_0", "Größe"]
)
def test_paths_of_real_models(path: str) -> None:
    found = labels.check_path(path, "")
    assert found.isascii() and label(found) == path


@pytest.mark.parametrize(
    "path", ['a"b', "a'b", "a\\b", "a..b", "", ".a", "a.", "a\nb", "a.__class__", "{a}"]
)
def test_paths_that_could_leave_a_string(path: str) -> None:
    with pytest.raises(ArtifactError):
        labels.check_path(path, "")


def test_arguments() -> None:
    for name in ("x", "*args", "**kwargs", "input_1"):
        assert labels.check_argument(name, "") == name
    for name in (*INJECTIONS, "***x", "x=__import__('os')"):
        with pytest.raises(ArtifactError):
            labels.check_argument(name, "")


def test_messages(snapshot: Callable[..., None]) -> None:
    checks: dict[str, Callable[[], object]] = {
        "method": lambda: labels.check_method("numpy", "node numpy"),
        "attribute": lambda: labels.check_attribute("grad_fn", "node getattr_1"),
        "path": lambda: labels.check_path('a"b', "node a_b"),
        "argument": lambda: labels.check_argument("x; y", "node x"),
    }
    for name, check in checks.items():
        with pytest.raises(ArtifactError) as caught:
            check()
        snapshot(f"name-{name}", caught.value)


BY_HAND = {
    "pass tensors": lambda *_: labels.check_attribute("shape", "node getattr_1"),
    "call a function": lambda *_: labels.check_method("relu", "node relu"),
    "rename the module": lambda *_: labels.check_path("a.b", "node a_b"),
}
