"""Modules that take and give PyTorch's quantized tensors: what a converted model shows to its reader.

They compute by PyTorch's operators on quantized tensors, so that a graph of them runs wherever it is taken:
interpreted, edited, copied into another module. Kept are plain integers with their scales beside them.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, TypeVar

import torch
from torch import nn

from backquant.dtypes import block_of, dequantize_tensor, quantize_bounds
from backquant.errors import ConfigError, LeftOutError, UsageError
from backquant.graph.interception import stand_ins
from backquant.nn.quantized import reference
from backquant.nn.quantized.reference.module import bare
from backquant.observe.protocol import qparam_dict

# A count of changes, so that whoever asks whether modules are as they were compares one number.

_numbers = count(1)


class Counted(OrderedDict[Any, Any]):
    """A table of a module: parameters, buffers, children or hooks. ``last`` is another number after each
    change of any table of this class, and after ``changed()``.

    >>> table, before = Counted({"scale": 1}), Counted.last
    >>> table["scale"] = 2
    >>> Counted.last == before
    False
    """

    last = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        changed()

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        changed()

    def pop(self, *args: Any) -> Any:
        """As of a dict."""
        value = super().pop(*args)
        changed()
        return value

    def popitem(self, last: bool = True) -> tuple[Any, Any]:
        """As of a dict."""
        item = super().popitem(last)
        changed()
        return item

    def clear(self) -> None:
        """As of a dict."""
        super().clear()
        changed()


def changed() -> None:
    """Count a change: after it was done, so that a look at the same time finds it or looks again."""
    Counted.last = next(_numbers)


_ScaledT = TypeVar("_ScaledT", bound="Scaled")
SIGNED = 128
_TENSORS = ("weight", "weight_scale", "weight_zero_point", "bias")
_ENDS = ("min", "max")
_BY_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric)

# PyTorch says once per process that quantized tensors are deprecated: here, so that no user sees it.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)


class Scaled(nn.Module):
    """A module whose result has ``scale`` and ``zero_point``: numbers here, tensors in the ``state_dict``.

    ``limits`` and ``input_limits``: the smallest and the largest integer of the result and of each input,
    where they are narrower than the dtype (``None``: they are not). PyTorch's operators saturate at those of
    the dtype alone. ``changes`` counts what was set since.
    """

    limits: tuple[int, int] | None = None
    input_limits: tuple[tuple[int, int] | None, ...] = ()
    changes: int = 0
    compute: Callable[..., torch.Tensor]  # the result, saturated at the limits of its dtype

    def __init__(self, *settings: Any, **others: Any) -> None:  # noqa: ARG002
        name = type(self).__name__
        raise LeftOutError(
            f"a quantized {name} is made by conversion, not by itself",
            where=f"nn.quantized.{name}",
            fix="build the float module and quantize it: prepare_fx, calibrate, convert_fx",
        )

    @property
    def scale(self) -> float:
        """What a step of the result is."""
        return float(held(self, "scale"))

    @property
    def zero_point(self) -> int:
        """The integer that stands for 0."""
        return int(held(self, "zero_point"))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("scale", "zero_point"):
            dtype = torch.float64 if name == "scale" else torch.int64
            self._buffers[name] = torch.as_tensor(value, dtype=dtype)
            return
        super().__setattr__(name, value)
        if name != "training":
            self.__dict__["changes"] = self.changes + 1
            changed()

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Quantized inputs, within the limits; a quantized result. Raises ``UsageError`` in an export."""
        if type(x) is not torch.Tensor and isinstance(x, torch.Tensor) and stand_ins():
            raise UsageError(
                "quantized layers run on data, and are not traced",
                where=f"{self._get_name()}, under {stand_ins()}",
                fix="backquant.export(quantized, path), or quantized.compile()",
            )
        inputs = [x, *others]
        for i, limits in enumerate(self.input_limits):
            if limits is not None:
                inputs[i] = limited(inputs[i], *limits)
        try:
            out = self._computed(*inputs)
        except RuntimeError as error:  # PyTorch's says which of its backends has no kernel
            refused = self._reads_integers(inputs)
            if refused is None:
                raise
            raise refused from error
        return out if self.limits is None else limited(out, *self.limits)

    def _reads_integers(self, inputs: list[torch.Tensor]) -> UsageError | None:
        floats = [x for x in inputs if type(x) is torch.Tensor and not x.is_quantized]
        if not floats:
            return None
        dtype = str(floats[0].dtype).removeprefix("torch.")
        return UsageError(
            f"a {self._get_name()} reads a quantized tensor, and was given {dtype}",
            where=f"nn.quantized.{type(self).__name__}, called with {dtype}{list(floats[0].shape)}",
            fix="layer(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)), with the scale of its input",
        )

    def _computed(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.compute(*inputs)

    @classmethod
    def from_reference(
        cls: type[_ScaledT], module: nn.Module, scale: Any, zero_point: Any
    ) -> _ScaledT:
        """The quantized form of a float module, with which it shares parameters."""
        made = bare(cls, {})
        for name, value in vars(module).items():
            made.__dict__[name] = dict(value) if type(value) is dict else value
        made._scaled(scale, zero_point)
        return made

    @classmethod
    def from_float(
        cls: type[_ScaledT],
        mod: nn.Module,
        use_precomputed_fake_quant: bool = False,  # noqa: ARG003
    ) -> _ScaledT:
        """The quantized form of a float module that was observed, by ``activation_post_process``."""
        made = cls.from_reference(_without_observer(mod), 1.0, 0)
        made._measured(mod)
        return made

    def _measured(self, mod: Any) -> None:
        """Take scale, zero point and limits of the observer of ``mod``."""
        observer = getattr(mod, "activation_post_process", None)
        numbers: dict[str, Any] = {"qscheme": None}
        if observer is not None:
            numbers = qparam_dict(observer)
        if numbers["qscheme"] is not None:
            self._scaled(numbers["scale"].item(), numbers["zero_point"].item())
            usual = quantize_bounds(numbers["dtype"])
            least, most = (
                numbers.get(f"quant_{end}", u) for end, u in zip(_ENDS, usual, strict=True)
            )
            self.limits = None if (least, most) == usual else (least, most)

    def _scaled(self, scale: Any, zero_point: Any) -> None:
        setattr(self, "scale", scale)  # noqa: B010 - a property, for mypy
        setattr(self, "zero_point", zero_point)  # noqa: B010

    def _get_name(self) -> str:
        return f"Quantized{type(self).__name__}"

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), self._qparams_repr())))

    def _qparams_repr(self) -> str:
        if self._buffers.get("scale") is None:
            return "dtype=torch.float32"
        return f"scale={self.scale}, zero_point={self.zero_point}"


