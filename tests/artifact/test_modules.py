"""Every leaf of ``torch.nn`` that can stay float comes back and computes the same bits, or is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from backquant.artifact.json_values import Decoder, Encoder
from backquant.artifact.modules import ModuleDecoder, ModuleEncoder
from backquant.artifact.tensors import TensorReader, TensorWriter
from backquant.errors import ArtifactError
from backquant.runtime import QuantizedModel

Again = Callable[[nn.Module], nn.Module]


@pytest.fixture
def again() -> Again:
    def round_trip(module: nn.Module) -> nn.Module:
        writer = TensorWriter()
        entry = ModuleEncoder(Encoder(writer.add)).encode(module)
        return ModuleDecoder(Decoder(TensorReader(writer.tensors, writer.strides))).decode(entry)

    return round_trip


def bits(value: Any) -> Any:
    """The tensors of a nested result as bytes, with the types around them."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, tuple | list):
        return type(value).__name__, [bits(item) for item in value]
    return value


IMAGE, SIGNAL, VOLUME = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 9), torch.randn(2, 4, 5, 5, 5)
ROWS, WORDS = torch.randn(3, 8), torch.randint(0, 10, (3, 5))
SEQUENCE = torch.randn(5, 2, 8)

CASES: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "LayerNorm": (nn.LayerNorm(8), (ROWS,)),
    "RMSNorm": (nn.RMSNorm(8), (ROWS,)),
    "GroupNorm": (nn.GroupNorm(2, 4), (IMAGE,)),
    "InstanceNorm2d": (nn.InstanceNorm2d(4, affine=True), (IMAGE,)),
    "LocalResponseNorm": (nn.LocalResponseNorm(2), (IMAGE,)),
    "BatchNorm1d": (nn.BatchNorm1d(8), (ROWS,)),
    "BatchNorm1d without statistics": (nn.BatchNorm1d(8, track_running_stats=False), (ROWS,)),
    "BatchNorm3d": (nn.BatchNorm3d(4, affine=False), (VOLUME,)),
    "SyncBatchNorm": (nn.SyncBatchNorm(8), (ROWS,)),
    "GELU": (nn.GELU("tanh"), (ROWS,)),
    "Softplus": (nn.Softplus(2, 10), (ROWS,)),
    "PReLU": (nn.PReLU(4), (IMAGE,)),
    "Hardtanh": (nn.Hardtanh(-2, 3), (ROWS,)),
    "Softmax": (nn.Softmax(dim=1), (ROWS,)),
    "GLU": (nn.GLU(1), (ROWS,)),
    "Threshold": (nn.Threshold(0.1, float("-inf")), (ROWS,)),
    "Dropout": (nn.Dropout(0.5), (ROWS,)),
    "Embedding": (nn.Embedding(10, 4, padding_idx=0), (WORDS,)),
    "EmbeddingBag": (nn.EmbeddingBag(10, 4, mode="sum"), (WORDS,)),
    "Bilinear": (nn.Bilinear(8, 8, 3), (ROWS, ROWS)),
    "Conv1d": (nn.Conv1d(4, 4, 3, padding="same", padding_mode="circular"), (SIGNAL,)),
    "Conv2d": (
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", groups=2, bias=False),
        (IMAGE,),
    ),
    "ConvTranspose2d": (nn.ConvTranspose2d(4, 4, 3, 2, output_padding=1), (IMAGE,)),
    "Conv3d": (nn.Conv3d(4, 2, 3), (VOLUME,)),
    "LSTM": (nn.LSTM(8, 4, 2, bidirectional=True, dropout=0.1), (SEQUENCE,)),
    "LSTM with projection": (nn.LSTM(8, 4, proj_size=3, batch_first=True), (SEQUENCE,)),
    "GRU": (nn.GRU(8, 4), (SEQUENCE,)),
    "RNN": (nn.RNN(8, 4, nonlinearity="relu"), (SEQUENCE,)),
    "LSTMCell": (nn.LSTMCell(8, 4), (ROWS,)),
    "GRUCell": (nn.GRUCell(8, 4), (ROWS,)),
    "MultiheadAttention": (nn.MultiheadAttention(8, 2), (SEQUENCE, SEQUENCE, SEQUENCE)),
    "MultiheadAttention, biased": (
        nn.MultiheadAttention(8, 2, add_bias_kv=True, kdim=8),
        (SEQUENCE,) * 3,
    ),
    "TransformerEncoderLayer": (
        nn.TransformerEncoderLayer(8, 2, 16, activation="gelu"),
        (SEQUENCE,),
    ),
    "TransformerDecoderLayer": (nn.TransformerDecoderLayer(8, 2, 16), (SEQUENCE, SEQUENCE)),
    "TransformerEncoder": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        (SEQUENCE,),
    ),
    "Transformer": (nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (SEQUENCE, SEQUENCE)),
    "Upsample": (nn.Upsample(scale_factor=2.0, mode="bilinear"), (IMAGE,)),
    "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d((None, 3)), (IMAGE,)),
    "MaxPool2d": (nn.MaxPool2d(2, return_indices=True), (IMAGE,)),
    "FractionalMaxPool2d": (
        nn.FractionalMaxPool2d(2, 3, _random_samples=torch.rand(2, 4, 2)),
        (IMAGE,),
    ),
    "FractionalMaxPool3d": (
        nn.FractionalMaxPool3d(2, 3, _random_samples=torch.rand(2, 4, 3)),
        (VOLUME,),
    ),
    "AdaptiveLogSoftmaxWithLoss": (
        nn.AdaptiveLogSoftmaxWithLoss(8, 10, [4]),
        (ROWS, torch.tensor([0, 3, 9])),
    ),
    "TransformerDecoder": (
        nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2),
        (SEQUENCE, SEQUENCE),
    ),
    "LPPool2d": (nn.LPPool2d(2, 2), (IMAGE,)),
    "PixelShuffle": (nn.PixelShuffle(2), (IMAGE,)),
    "ZeroPad2d": (nn.ZeroPad2d(1), (IMAGE,)),
    "Fold": (nn.Fold((4, 4), 2), (torch.randn(1, 4, 9),)),
    "Unflatten": (nn.Unflatten(1, (2, 4)), (ROWS,)),
    "CosineSimilarity": (nn.CosineSimilarity(), (ROWS, ROWS)),
    "ChannelShuffle": (nn.ChannelShuffle(2), (IMAGE,)),
    "Identity": (nn.Identity(), (ROWS,)),
    "CrossEntropyLoss": (
        nn.CrossEntropyLoss(weight=torch.rand(8)),
        (ROWS, torch.tensor([0, 3, 7])),
    ),
    "TripletMarginLoss": (nn.TripletMarginLoss(), (ROWS, ROWS + 1, ROWS - 1)),
    "Sequential": (nn.Sequential(nn.Linear(8, 4), nn.ReLU(inplace=True)), (ROWS,)),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_leaf_modules_compute_the_same_bits(name: str, again: Again) -> None:
    module, inputs = CASES[name]
    module.eval()
    loaded = again(module)
    assert type(loaded) is type(module) and repr(loaded) == repr(module)
    with torch.no_grad():
        assert bits(loaded(*inputs)) == bits(module(*inputs))


