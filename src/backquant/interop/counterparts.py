"""What has a counterpart in ``torch.ao``, by name. Data: nothing is imported from there here."""

from __future__ import annotations

_OBSERVERS = (
    "ObserverBase",
    "UniformQuantizationObserverBase",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "PerChannelMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "HistogramObserver",
    "FixedQParamsObserver",
    "PlaceholderObserver",
    "RecordingObserver",
    "NoopObserver",
    "ReuseInputObserver",
)
_FAKE_QUANTIZES = (
    "FakeQuantizeBase",
    "FakeQuantize",
    "FixedQParamsFakeQuantize",
    "FusedMovingAvgObsFakeQuantize",
)
_FUSED_QAT = (
    *("ConvBn1d", "ConvBn2d", "ConvBn3d", "ConvBnReLU1d", "ConvBnReLU2d", "ConvBnReLU3d"),
    *("ConvReLU1d", "ConvReLU2d", "ConvReLU3d", "LinearBn1d", "LinearReLU"),
)
_FUSED = (
    *_FUSED_QAT,
    *("BNReLU2d", "BNReLU3d", "ConvAdd2d", "ConvAddReLU2d", "LinearLeakyReLU", "LinearTanh"),
)
_REFERENCE = (
    *("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"),
    *("Embedding", "EmbeddingBag", "GRU", "GRUCell", "LSTM", "LSTMCell", "Linear", "RNNCell"),
)

#: Modules of ``torch.ao`` and of ``backquant``, and the names that both have.
ATOMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("quantization.utils", "backend_config", ("MatchAllNode",)),
    ("quantization.observer", "observe", _OBSERVERS),
    ("quantization.fake_quantize", "observe", _FAKE_QUANTIZES),
    ("quantization.stubs", "nn", ("DeQuantStub", "QuantStub", "QuantWrapper")),
    ("nn.intrinsic", "nn.intrinsic", _FUSED),
    ("nn.intrinsic.qat", "nn.intrinsic.qat", _FUSED_QAT),
    ("nn.qat", "nn.qat", ("Conv1d", "Conv2d", "Conv3d", "Embedding", "EmbeddingBag", "Linear")),
    ("nn.qat.dynamic", "nn.qat.dynamic", ("Linear",)),
    ("nn.quantized.reference", "nn.quantized.reference", _REFERENCE),
    ("nn.quantizable", "nn.quantizable", ("LSTM", "LSTMCell", "MultiheadAttention")),
    ("nn.quantized", "nn.quantized", ("LSTM", "MultiheadAttention", "FloatFunctional")),
    (
        "quantization.fuser_method_mappings",
        "nn.intrinsic.fusers",
        ("fuse_conv_bn", "fuse_conv_bn_relu", "fuse_convtranspose_bn", "fuse_linear_bn"),
    ),
)

_ADD = "operators.conv_add"
_SIDES = ("left", "right")


def _conv_add(bn: str) -> dict[str, tuple[str, str]]:
    """Fusers and getters of a convolution, ``bn`` and an addition; one of ours serves with and without."""
    found = {}
    for side in _SIDES:
        for relu, tail in (("", ""), ("relu_", "_relu")):
            found[f"_fuse_conv_{bn}add_{relu}{side}"] = (_ADD, f"fuse_{side}{tail}")
            for what in ("root_node", "extra_inputs"):
                own = f"{what.removesuffix('_node')}_{side}{tail}"
                found[f"_conv_{bn}add_{relu}{what}_getter_{side}"] = (_ADD, own)
    return found


#: Functions of PyTorch's onednn backend: the module of ours, and the name there.
FUNCTIONS: dict[str, tuple[str, str]] = {
    **_conv_add(""),
    "_fuse_linear_bn_leaky_relu": ("operators.linear", "fuse_bn_leaky_relu"),
}
#: Those for patterns with a batch norm, where one function of ours does both.
BN_FUNCTIONS: dict[str, tuple[str, str]] = _conv_add("bn_")