def _without_observer(module: nn.Module) -> Any:
    """A module with the same settings, tensors and children, without observer, request and hooks."""
    kept = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "qconfig"}
    made: Any = bare(type(module), kept)
    for table in ("_parameters", "_buffers", "_modules"):
        made.__dict__[table] = dict(vars(module)[table])
    made._modules.pop("activation_post_process", None)
    return made


def held(module: nn.Module, name: str) -> torch.Tensor:
    """A buffer of a quantized layer. Raises ``AttributeError``.

    >>> held(nn.BatchNorm1d(1), "running_var")
    tensor([1.])
    """
    tensor = module._buffers.get(name)
    if tensor is None:
        raise AttributeError(f"a {type(module).__name__} whose result is float has no {name}")
    return tensor


def limited(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """A quantized tensor whose integers lie between ``low`` and ``high``.

    >>> limited(torch.quantize_per_tensor(torch.tensor([0.5, 9.0]), 0.5, 0, torch.quint8), 0, 9)
    tensor([0.5000, 4.5000], size=(2,), dtype=torch.quint8,
           quantization_scheme=torch.per_tensor_affine, scale=0.5, zero_point=0)
    """
    integers = x.int_repr().clamp(low, high)
    return torch._make_per_tensor_quantized_tensor(integers, x.q_scale(), x.q_zero_point())


def moved(x: torch.Tensor, by: int) -> torch.Tensor:
    storage = torch.uint8 if by > 0 else torch.int8
    integers = (x.int_repr().to(torch.int16) + by).to(storage)
    return torch._make_per_tensor_quantized_tensor(integers, x.q_scale(), x.q_zero_point() + by)


class Weighted(Scaled):
    """A module with an integer weight.

    ``weight()`` is the quantized tensor, ``bias()`` the float bias or ``None``, as of PyTorch's modules;
    in the ``state_dict``: ``weight`` (integers), ``weight_scale``, ``weight_zero_point``, ``bias``.
    ``packing``: the setting of the engine to pack the weight for. ``saturates``: the engine's sums would, on
    this CPU; ``real``, the float function, and one rounding take their place. ``kernel`` makes what computes
    the result of the tensors, by name; without one PyTorch's operator does. A layer of integers whose result
    is float has a kernel, and no scale; ``followed_by``: the function that its kernel computes of that.
    """

    packing: Callable[[], AbstractContextManager[Any]] = nullcontext
    kernel: Callable[[Mapping[str, Any]], Callable[..., torch.Tensor]] | None = None
    saturates: bool = False
    followed_by: str = ""
    real: Callable[..., torch.Tensor]

    _weight_axis: int

    @classmethod
    def from_reference(
        cls: type[_ScaledT], module: nn.Module, scale: Any = 1.0, zero_point: Any = 0
    ) -> _ScaledT:
        """The quantized form of a reference module, with which it shares the integers."""
        source: Any = module[0] if isinstance(module, nn.Sequential) else module
        settings = {k: v for k, v in vars(source).items() if not k.startswith(("_", "weight_"))}
        made: Any = bare(cls, settings)
        made._take(*(getattr(source, name, None) for name in _TENSORS))
        made._weight_axis = source.weight_axis
        made._of(module)
        made._scaled(scale, zero_point)
        result: _ScaledT = made
        return result

    @classmethod
    def from_float(
        cls: type[_ScaledT],
        mod: Any,
        use_precomputed_fake_quant: bool = False,  # noqa: ARG003
    ) -> _ScaledT:
        """The quantized form of a float or QAT module that was observed: with ``qconfig`` (or
        ``weight_fake_quant``), by whose ``weight`` its weight is quantized, and the observer of its result,
        ``activation_post_process``."""
        source = mod.to_float() if hasattr(mod, "to_float") else mod
        root: Any = source[0] if isinstance(source, nn.Sequential) else source
        observer = cls._observer(mod)  # type: ignore[attr-defined]  # of this class, which a Scaled need not be
        observer(root.weight.detach())
        names = (kind.__name__ for kind in cls.__mro__ if hasattr(reference, kind.__name__))
        integers = getattr(reference, next(names)).from_float(root, qparam_dict(observer))
        if root is not source:
            source = _without_observer(source)
            source._modules["0"] = integers
        made = cls.from_reference(integers if root is source else source)  # type: ignore[call-arg]
        made._measured(mod)
        return made

    @classmethod
    def _observer(cls, mod: Any) -> Any:
        trained = getattr(mod, "weight_fake_quant", None)
        if trained is None and getattr(mod, "qconfig", None) is None:
            kind = type(mod).__name__
            raise ConfigError(
                f"the {kind} to quantize has no qconfig",
                where=f"nn.quantized.{cls.__name__}.from_float(module)",
                fix="module.qconfig = backquant.get_default_qconfig('x86')",
            )
        return mod.qconfig.weight() if trained is None else trained

    def _of(self, module: nn.Module) -> None:
        """Take what else the module says."""

    def _take(self, *tensors: torch.Tensor | None) -> None:
        held = (None if tensor is None else tensor.detach() for tensor in tensors)
        self._buffers.update(zip(_TENSORS, held, strict=True))

    def _computed(self, *inputs: torch.Tensor) -> torch.Tensor:
        if self.kernel is not None:
            found: torch.Tensor = self._packed(*inputs)
            return found
        if not self.saturates:
            signed = inputs[0].dtype == torch.qint8
            return self._unsigned(*inputs) if signed else self.compute(*inputs)
        result = self.real(*(x.dequantize() for x in inputs))
        return torch.quantize_per_tensor(result, self.scale, self.zero_point, inputs[0].dtype)

    def _unsigned(self, *inputs: torch.Tensor) -> torch.Tensor:
        """As kernels do with int8: integers and zero points move up by 128, and back."""
        _ = self._packed
        twin = bare(type(self), vars(self))
        twin._buffers = {**self._buffers, "zero_point": held(self, "zero_point") + SIGNED}
        return moved(twin.compute(*(moved(x, SIGNED) for x in inputs)), -SIGNED)

    def weight(self) -> torch.Tensor:
        """The weight as a quantized tensor; with scales of groups, for which PyTorch has none, its floats."""
        return self._weight("weight")

    def _weight(self, name: str) -> torch.Tensor:
        parts = (held(self, name + part) for part in ("", "_scale", "_zero_point"))
        integers, scale, zero_point = parts
        if integers.is_floating_point():
            return integers
        if scale.dim() > 1:
            block = block_of(integers.shape, scale.shape)
            return dequantize_tensor(integers, scale, zero_point, self._weight_axis, block)
        if scale.dim() == 0 or scale.numel() == 1:
            make = torch._make_per_tensor_quantized_tensor
            return make(integers, float(scale.reshape(())), int(zero_point.reshape(())))
        per_channel = torch._make_per_channel_quantized_tensor
        return per_channel(integers, scale.double(), zero_point, self._weight_axis)

    def _take_weight(self, name: str, weight: torch.Tensor) -> None:
        if weight.is_quantized and weight.qscheme() in _BY_CHANNEL:
            scale, zero_point = weight.q_per_channel_scales(), weight.q_per_channel_zero_points()
            self._weight_axis = weight.q_per_channel_axis()
        elif weight.is_quantized:
            scale = torch.tensor(weight.q_scale())
            zero_point = torch.tensor(weight.q_zero_point())
        else:
            scale, zero_point = torch.ones(()), torch.zeros(())
        integers = weight.int_repr() if weight.is_quantized else weight.half()
        held = (integers, scale.float(), zero_point.long())
        names = (name, f"{name}_scale", f"{name}_zero_point")
        self._buffers.update(zip(names, held, strict=True))

    def bias(self) -> torch.Tensor | None:
        """The float bias."""
        return self._buffers["bias"]

    def set_weight_bias(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take another quantized weight and bias, as PyTorch's modules do."""
        self._take_weight("weight", weight)
        self._buffers["bias"] = bias

    @property
    def _packed(self) -> Any:
        """The engine's object, of the tensors as they are."""
        now = [(id(t), None if t is None else t._version) for t in self._buffers.values()]
        kept: Any = self.__dict__.get("_cached")
        if kept is None or kept[0] != now:
            with self.packing():
                made = self._prepack() if self.kernel is None else self.kernel(self._buffers)
            kept = self.__dict__["_cached"] = now, made
        return kept[1]

    def _prepack(self) -> Any:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": None}

    def _qparams_repr(self) -> str:
        function = f", followed_by={self.followed_by}" if self.followed_by else ""
        return f"{super()._qparams_repr()}{function}, qscheme={self._qscheme()}"

    def _qscheme(self) -> torch.qscheme | str:
        scale, zero_point = (held(self, f"weight_{part}") for part in ("scale", "zero_point"))
        if scale.dim() > 1:
            return f"per_group(size={held(self, 'weight').shape[-1] // scale.shape[-1]})"
        if zero_point.is_floating_point():
            return torch.per_channel_affine_float_qparams
        return torch.per_channel_affine if scale.numel() > 1 else torch.per_tensor_affine
