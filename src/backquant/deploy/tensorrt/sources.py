"""Where TensorRT's rules are documented."""

from __future__ import annotations

_DOCS = "https://docs.nvidia.com/deeplearning/tensorrt"
QUANTIZE = f"{_DOCS}/operators/docs/Quantize.html"
EXPLICIT = f"{_DOCS}/latest/inference-library/quantized-types-explicit-quantization.html"
SCHEMES = f"{_DOCS}/latest/inference-library/quantized-types-schemes.html"
CUSTOM_QDQ = f"{_DOCS}/tensorflow-quantization-toolkit/docs/docs/add_custom_qdq_cases.html"
OPERATORS = "https://github.com/onnx/onnx-tensorrt/blob/main/docs/operators.md"
PARSER_BIAS = "https://github.com/onnx/onnx-tensorrt/issues/850"
ONNX_QUANTIZE = "https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html"
POOLING = f"{_DOCS}/operators/docs/Pooling.html"
DECONVOLUTION = f"{_DOCS}/operators/docs/Deconvolution.html"
