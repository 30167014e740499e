from __future__ import annotations

import enum
import functools
import json
import math
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from fractions import Fraction
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from backquant.artifact.json_values import Decoder, Encoder
from backquant.artifact.tensors import TensorReader, TensorWriter
from backquant.errors import ArtifactError

CONSTANTS = [
    torch.float32,
    torch.quint8,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.strided,
    torch.channels_last,
    torch.preserve_format,
    torch.device("cpu"),
    torch.device("cuda", 1),
    torch.per_channel_symmetric,
    torch.per_tensor_affine,
    Ellipsis,
    None,
    F.relu,
    torch.tanh,
    torch.nn.LayerNorm,
]
scalars = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=8),
    st.sampled_from(CONSTANTS),
    st.builds(
        slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers()
    ),
    st.builds(range, st.integers(0, 9), st.integers(0, 9)),
)
keys = st.text(max_size=4) | st.integers() | st.booleans()
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.sets(st.integers() | st.text(max_size=3), max_size=3),
        st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal and of the same types, NaN being equal to itself and 0.0 differing from -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a.items(), b.items()))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)


@given(values)
def test_every_value_comes_back_equal_and_of_its_type(value: Any) -> None:
    writer = TensorWriter()
    text = json.dumps(Encoder(writer.add).encode(value, "here"), allow_nan=False)
    assert same(
        Decoder(TensorReader(writer.tensors, writer.strides)).decode(json.loads(text)), value
    )


def test_tensors_by_key_tied_ones_once() -> None:
    writer = TensorWriter()
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    encoded = Encoder(writer.add).encode([x, (y, x)], "here")
    assert encoded == [{"tensor": "t0"}, {"tuple": [{"tensor": "t1"}, {"tensor": "t0"}]}]
    a, (b, c) = Decoder(TensorReader(writer.tensors, writer.strides)).decode(encoded)
    assert a is c and torch.equal(a, x) and torch.equal(b, y)