def test_no_module_of_torch_nn_is_forgotten() -> None:
    """Each class without a case is built with the simplest arguments, and comes back, too."""
    covered = {type(module) for module, _ in CASES.values()}
    bare = [
        cls
        for cls in vars(nn).values()
        if isinstance(cls, type) and issubclass(cls, nn.Module) and cls not in covered
        if cls.__module__.startswith("torch.nn.modules") and "Lazy" not in cls.__name__
        if cls not in (nn.Container, nn.NLLLoss2d)  # deprecated
    ]
    left = []
    for cls in bare:
        needed = [
            p
            for p in inspect.signature(cls).parameters.values()
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        try:
            module = cls(*([2] * len(needed)))
        except (TypeError, ValueError, AssertionError, NotImplementedError):
            left.append(cls.__name__)
            continue
        writer = TensorWriter()
        entry = ModuleEncoder(Encoder(writer.add)).encode(module)
        loaded = ModuleDecoder(Decoder(TensorReader(writer.tensors, writer.strides))).decode(entry)
        assert repr(loaded) == repr(module)
        assert bits(list(loaded.state_dict().values())) == bits(list(module.state_dict().values()))
    assert left == ["RNNBase"]  # abstract: the base of LSTM, GRU and RNN


def test_training_flags_persistence_and_absent_parts(again: Again) -> None:
    class Holder(nn.Module):
        pass

    holder = nn.ModuleDict({"fc": nn.Linear(2, 2, bias=False), "act": nn.ReLU()})
    holder["fc"].train(False)
    holder["fc"].register_buffer("cache", torch.ones(1), persistent=False)
    holder["fc"].register_buffer("nothing", None)
    holder["fc"].register_module("absent", None)
    loaded = again(holder)
    assert [m.training for m in loaded.modules()] == [True, False, True]
    assert [p.requires_grad for p in again(nn.Linear(2, 2).requires_grad_(False)).parameters()] == [
        False
    ] * 2
    assert [p.requires_grad for p in again(nn.Linear(2, 2)).parameters()] == [True] * 2
    fc = loaded["fc"]  # type: ignore[index]
    assert list(loaded.state_dict()) == ["fc.weight"]
    assert fc.cache.item() == 1 and fc.nothing is None and fc.bias is None and fc.absent is None


def test_tied_weights_and_shared_modules_stay_tied(again: Again) -> None:
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    loaded = again(nn.ModuleList([embedding, head, embedding]))
    first, second, third = loaded  # type: ignore[misc]
    assert first.weight is second.weight and first is third


def test_channels_last_weights(again: Again) -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    loaded = again(conv)
    assert isinstance(loaded, nn.Conv2d) and loaded.weight.stride() == conv.weight.stride()
    x = torch.randn(1, 3, 6, 6)
    assert torch.equal(loaded(x), conv(x)) and loaded(x).stride() == conv(x).stride()


def test_graph_modules_with_preserved_attributes(
    again: Again, wrapped: Callable[[nn.Module], QuantizedModel]
) -> None:
    inner = wrapped(nn.Sequential(nn.Linear(3, 2), nn.ReLU())).graph_module
    inner.meta["_user_preserved_attributes"] = {"classes": ("cat", "dog"), "mean": torch.ones(3)}
    inner.classes = ("cat", "dog")
    loaded = again(nn.Sequential(inner, nn.Tanh()))
    assert loaded[0].classes == ("cat", "dog")  # type: ignore[index]
    assert torch.equal(loaded[0].mean, torch.ones(3))  # type: ignore[index]
    x = torch.randn(2, 3)
    assert torch.equal(loaded(x), torch.tanh(inner(x)))


def test_messages(
    snapshot: Callable[..., None], wrapped: Callable[[nn.Module], QuantizedModel]
) -> None:
    class Leaf(nn.Module):
        pass

    hooked = nn.Linear(2, 2)
    hooked.register_forward_pre_hook(lambda *_: None)
    odd = nn.ReLU()
    odd.note = object()  # type: ignore[assignment]
    kept = wrapped(nn.ReLU()).graph_module
    kept.meta["_user_preserved_attributes"] = {"tokenizer": object()}
    refused = {
        "class": nn.Sequential(Leaf()),
        "hook": nn.Sequential(hooked),
        "weight-norm": nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))),
        "attribute": nn.Sequential(odd),
        "lazy": nn.LazyLinear(2),
        "preserved": kept,
        "name": nn.ModuleDict({'a"b': nn.ReLU()}),
    }
    for name, module in refused.items():
        with pytest.raises(ArtifactError) as caught:
            ModuleEncoder(Encoder(TensorWriter().add)).encode(module)
        snapshot(f"module-{name}", caught.value, {Leaf.__module__: "<module>"})


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_old_weight_norm_is_refused_with_the_way_out(snapshot: Callable[..., None]) -> None:
    normed = nn.utils.weight_norm(nn.Linear(2, 2))
    with pytest.raises(ArtifactError) as caught:
        ModuleEncoder(Encoder(TensorWriter().add)).encode(nn.Sequential(normed))
    snapshot("module-old-weight-norm", caught.value)


