"""What a float model is not: prepared or quantized already, or with weights that are no numbers.

1. NaN and infinite weights become plausible integers. They are refused in parameters and in the statistics of
   batch norms, a variance below zero too. Buffers may hold them (masks), and minus infinity may stand in
   parameters of a model's own.
2. A model with observers is converted, not quantized: they would measure on in the result. A reference
   model's weights are integers, which would be rounded a second time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from backquant.convert import ReferenceModel
from backquant.errors import UsageError
from backquant.nn.quantized.reference.integer_weights import IntegerWeights
from backquant.observe.protocol import is_observer_or_fake_quantize
from backquant.prepare import prepared_state
from backquant.runtime import QuantizedModel

_LAYERS = ("torch.", "backquant.")
_TORCHAO = "torchao."  # subclasses of tensors, which hold integers
_RANGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refuse_not_finite(model: nn.Module) -> None:
    """Raise ``UsageError`` for weights that are no numbers (rule 1); names the first.

    >>> refuse_not_finite(nn.Linear(2, 2))
    """
    for name, tensor, may_be_low in _weights(model):
        low, high = _range(tensor)
        is_low = low == -math.inf and may_be_low and high < math.inf
        if (math.isfinite(low) and math.isfinite(high)) or is_low:
            if low < 0 and name.endswith("running_var"):
                raise _below_zero(name, low)
            continue
        values = tensor.detach().float()
        count = f"{int(values.isnan().sum())} NaN and {int(values.isinf().sum())} infinite values"
        raise UsageError(
            f"{name!r} holds {count} among {values.numel()}, which no integers stand for",
            where=name,
            fix="a checkpoint from before the training diverged; these are the tensors to look at:\n"
            "[name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()]",
        )


def _below_zero(name: str, low: float) -> UsageError:
    return UsageError(
        f"{name!r} holds {low:g}, and no variance is below 0",
        where=name,
        fix="load the checkpoint again, by the keys of model.state_dict()",
    )


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The tensors that rule 1 is about, by name, and whether they may hold minus infinity."""
    for path, part in model.named_modules():
        prefix = f"{path}." if path else ""
        own = not type(part).__module__.startswith(_LAYERS)
        for name, tensor in part.named_parameters(recurse=False):
            yield f"{prefix}{name}", tensor, own
        if isinstance(part, _NormBase):
            for name in ("running_mean", "running_var"):
                if getattr(part, name) is not None:
                    yield f"{prefix}{name}", getattr(part, name), False


def _range(tensor: torch.Tensor) -> tuple[float, float]:
    """The smallest and largest value, both NaN where one is; of tensors without floats in memory (0, 0)."""
    is_here = tensor.layout is torch.strided and tensor.device.type != "meta"
    if not is_here or not tensor.is_floating_point() or not tensor.numel():
        return 0.0, 0.0
    values = tensor.detach()
    low, high = (values if values.dtype in _RANGED else values.float()).aminmax()
    return low.item(), high.item()


def refuse_prepared(model: nn.Module) -> None:
    """Raise ``UsageError`` for a model with observers (rule 2).

    >>> refuse_prepared(nn.Linear(2, 2))
    """
    observers = (p for p, part in model.named_modules() if is_observer_or_fake_quantize(part))
    first = next(observers, None)
    if first is None:
        return
    raise UsageError(
        f"the model is prepared already: {first!r} is a {type(model.get_submodule(first)).__name__}",
        where="model",
        fix=_conversion(model),
    )


def refuse_quantized(model: nn.Module) -> None:
    """Raise ``UsageError`` for a quantized model and for a reference model, or one that holds either's
    layers (rule 2).

    >>> refuse_quantized(nn.Linear(2, 2))
    """
    for path, part in model.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            kind = type(parameter)
            if kind.__module__.startswith(_TORCHAO):
                raise UsageError(
                    f"the model is quantized already, by torchao: {path}.{name} is a {kind.__name__}",
                    where="model",
                    fix="pass the float model; or float weights: parameter.dequantize()",
                )
        if isinstance(part, (QuantizedModel, ReferenceModel, IntegerWeights)):
            held = f": {path!r} is a {type(part).__name__}" if path else ""
            raise UsageError(
                f"the model is quantized already{held}",
                where="model",
                fix="pass the float model it was made from",
            )


def _conversion(model: nn.Module) -> str:
    for path, part in model.named_modules():
        try:
            prepared_state(part)
        except UsageError:
            continue
        place = f"model.get_submodule({path!r})" if path else "model"
        return f"backquant.convert_fx({place})   # or pass the float model it was made from"
    return "pass the float model it was made from"