def math_of_a_package(*args: Any, **keywords: Any) -> Any:
    return args, keywords


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Colour.RED,
        Text("x"),
        Path("/"),
        defaultdict(list, a=[1]),
        b"bytes",
        torch.Generator(),
        (i for i in range(2)),
        getattr,
        [1, {"x": object()}],
        lambda x: x,
        torch.nn.Linear(1, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_the_same_is_refused(value: Any) -> None:
    with pytest.raises(ArtifactError):
        Encoder(TensorWriter().add).encode(value, "fc.attribute (Linear)")


@pytest.mark.parametrize(
    "value",
    [
        {"node": "x"},
        {"tensor": "t9"},
        {"dtype": "load"},
        {"dtype": "nn"},
        {"layout": "float32"},
        {"function": "os.system"},
        {"function": "builtins.getattr"},
        {"class": "subprocess.Popen"},
        {"namedtuple": ["torch.nn.modules.linear.Linear", 1]},
        {"named": 1},
        {"__class__": 1},
        {"tuple": 1},
        {"slice": [1, 2, 3, 4]},
        {"a": 1, "b": 2},
        {},
        {"float": "x"},
        {"partial": [3, [], {"dict": []}]},
        {"partial": [{"function": "torch.relu"}, [], [1]]},
        {"partial": [{"function": "torch.relu"}, [], {"dict": [[1, 2]]}]},
        {"partial": [{"function": "os.system"}, [], {"dict": []}]},
        {"partial": [{"function": "torch.relu"}, [1], {"dict": []}]},
        {"partial": [{"function": "torch.softmax"}, [], {"dict": [["out", {"tensor": "t0"}]]}]},
        {"partial": [{"class": "torch.nn.modules.linear.Linear"}, [], {"dict": []}]},
        {"qscheme": "x"},
    ],
    ids=str,
)
def test_what_no_encoder_wrote_is_an_error(value: Any) -> None:
    """Errors of Python's own are turned into ours by ``file.readable``."""
    with pytest.raises((ArtifactError, LookupError, TypeError, ValueError)):
        Decoder(TensorReader({}, {})).decode(value)


def test_messages(snapshot: Callable[..., None]) -> None:
    encoder = Encoder(TensorWriter().add)
    for name, value in {"type": object(), "sparse": torch.eye(2).to_sparse()}.items():
        with pytest.raises(ArtifactError) as caught:
            encoder.encode(value, "fc.attribute (Linear)")
        snapshot(f"value-{name}", caught.value)
    with pytest.raises(ArtifactError) as caught:
        encoder.encode(torch.add, "fc.attribute (Linear)")
    snapshot("value-function", caught.value)
    decoder = Decoder(TensorReader({}, {}))
    contents: dict[str, Any] = {
        "tag": {"later": 1},
        "dtype": {"dtype": "float7"},
        "getattr": {"function": "builtins.getattr"},
        "namedtuple": {"namedtuple": ["torch.nn.modules.linear.Linear", 1]},
        "two-kinds": {"tuple": [], "set": []},
        "node": {"node": "relu_7"},
        "device": {"device": "file:/dev/sda"},
        "layout": {"layout": "sparse_csr"},
        "partial-of-a-text": {"partial": ["x", [], {"dict": []}]},
        "partial-by-number": {"partial": [{"function": "torch.relu"}, [], {"dict": [[1, 2]]}]},
        "partial-of-a-class": {
            "partial": [{"class": "torch.nn.modules.activation.ReLU"}, [], {"dict": []}]
        },
        "deep": functools.reduce(lambda inner, _: [inner], range(65), 1),
    }
    for name, value in contents.items():
        with pytest.raises(ArtifactError) as caught:
            decoder.decode(value)
        snapshot(f"value-{name}", caught.value)


def _plain() -> Namespace:
    return Namespace(sizes=[1, 2], act="gelu", inner=Namespace(eps=1e-6, dtype=torch.float32))


def test_an_instance_of_an_allowed_package_comes_back_as_its_attributes() -> None:
    value = [_plain(), _plain()]
    encoded = json.loads(json.dumps(Encoder(lambda _: "", allow=("argparse",)).encode(value, "x")))
    found = Decoder(TensorReader({}, {}), allow=("argparse",)).decode(encoded)
    assert found == value and type(found[0].inner) is Namespace
    with pytest.raises(ArtifactError, match="argparse"):
        Decoder(TensorReader({}, {})).decode(encoded)


def test_what_is_more_than_attributes_is_refused(snapshot: Callable[..., None]) -> None:
    with pytest.raises(ArtifactError, match='allow=\\("argparse",\\)'):
        Encoder(lambda _: "").encode(_plain(), "x")
    holds_itself = _plain()
    holds_itself.inner.outer = holds_itself
    with pytest.raises(ArtifactError) as caught:
        Encoder(lambda _: "", allow=("argparse",)).encode(holds_itself, "x")
    snapshot("instance-of-itself", caught.value)
    for value, package in (
        (Fraction(1, 2), "fractions"),
        (HTTPStatus.OK, "http"),
    ):  # slots; an enum
        with pytest.raises(ArtifactError, match="cannot be stored"):
            Encoder(lambda _: "", allow=(package,)).encode(value, "x")
        path = f"{type(value).__module__}.{type(value).__qualname__}"
        with pytest.raises(ArtifactError) as caught:
            Decoder(TensorReader({}, {}), allow=(package,)).decode(
                {"instance": [path, {"dict": []}]}
            )
        snapshot(f"instance-of-{package}", caught.value)


def _again(value: Any, *allow: str) -> Any:
    encoded = json.loads(json.dumps(Encoder(lambda _: "t0", allow).encode(value, "x")))
    return Decoder(TensorReader({}, {}), allow=allow).decode(encoded)


@pytest.mark.parametrize(
    ("value", "allow"),
    [
        (functools.partial(F.gelu, approximate="tanh"), ()),
        (functools.partial(torch.softmax, dim=-1, dtype=torch.float32), ()),
        (functools.partial(torch.nn.LayerNorm, eps=1e-6), ("timm",)),
        (functools.partial(math_of_a_package, (1, 2), scale=[3]), (__name__,)),
    ],
    ids=lambda value: "",
)
def test_a_partial_comes_back(value: Any, allow: tuple[str, ...]) -> None:
    found = _again(value, *allow)
    assert type(found) is functools.partial
    assert (found.func, found.args, found.keywords) == (value.func, value.args, value.keywords)


@pytest.mark.parametrize(
    "value",
    [
        functools.partial(print, end=""),
        functools.partial(math_of_a_package, 1),
        functools.partial(F.gelu, torch.ones(1)),
        functools.partial(torch.softmax, out=torch.ones(1)),
        functools.partial(torch.nn.LayerNorm, eps=1e-6),
        functools.partial(torch.ones(1).add, 1),
        functools.partial(torch.ops.aten.relu.default),
    ],
    ids=lambda value: "",
)
def test_a_partial_of_what_nobody_allows_is_refused(value: Any) -> None:
    with pytest.raises(ArtifactError):
        _again(value)


def test_a_partial_with_attributes_is_refused() -> None:
    value = functools.partial(F.relu)
    value.note = 1  # type: ignore[attr-defined]
    with pytest.raises(ArtifactError):
        _again(value)


def test_a_dict_has_each_key_once(snapshot: Callable[..., None]) -> None:
    """Results of a model would lose one; what is left depends on who reads."""
    for kind in ("dict", "ordered_dict"):
        for first, second in (("a", "a"), (1, True), (0, -0.0)):
            with pytest.raises(ArtifactError, match="twice") as caught:
                Decoder(TensorReader({}, {})).decode({kind: [[first, 1], [second, 2]]})
    snapshot("dict-with-a-key-twice", caught.value)


BY_HAND = {
    **dict.fromkeys(
        ["call it in forward", "artifacts hold plain", "use plain numbers"],
        lambda *_: [
            Encoder(TensorWriter().add).encode(one, "fc.attribute (Linear)")
            for one in (1, "a", (1.5, [None]), {"x": torch.eye(2)}, torch.float32)
        ],
    ),
}