CRAFTED: dict[str, dict[str, Any]] = {
    "internal attribute": {
        "attributes": {"_forward_hooks": {"dict": [[0, {"function": "torch.relu"}]]}}
    },
    "dunder attribute": {"attributes": {"__class__": {"class": "torch.nn.modules.linear.Linear"}}},
    "class of no module": {"class": "subprocess.Popen"},
    "configured, yet no kernel": {"config": {"dict": []}},
    "kernel without a configuration": {
        "class": "backquant.lower.kernels.packed.PackedKernel",
        "config": {"dict": []},
    },
    "module that did not come before": {"same_as": "encoder"},
}


def test_notes_of_a_library_that_hide_a_method_are_left_out(again: Again) -> None:
    layer = nn.MaxPool2d(2)
    layer.type, layer.i = "torch.nn.modules.pooling.MaxPool2d", 3  # as ultralytics numbers layers
    loaded = again(layer)
    assert "type" not in vars(loaded)
    assert loaded.i == 3
    assert loaded.type(torch.float32) is loaded


def test_assigned_methods_are_refused(again: Again, snapshot: Callable[..., None]) -> None:
    layer = nn.MaxPool2d(2)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ArtifactError) as error:
        again(layer)
    snapshot("assigned-methods", error.value)


@pytest.mark.parametrize("case", CRAFTED)
def test_what_no_encoder_wrote(case: str, snapshot: Callable[..., None]) -> None:
    entry = {"class": "torch.nn.modules.activation.ReLU", "training": False, **CRAFTED[case]}
    with pytest.raises(ArtifactError) as caught:
        ModuleDecoder(Decoder(TensorReader({}, {}))).decode(entry, "act")
    snapshot(f"module-crafted-{case.replace(' ', '-').replace(',', '')}", caught.value)


