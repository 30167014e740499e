"""The formats of checkpoints: what each has to say, and where they are."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

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


class Held(Protocol):
    """How a format stores a ``Layer``, to be read."""

    @property
    def name(self) -> str: ...

    def layer(self, path: str, scheme: Scheme, read: Callable[[str], Tensor]) -> Layer:
        """A layer; ``read`` gives a tensor by what stands behind the path."""
        ...

    def shape(self, path: str, scheme: Scheme, read: Callable[[str], Tensor]) -> tuple[int, int]:
        """Output and input features of a layer, from tensors as ``layer`` reads them."""
        ...


class Format(Held, Protocol):
    """How a format names and packs what a ``Layer`` holds, in both directions.

    ``key``: where in ``config.json`` it says so. What ``tensors`` makes of a layer on ``meta`` has the sizes
    and dtypes of the real ones.
    """

    @property
    def key(self) -> str: ...

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        """The tensors of a layer, by what stands behind its path."""
        ...

    def config(self, schemes: Mapping[str, Scheme], left: Iterable[str]) -> dict[str, Any]:
        """What stands under ``key``; ``left``: the linear layers that stay float."""
        ...

    def metadata(
        self, schemes: Mapping[str, Scheme], sizes: Mapping[str, Tensor]
    ) -> dict[str, str]:
        """What the header of every safetensors file says; ``sizes``: of the source's tensors, by name."""
        ...

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a ``config.json`` is one of this format."""
        ...

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        """What the configuration says of a layer, by its path. Raises ``ValueError`` in words."""
        ...

    def marks(self, names: Iterable[str]) -> list[str]:
        """The paths of the layers that tensors of these names are of."""
        ...


class NamedMethod:
    """Of formats whose name is the method that a ``config.json`` states."""

    name: str
    key = "quantization_config"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a ``config.json`` is one of this format."""
        found = config.get(self.key)
        return isinstance(found, Mapping) and found.get("quant_method") == self.name


class PlainHeaders:
    """Of formats whose files say nothing in their headers."""

    def metadata(
        self, schemes: Mapping[str, Scheme], sizes: Mapping[str, Tensor]
    ) -> dict[str, str]:
        """Nothing."""
        del schemes, sizes
        return {}


def find_format(name: str) -> Format:
    """The format called ``name``, one of ``FORMATS``.

    >>> find_format("compressed-tensors").key
    'quantization_config'
    """
    module, _, cls = FORMATS[name].partition(":")
    found: Format = getattr(importlib.import_module(f"{__package__}.{module}"), cls)()
    return found
