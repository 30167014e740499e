"""Objects of classes that ``torch.export`` does not know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from backquant.graph.objects import (
    Shell,
    field_index,
    fresh,
    known_to_export,
    object_classes,
    part,
    tensors_of,
)


class Layer:
    def __init__(self) -> None:
        self.keys = torch.ones(2)
        self.name = "layer"
        self.seen = {"first": True}


@dataclass(frozen=True)
class Slotted:
    __slots__ = ("layers", "scale")
    layers: list[Any]
    scale: float


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclass
class Cycle:
    values: torch.Tensor = field(default_factory=lambda: torch.ones(1))
    itself: Any = None


def test_parts_are_what_holds_tensors() -> None:
    value = Slotted([Layer(), Layer()], 2.0)
    assert object_classes((value, {"a": 1})) == {Slotted, Layer}
    assert len(tensors_of(value)) == 2
    parts, shell = Shell.of(value)
    assert shell.names == ("layers",) and shell.rest == {"scale": 2.0}
    again = shell.filled(parts)
    assert again.layers is value.layers and again.scale == 2.0


def test_a_copy_is_changed_alone() -> None:
    layer = Layer()
    copied = fresh([layer])[0]
    copied.keys, copied.seen["second"] = torch.zeros(2), True
    assert layer.keys.sum() == 2 and list(layer.seen) == ["first"]


def test_the_registration_ends() -> None:
    value = Slotted([Layer()], 2.0)
    with pytest.raises(RuntimeError, match="inside"), known_to_export({Slotted, Layer}):
        assert len(pytree.tree_leaves(value)) == 1
        raise RuntimeError("inside")
    assert pytree.tree_leaves(value) == [value]


def test_tensors_are_no_objects() -> None:
    assert object_classes((torch.ones(1), torch.nn.ReLU(), torch.float32, "text", None)) == set()


def test_cycles_end() -> None:
    value = Cycle()
    value.itself = value
    assert object_classes(value) == {Cycle}


def test_fields_of_named_tuples_have_a_number() -> None:
    pair = Pair(torch.ones(1), None)
    assert [field_index(pair, name) for name in ("first", "second", "count")] == [0, 1, None]
    assert part(pair, "first") is pair.first
    assert field_index(tuple(pair), "first") is None