def test_a_preserved_attribute_cannot_hide_a_method(snapshot: Callable[..., None]) -> None:
    rows = [
        {"op": "placeholder", "name": "x", "target": "x"},
        {"op": "output", "name": "output", "target": "output", "args": [{"node": "x"}]},
    ]
    entry = {"graph": rows, "training": False, "preserved": {"forward": {"function": "torch.relu"}}}
    with pytest.raises(ArtifactError) as caught:
        ModuleDecoder(Decoder(TensorReader({}, {}))).decode(entry)
    snapshot("module-crafted-preserved", caught.value)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def _mended() -> nn.Module:
    """A model after what the messages ask for: no hooks, no parametrizations, plain names and values."""
    one, other = (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)) for _ in range(2))
    handle = other.register_forward_pre_hook(lambda *_: None)
    handle.remove()
    for module in (one, other):
        torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
    return nn.Sequential(one, other, nn.ModuleDict({"a_b": nn.ReLU()})["a_b"])


BY_HAND = {
    **dict.fromkeys(
        [
            *("write them as", "use plain numbers", "let the tracer", "before quantizing: handle"),
            *("artifacts hold", "rename the module", "before quantizing: torch.nn.utils.remove"),
            "torch.nn.utils.parametrize.remove_parametrizations",
        ],
        lambda *_: ModuleEncoder(Encoder(TensorWriter().add)).encode(_mended()),
    ),
}
