"""GPTQ: what GPTQModel and AutoGPTQ write; vLLM, SGLang and transformers load it.

``qweight`` ``[in·bits/32, out]``: words along the input features. ``qzeros`` ``[groups, out·bits/32]``:
words along
the output features. ``scales`` ``[groups, out]``, float16. ``g_idx``: the group of each input feature.

The format of old (``checkpoint_format: gptq``) stores zero points less 1, so that 0 has no place: it is
written for weights without zero points, and ``gptq_v2`` for others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from backquant.deploy.checkpoints.bits import pack_words, unpack_words
from backquant.deploy.checkpoints.layer import Layer, Scheme, from_unsigned
from backquant.deploy.checkpoints.one_scheme import Reader, half, marked, only_scheme

_METHOD = "gptq"
_OLD, _NEW = "gptq", "gptq_v2"


class Gptq:
    """See ``backquant.deploy.checkpoints.formats.Format``."""

    name = "gptq"
    key = "quantization_config"

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        """The tensors of a layer, by what stands behind its path."""
        scheme = layer.scheme
        values, zero = layer.unsigned()
        columns = values.shape[1]
        if scheme.symmetric:
            zero = zero - 1
        return {
            "qweight": pack_words(values, scheme.bits).T.contiguous(),
            "qzeros": pack_words(zero.T.contiguous(), scheme.bits),
            "scales": half(layer).T.contiguous(),
            "g_idx": torch.arange(columns, dtype=torch.int32) // layer.group_size,
        }

    def layer(self, path: str, scheme: Scheme, read: Reader) -> Layer:
        """The inverse of ``tensors``."""
        rows, columns = self.shape(scheme, read)
        values = unpack_words(read("qweight").T.contiguous(), scheme.bits, columns)
        scale = read("scales").T.contiguous()
        zero = unpack_words(read("qzeros"), scheme.bits, rows).T.contiguous()
        groups = torch.arange(columns) // (columns // scale.shape[1])
        if not torch.equal(read("g_idx").long(), groups):
            raise ValueError("groups in another order (desc_act)")
        middle = (1 << (scheme.bits - 1)) - 1
        if scheme.symmetric and bool((zero != middle).any()):
            raise ValueError("zero points, and the configuration says sym: true")
        return from_unsigned(path, scheme.bits, values, scale, None if scheme.symmetric else zero)

    def shape(self, scheme: Scheme, read: Reader) -> tuple[int, int]:
        """Output and input features of a layer."""
        words, rows = read("qweight").shape
        return rows, words * 32 // scheme.bits

    def config(self, schemes: Mapping[str, Scheme], left: Iterable[str]) -> dict[str, Any]:
        """What ``config.json`` says. Raises ``ExportError`` for several schemes."""
        scheme = only_scheme(schemes, self.name)
        rest = sorted(path for path in left if path != "lm_head")
        return {
            "quant_method": _METHOD,
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "sym": scheme.symmetric,
            "desc_act": False,
            "checkpoint_format": _OLD if scheme.symmetric else _NEW,
            "lm_head": "lm_head" in schemes,
            **({"dynamic": {f"-:^{re.escape(path)}$": {} for path in rest}} if rest else {}),
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a ``config.json`` is one of this format."""
        found = config.get(self.key)
        return isinstance(found, Mapping) and found.get("quant_method") == _METHOD

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        """What the configuration says of a layer. Raises ``ValueError`` in words."""
        found = config[self.key]
        kind, symmetric = found.get("checkpoint_format", _OLD), bool(found.get("sym", True))
        if kind not in (_OLD, _NEW) or (kind == _OLD) != symmetric:
            raise ValueError(f"checkpoint_format {kind!r} with sym {symmetric}")
        bits, size = int(found["bits"]), int(found["group_size"])
        scheme = Scheme(f"{'' if symmetric else 'u'}int{bits}", size)
        if any(str(rule).startswith("+:") for rule in found.get("dynamic") or ()):
            raise ValueError("other bits for some layers (dynamic)")
        return lambda _: scheme

    def marks(self, names: Iterable[str]) -> list[str]:
        """The paths of quantized layers."""
        return marked(list(names), ".qweight")
