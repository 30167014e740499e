"""Convolutions whose weights are packed once for all batches, while a model is calibrated, or judged.

Eager PyTorch rearranges the weights of a convolution at each call, and its input and result as well: two
fifths of the time of a ResNet-50. oneDNN's kernels for packed weights give results whose last bits differ, in
channels-last order. So they are used only where

1. all observers that measure are ``HistogramObserver``: others have the bits that calling the model gives;
2. nothing in the model can see how a tensor lies in memory: its modules are PyTorch's and this package's, and
   no operator asks for strides. Where one refuses the order (``view``), the batch is run again in the usual
   way.

A reference model is compared by how much it loses, not by bits: of it rule 2 alone is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from backquant.errors import BackquantError
from backquant.graph import get_module
from backquant.nn.quantized.reference import Conv2d as ReferenceConv2d
from backquant.observe import (
    FixedQParamsObserver,
    HistogramObserver,
    NoopObserver,
    PlaceholderObserver,
)

Result = TypeVar("Result")

_BLIND = (HistogramObserver, FixedQParamsObserver, NoopObserver, PlaceholderObserver)
_OURS = ("torch.nn.", "backquant.")
_FUNCTIONS = {"torch", "_operator", "builtins", "math", "backquant"}
_ASKS = {"as_strided", "stride", "is_contiguous", "storage_offset", "data_ptr", "resize_", "set_"}


class PackedConvolutions:
    """Those of a model; empty where rules 1 and 2 do not allow it.

    >>> from backquant import get_default_qconfig_mapping, prepare_fx
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3)).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 3, 8, 8))
    >>> packed = PackedConvolutions.of(prepared, prepared.modules())
    >>> with torch.no_grad(), packed.used():
    ...     prepared(torch.zeros(1, 3, 8, 8)).shape
    torch.Size([1, 8, 6, 6])
    """

    def __init__(self, found: Iterable[nn.Conv2d] = ()) -> None:
        self._weights: dict[nn.Conv2d, Tensor] = {}
        self._calls = {each: _packing(each, self._weights) for each in found}

    @classmethod
    def of(cls, prepared: fx.GraphModule, observers: Iterable[nn.Module]) -> PackedConvolutions:
        """``observers``: those of ``prepared``."""
        if not _usable() or any(type(each) not in _BLIND for each in observers):
            return cls()
        if any(_sees_memory(prepared, node) for node in prepared.graph.nodes):
            return cls()
        return cls(_plain(prepared, nn.Conv2d))

    @classmethod
    def of_reference(cls, reference: nn.Module) -> PackedConvolutions:
        """Of a model with integer weights, which must not change while they are used."""
        if not isinstance(reference, fx.GraphModule) or not _usable():
            return cls()
        if any(_sees_memory(reference, node) for node in reference.graph.nodes):
            return cls()
        return cls(_plain(reference, nn.Conv2d, ReferenceConv2d))

    def __bool__(self) -> bool:
        return bool(self._calls)

    def forget(self) -> None:
        """Let go of the packed weights."""
        self._weights.clear()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let them compute with packed weights in the block, which holds no gradients."""
        for convolution, call in self._calls.items():
            vars(convolution)["forward"] = call
        try:
            yield
        finally:
            for convolution in self._calls:
                del vars(convolution)["forward"]

    def calling(self, call: Callable[[], Result]) -> Result:
        """What ``call`` gives with them; where it raises, without, and they are not used any more."""
        if self._calls:
            try:
                with self.used():
                    return call()
            except BackquantError:
                raise
            except Exception:
                # It may be the order of memory: again without, which says what else it is.
                self._calls.clear()
                self.forget()
        return call()


def _usable() -> bool:
    mkldnn = torch.backends.mkldnn
    return bool(mkldnn.is_available() and mkldnn.enabled) and not torch.is_autocast_enabled("cpu")


def _sees_memory(prepared: fx.GraphModule, node: fx.Node) -> bool:
    """Whether what ``node`` calls may see how its arguments lie in memory: rule 2."""
    if node.op == "call_module":
        called = get_module(prepared, str(node.target)).modules()
        return not all(type(module).__module__.startswith(_OURS) for module in called)
    if node.op == "call_function":
        home = getattr(node.target, "__module__", None) or "torch"
        name = getattr(node.target, "__name__", "")
        return name.split(".")[0] in _ASKS or home.split(".")[0] not in _FUNCTIONS
    return node.op == "call_method" and node.target in _ASKS


def _plain(model: nn.Module, *kinds: type[nn.Module]) -> Iterator[nn.Conv2d]:
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and type(module) in kinds and _is_plain(module):
            yield module


def _is_plain(convolution: nn.Conv2d) -> bool:
    weight = convolution.weight
    integers = type(convolution) is ReferenceConv2d and not weight.is_floating_point()
    return (
        "forward" not in vars(convolution)
        and convolution.padding_mode == "zeros"
        and not isinstance(convolution.padding, str)
        and (integers or weight.dtype == torch.float32)
        and weight.device.type == "cpu"
        and type(weight) in (Tensor, nn.Parameter)
    )


def _packing(convolution: nn.Conv2d, packed: dict[nn.Conv2d, Tensor]) -> Callable[[Tensor], Any]:
    """What computes a convolution with weights that are packed at the first call, into ``packed``."""
    sizes = (convolution.padding, convolution.stride, convolution.dilation)
    settings: list[Any] = [*map(list, sizes), convolution.groups]

    def call(x: Tensor) -> Any:
        if x.dim() != 4 or x.dtype != torch.float32 or x.device.type != "cpu" or not x.numel():
            return type(convolution).forward(convolution, x)
        weight = packed.get(convolution)
        if weight is None:
            pack = torch.ops.mkldnn._reorder_convolution_weight
            weight = packed[convolution] = pack(_weight(convolution), *settings, list(x.shape))
        run = torch.ops.mkldnn._convolution_pointwise.default
        return run(x, weight, convolution.bias, *settings, "none", [], "")

    return call


def _weight(convolution: nn.Conv2d) -> Tensor:
    if isinstance(convolution, ReferenceConv2d):
        return convolution.dequantized_weight()
    return convolution.weight
