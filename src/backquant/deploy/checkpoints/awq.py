"""AWQ: what AutoAWQ writes (``version: gemm``); vLLM, SGLang and transformers load it.

``qweight`` ``[in, out/8]``: words of eight along the output features, the even ones first. ``qzeros``
``[groups, out/8]`` in the same order. ``scales`` ``[groups, out]``, float16. Weights have 4 bits and
zero points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from backquant.deploy.checkpoints.bits import AWQ_ORDER, pack_words, unpack_words
from backquant.deploy.checkpoints.layer import Layer, Scheme, from_unsigned
from backquant.deploy.checkpoints.one_scheme import Reader, half, marked, only_scheme

_METHOD, _BITS = "awq", 4


class Awq:
    """See ``backquant.deploy.checkpoints.formats.Format``."""

    name = "awq"
    key = "quantization_config"

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        """The tensors of a layer, by what stands behind its path."""
        values, zero = layer.unsigned()
        return {
            "qweight": pack_words(values.T.contiguous(), _BITS, AWQ_ORDER),
            "qzeros": pack_words(zero.T.contiguous(), _BITS, AWQ_ORDER),
            "scales": half(layer).T.contiguous(),
        }

    def layer(self, path: str, scheme: Scheme, read: Reader) -> Layer:
        """The inverse of ``tensors``."""
        rows, _ = self.shape(scheme, read)
        values = unpack_words(read("qweight"), _BITS, rows, AWQ_ORDER).T.contiguous()
        zero = unpack_words(read("qzeros"), _BITS, rows, AWQ_ORDER).T.contiguous()
        return from_unsigned(path, _BITS, values, read("scales").T.contiguous(), zero)

    def shape(self, scheme: Scheme, read: Reader) -> tuple[int, int]:
        """Output and input features of a layer."""
        columns, words = read("qweight").shape
        return words * 32 // scheme.bits, columns

    def config(self, schemes: Mapping[str, Scheme], left: Iterable[str]) -> dict[str, Any]:
        """What ``config.json`` says. Raises ``ExportError`` for several schemes."""
        scheme = only_scheme(schemes, self.name)
        return {
            "quant_method": _METHOD,
            "bits": _BITS,
            "group_size": scheme.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": sorted(left),
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a ``config.json`` is one of this format."""
        found = config.get(self.key)
        return isinstance(found, Mapping) and found.get("quant_method") == _METHOD

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        """What the configuration says of a layer. Raises ``ValueError`` in words."""
        found = config[self.key]
        version = str(found.get("version", "gemm")).lower()
        if version != "gemm" or int(found["bits"]) != _BITS:
            raise ValueError(f"version {version!r}, {found['bits']} bits")
        scheme = Scheme("uint4", int(found["group_size"]))
        return lambda _: scheme

    def marks(self, names: Iterable[str]) -> list[str]:
        """The paths of quantized layers."""
        return marked(list(names), ".qweight")
