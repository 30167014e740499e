"""The formats of checkpoints: what each has to say, and where they are."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from backquant.deploy.checkpoints.layer import Layer, Scheme

#: By name: module and class, of formats that are a Hugging Face folder with other tensors in it.
FORMATS = {
    "compressed-tensors": "compressed_tensors:CompressedTensors",
    "gptq": "one_scheme:Gptq",
    "awq": "one_scheme:Awq",
    "mlx": "one_scheme:Mlx",
    "torchao": "torchao:Torchao",
}


#: Gives a tensor of a layer by what stands behind its path.
Reader = Callable[[str], Tensor]


class Held(ABC):
    """How what is called ``name`` stores a ``Layer``, to be read."""

    name: str

    @abstractmethod
    def layer(self, path: str, scheme: Scheme, read: Reader) -> Layer:
        """A layer."""

    @abstractmethod
    def shape(self, path: str, scheme: Scheme, read: Reader) -> tuple[int, int]:
        """Output and input features of a layer."""


class Format(Held):
    """How a format names and packs what a ``Layer`` holds, in both directions.

    ``key``: where in ``config.json`` it says so. ``marks``: how names of tensors end that only quantized
    layers have. What ``tensors`` makes of a layer on ``meta`` has the sizes and dtypes of the real ones.
    """

    key = "quantization_config"
    marks: tuple[str, ...]

    @abstractmethod
    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        """The tensors of a layer, by what stands behind its path; the inverse of ``layer``."""

    @abstractmethod
    def config(self, schemes: Mapping[str, Scheme], left: Iterable[str]) -> dict[str, Any]:
        """What stands under ``key``; ``left``: the linear layers that stay float. Raises ``ExportError`` for
        several schemes where the format has one."""

    @abstractmethod
    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        """What the configuration says of a layer, by its path; None: it is float. Raises ``ValueError`` in
        words for what no record here holds."""

    def metadata(
        self, schemes: Mapping[str, Scheme], sizes: Mapping[str, Tensor]
    ) -> dict[str, str]:
        """What the header of every safetensors file says; ``sizes``: of the source's tensors, by name."""
        del schemes, sizes
        return {}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a ``config.json`` is one of this format: most state its name as the method."""
        found = config.get(self.key)
        return isinstance(found, Mapping) and found.get("quant_method") == self.name

    def paths(self, names: Iterable[str]) -> list[str]:
        """The paths of the layers that tensors of these names are of, by ``marks``."""
        return sorted({name.rpartition(".")[0] for name in names if name.endswith(self.marks)})


def find_format(name: str) -> Format:
    """The format called ``name``, one of ``FORMATS``.

    >>> find_format("compressed-tensors").key
    'quantization_config'
    """
    module, _, cls = FORMATS[name].partition(":")
    found: Format = getattr(importlib.import_module(f"{__package__}.{module}"), cls)()
    return found
