"""Known holes: what a crafted file could read, write or stop before its calls were checked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.artifact.file import manifest_text, packed, read_file
from backquant.artifact.kernels import check_tensors
from backquant.artifact.operators import check_call
from backquant.errors import ArtifactError, InputError
from backquant.lower.kernels.configured import KernelModule
from backquant.runtime import QuantizedModel

Document = dict[str, Any]
NODE = {"node": "x"}
ATEN, OURS = "torch.ops.aten", "backquant.lower.kernels"
QDQ = "torch.ops.quantized_decomposed"
BYTES = [0, 0, 255, {"dtype": "uint8"}]
FUNCTIONS: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "memory is read": ("torch.ops.aten._reshape_alias.default", [NODE, [1 << 20], [1]], {}),
    "memory is read by a view": ("torch.as_strided", [NODE, [1 << 20], [1]], {}),
    "memory is written": (f"{ATEN}.set_.source_Tensor_storage_offset", [NODE, NODE, 64, [8], [1]], {}),
    "memory that nobody wrote": ("torch.empty", [[1 << 20]], {}),
    "a view of integers": ("backquant.lower.kernels.views.integer_view", [NODE], {}),
    "unchecked indices": ("torch.ops.aten._unsafe_index.Tensor", [NODE, [NODE]], {}),
    "unchecked statistics": ("torch.native_batch_norm", [NODE, None, None, NODE, NODE, False, 0.1, 0.1], {}),
    "repeats that overflow": ("torch.repeat_interleave", [NODE, NODE], {}),
    "repeats by themselves": ("torch.ops.aten.repeat_interleave.Tensor", [NODE], {}),
    "indices that overflow": ("torch.tril_indices", [1 << 33, 1 << 31], {}),
    "a window that overflows": ("torch.nn.functional.max_pool2d", [NODE, 3, 1, 0, 1 << 62], {}),
    "a window that is computed": ("torch.nn.functional.unfold", [NODE, 3, NODE], {}),
    "a padding that never ends": ("torch.nn.functional.fold", [NODE, [8, 8], 3, 1, 1 << 31], {}),
    "a scale of nothing": (f"{ATEN}.upsample_bilinear2d.default", [NODE, [8, 8], False, 1e-300, 1e-300], {}),
    "a trap of the processor": ("torch.div", [NODE, -1], {"rounding_mode": "trunc"}),
    "results into an argument": ("torch.add", [NODE, NODE], {"out": NODE}),
    "a callback": ("builtins.max", [NODE], {"key": NODE}),
    "pooling of a kernel": (f"{OURS}.pooling.max_pool2d", [NODE, [3], [1], [0], [1 << 62], False], {}),
    "a scale of a kernel": (f"{OURS}.boundary.quantize", [NODE, 0.0, *BYTES], {}),
    "a number that is computed": (f"{OURS}.boundary.quantize", [NODE, NODE, *BYTES], {}),
    "a dtype that there is not": (f"{ATEN}._to_copy.default", [NODE], {"dtype": 64}),
    "a dtype by its place": (f"{QDQ}.dequantize_per_tensor.default", [NODE, 1.0, 0, 0, 9, 64], {}),
    "a dtype of any overload": (f"{ATEN}.to", [NODE, 64], {}),
    "a resize that grows": ("torch.nn.functional.interpolate", [NODE], {"scale_factor": 256}),
    "a remainder of numbers": (f"{ATEN}.remainder.int", [5, 0], {}),
    "a divisor of numbers": (f"{ATEN}.gcd.int", [-(1 << 63), -1], {}),
    "a number for a dtype": (f"{ATEN}.to.prim_dtype", [NODE, 1 << 20], {}),
    "a number for a device": (f"{ATEN}.to.prim_Device", [NODE, None, -1], {}),
    "any overload of to": (f"{ATEN}.to", [NODE, None, False], {}),
    "a window of any length": ("torch.conv_transpose1d", [NODE, NODE, None, [2], [65536] * 100], {}),
    "sparse indices": ("torch.zeros", [[4]], {"layout": {"layout": "sparse_csr"}}),
    "a number without an end": ("math.factorial", [1 << 30], {}),
    "a power without an end": ("builtins.pow", [3, 1 << 30], {}),
    "a shift out of memory": ("operator.lshift", [1, 1 << 36], {}),
    "a list out of memory": ("operator.mul", [[0], 1 << 33], {}),
    "numbers out of memory": ("builtins.range", [1 << 34], {}),
    "steps out of memory": ("torch.arange", [0, 1, 1e-11], {}),
    "zeros out of memory": ("torch.zeros", [1 << 17, 1 << 17], {}),
    "a square out of memory": ("torch.eye", [1 << 17], {}),
    "a value out of memory": ("torch.full", [[1 << 34], 1.0], {}),
    "chance out of memory": ("torch.randint", [0, 2, [1 << 34]], {}),
    "a frame out of memory": ("torch.nn.functional.pad", [NODE, [1 << 20, 1 << 20, 1 << 20, 0]], {}),
    "copies out of memory": (f"{ATEN}.repeat.default", [NODE, [1 << 20, 1 << 20]], {}),
    "parts without an end": ("torch.tensor_split", [NODE, 1 << 30], {}),
    "an output out of memory": (f"{ATEN}.upsample_nearest2d.default", [NODE, [1 << 17, 1 << 17]], {}),
}  # fmt: skip


def with_call(model: QuantizedModel, path: Path, call: dict[str, Any]) -> Path:
    """A file whose graph makes ``call`` of the first argument before anything else."""
    backquant.save(model, path)
    document, tensors = read_file(path)
    rows = document["model"]["graph"]
    rows[0] = {**rows[0], "name": "x", "target": "x"}
    rest = [row for row in rows if row["op"] == "output"]
    rest[0]["args"] = [{"node": "made"}]
    document["model"]["graph"] = [rows[0], {**call, "name": "made"}, *rest]
    path.write_bytes(packed(manifest_text(document, tensors), tensors))
    return path


@pytest.mark.parametrize("hole", FUNCTIONS)
def test_a_call_is_refused(hole: str, quantized: QuantizedModel, tmp_path: Path) -> None:
    target, args, kwargs = FUNCTIONS[hole]
    call = {"op": "call_function", "target": target, "args": args, "kwargs": kwargs}
    with pytest.raises(ArtifactError):
        backquant.load(with_call(quantized, tmp_path / "m.bq", call))


NUMBERS: dict[str, tuple[str, list[Any]]] = {
    "a range": ("builtins.range", [0, NODE]),
    "a product": ("operator.mul", [NODE, NODE]),
    "a power": ("builtins.pow", [3, NODE]),
    "a shift": ("operator.lshift", [1, NODE]),
    "a list": ("operator.mul", [[0], NODE]),
    "a text": ("operator.mod", ["%3000000000d", 1]),
    "digits": ("builtins.round", [5, NODE]),
    "a packet": ("torch.ops.aten.remainder", [5, 0]),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_end_with_an_error(kind: str, quantized: QuantizedModel, tmp_path: Path) -> None:
    """What a file computes of a number that it was called with."""
    target, args = NUMBERS[kind]
    call = {"op": "call_function", "target": target, "args": args}
    loaded = backquant.load(with_call(quantized, tmp_path / "m.bq", call)).graph_module
    with pytest.raises(InputError):
        loaded(10**12)


def test_a_call_that_is_fine_is_not(quantized: QuantizedModel, tmp_path: Path) -> None:
    call = {"op": "call_function", "target": "torch.repeat_interleave", "args": [NODE, 2]}
    loaded = backquant.load(with_call(quantized, tmp_path / "m.bq", call))
    assert loaded(torch.ones(2)).shape == (4,)


@pytest.mark.parametrize(
    "hole", ["results into an argument", "a window that overflows", "a dtype that there is not"]
)
def test_the_refusal_of_a_call(
    hole: str, quantized: QuantizedModel, tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    target, args, kwargs = FUNCTIONS[hole]
    call = {"op": "call_function", "target": target, "args": args, "kwargs": kwargs}
    with pytest.raises(ArtifactError) as caught:
        backquant.load(with_call(quantized, tmp_path / "m.bq", call))
    snapshot(f"call-{hole.replace(' ', '-')}", caught.value)


def test_the_default_of_an_argument_is_a_literal(
    quantized: QuantizedModel, tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    """It stands in the text of a function: the name of a node there was a raw ``NameError``."""
    call = {"op": "placeholder", "target": "y", "args": [NODE]}
    with pytest.raises(ArtifactError) as caught:
        backquant.load(with_call(quantized, tmp_path / "m.bq", call))
    snapshot("default", caught.value)


@pytest.mark.parametrize(
    "method",
    ["as_strided", "set_", "resize_", "data_ptr", "storage", "new_empty", "t_", "squeeze_"],
)
def test_a_method_is_refused(method: str, quantized: QuantizedModel, tmp_path: Path) -> None:
    call = {"op": "call_method", "target": method, "args": [NODE]}
    with pytest.raises(ArtifactError, match=f"{method}"):
        backquant.load(with_call(quantized, tmp_path / "m.bq", call))


def fc(document: Document) -> Document:
    found: Document = document["model"]["children"]["fc"]
    return found


def config(document: Document, name: str, value: Any) -> None:
    pairs = fc(document)["config"]["dict"]
    pairs[:] = [[key, value if key == name else old] for key, old in pairs]


KERNELS: dict[str, Callable[[Document], Any]] = {
    "scales of other rows": lambda d: fc(d)["buffers"].update(weight_scale={"tensor": "long"}),
    "a short bias": lambda d: fc(d)["buffers"].update(bias={"tensor": "short"}),
    "a weight of other numbers": lambda d: fc(d)["buffers"].update(weight={"tensor": "long"}),
    "a weight of other dimensions": lambda d: fc(d)["buffers"].update(weight={"tensor": "cube"}),
    "zero points of other rows": lambda d: fc(d)["buffers"].update(
        weight_zero_point={"tensor": "long"}
    ),
    "a scale of nothing": lambda d: config(d, "x_scale", 0.0),
    "a scale that is none": lambda d: config(d, "x_scale", {"float": "nan"}),
    "a large zero point": lambda d: config(d, "x_zero_point", 1 << 40),
    "another operator behind": lambda d: config(d, "post_op", "system"),
    "numbers of another operator": lambda d: config(d, "post_numbers", [1.0, 2.0, 3.0]),
}


@pytest.mark.parametrize("damage", KERNELS)
def test_a_kernel_is_refused(damage: str, quantized: QuantizedModel, tmp_path: Path) -> None:
    backquant.save(quantized, tmp_path / "m.bq")
    document, tensors = read_file(tmp_path / "m.bq")
    KERNELS[damage](document)
    more = {"long": torch.ones(7), "short": torch.ones(1), "cube": torch.ones(2, 2, 2).char()}
    tensors |= more
    (tmp_path / "m.bq").write_bytes(packed(manifest_text(document, tensors), tensors))
    with pytest.raises(ArtifactError):
        backquant.load(tmp_path / "m.bq")


def test_the_refusal_of_a_kernel(
    quantized: QuantizedModel, tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    backquant.save(quantized, tmp_path / "m.bq")
    document, tensors = read_file(tmp_path / "m.bq")
    config(document, "x_scale", 0.0)
    (tmp_path / "m.bq").write_bytes(packed(manifest_text(document, tensors), tensors))
    with pytest.raises(ArtifactError) as caught:
        backquant.load(tmp_path / "m.bq")
    kernel = fc(document)["class"].rpartition(".")[2]  # another one on another CPU
    snapshot("kernel-number", caught.value, {kernel: "<kernel>"})


def test_a_kernel_whose_tensors_nobody_checks(snapshot: Callable[..., None]) -> None:
    class Unchecked(KernelModule):
        pass

    with pytest.raises(ArtifactError) as caught:
        check_tensors(Unchecked, None, {}, "fc")
    snapshot("kernel-unchecked", caught.value)


def changed_lstm(**attributes: Any) -> nn.LSTM:
    lstm = nn.LSTM(4, 8).eval()
    lstm.__dict__.update(attributes)
    return lstm


def test_weights_of_recurrent_layers_fit(
    wrapped: Callable[[nn.Module], QuantizedModel],
    round_trip: Callable[..., QuantizedModel],
    snapshot: Callable[..., None],
) -> None:
    """torch reads past the end of weights that are too small."""
    small = nn.LSTM(4, 8).eval()
    small._parameters["weight_ih_l0"] = nn.Parameter(torch.rand(32, 1))
    for module in (small, changed_lstm(hidden_size=9), changed_lstm(num_layers=2)):
        with pytest.raises(ArtifactError, match="do not fit") as caught:
            round_trip(wrapped(nn.Sequential(module)))
    snapshot("weights-of-another-size", caught.value)


def test_heads_of_attention_are_some(
    wrapped: Callable[[nn.Module], QuantizedModel], round_trip: Callable[..., QuantizedModel]
) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, batch_first=True).eval()
    layer.self_attn.num_heads = 0
    with pytest.raises(ArtifactError, match="num_heads"):
        round_trip(wrapped(nn.Sequential(layer)))


def test_no_attribute_hides_a_method(quantized: QuantizedModel, tmp_path: Path) -> None:
    backquant.save(quantized, tmp_path / "m.bq")
    document, tensors = read_file(tmp_path / "m.bq")
    hidden = {"class": "torch.nn.modules.activation.ReLU", "training": False}
    hidden["attributes"] = {"forward": {"function": "torch.nn.functional.relu"}}  # type: ignore[assignment]
    document["model"]["children"]["fc"] = hidden
    (tmp_path / "m.bq").write_bytes(packed(manifest_text(document, tensors), tensors))
    with pytest.raises(ArtifactError, match="forward"):
        backquant.load(tmp_path / "m.bq")


def test_booleans_are_0_or_1(quantized: QuantizedModel, tmp_path: Path) -> None:
    backquant.save(quantized, tmp_path / "m.bq")
    document, tensors = read_file(tmp_path / "m.bq")
    odd = torch.full((8,), 255, dtype=torch.uint8).view(torch.bool)
    tensors["odd"] = odd
    (tmp_path / "m.bq").write_bytes(packed(manifest_text(document, tensors), tensors))
    with pytest.raises(ArtifactError, match="booleans"):
        backquant.load(tmp_path / "m.bq")


def test_values_are_nested_only_so_deep(quantized: QuantizedModel, tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(150):
        deep = [deep]
    call = {"op": "call_function", "target": "operator.add", "args": [NODE, deep]}
    with pytest.raises(ArtifactError, match="64 deep"):
        backquant.load(with_call(quantized, tmp_path / "m.bq", call))


GROWTH = {
    "stride": (nn.ConvTranspose1d(2, 2, 2), "stride", (65536,)),
    "stride of two axes": (nn.ConvTranspose2d(2, 2, 2), "stride", (256, 256)),
    "dilation": (nn.ConvTranspose1d(2, 2, 2), "dilation", (65536,)),
    "padding": (nn.Conv2d(2, 2, 3), "padding", (65536, 1)),
    "scale factor": (nn.Upsample(scale_factor=2), "scale_factor", 65536.0),
    "size": (nn.Upsample(size=2), "size", (65536, 65536)),
}


@pytest.mark.parametrize("what", GROWTH)
def test_a_layer_does_not_grow_beyond_its_weights(
    what: str,
    wrapped: Callable[[nn.Module], QuantizedModel],
    round_trip: Callable[..., QuantizedModel],
    snapshot: Callable[..., None],
) -> None:
    """A stride of 65,536 in a file of a few kilobytes computed for minutes."""
    module, name, value = GROWTH[what]
    module = copy.deepcopy(module).eval()
    round_trip(wrapped(nn.Sequential(module)))
    module.__dict__[name] = value
    with pytest.raises(ArtifactError, match="makes") as caught:
        round_trip(wrapped(nn.Sequential(module)))
    if what == "stride":
        snapshot("growth", caught.value)


def test_a_call_does_not_grow_beyond_what_layers_do() -> None:
    check_call("torch.conv_transpose1d", torch.conv_transpose1d, (None, None, None, 320), {}, "n")
    with pytest.raises(ArtifactError, match="makes"):
        check_call(
            "torch.conv_transpose2d", torch.conv_transpose2d, (None,) * 3, {"stride": 256}, "n"
        )


BY_HAND = {
    "a layer of a file": lambda _, n: n["round_trip"](
        n["wrapped"](nn.Sequential(nn.ConvTranspose1d(2, 2, 3, stride=2)))
    ),
}
