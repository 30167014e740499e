from __future__ import annotations

import json
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from backquant.artifact.json_values import Decoder, Encoder
from backquant.artifact.manifest import _OBJECTS, Value

ADAPTER: TypeAdapter[Any] = TypeAdapter(Value)
VALUES = [
    None, True, 3, -0.5, "a", [1], (1, (2,)), torch.Size([2, 3]), {"a": 1, 2: (3,)}, OrderedDict(a=1),
    {1, 2}, slice(0, None, 2), range(3), float("inf"), complex(1, float("nan")), torch.int8,
    torch.device("cpu"), torch.strided, torch.channels_last, torch.per_tensor_affine, torch.relu,
    torch.nn.ReLU, Ellipsis, torch.ones(2),
    partial(torch.relu, a=None),
]  # fmt: skip


def _name(value: Any) -> str:
    """Without an address: every process that runs tests has to find the same names."""
    if isinstance(value, partial):
        return f"partial of {_name(value.func)}"
    return getattr(value, "__name__", repr(value))


@pytest.mark.parametrize("value", VALUES, ids=_name)
def test_what_is_written_passes(value: Any) -> None:
    written = json.dumps(Encoder(lambda _: "t0").encode(value, "here"))
    ADAPTER.validate_json(written)


def test_every_kind_that_is_read_is_in_the_schema() -> None:
    read = {name.removeprefix("_read_") for name in vars(Decoder) if name.startswith("_read_")}
    assert read == set(_OBJECTS)


@pytest.mark.parametrize(
    "text",
    [
        '{"tuple": 1}',
        '{"path": "a"}',
        '{"slice": [1]}',
        '{"range": [0, 1.5, 1]}',
        "NaN",
        str(1 << 64),
    ],
)
def test_anything_else_does_not(text: str) -> None:
    with pytest.raises(ValidationError):
        ADAPTER.validate_json(text)
