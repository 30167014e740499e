"""The qparams of many small weights at once: the same bits, in a fraction of the time.

To look at one weight takes some thirty calls of torch, whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from backquant.dtypes import affine_qparams
from backquant.observe.per_channel import PerChannelMinMaxObserver
from backquant.observe.qparams import qparam_dict

_SMALL = 1 << 14  # values of a weight; of larger ones calling is the smaller part
_PART = 1 << 20  # values that are looked at together


def weights_together(
    make_observer: Callable[[], Any], weights: Iterable[Tensor]
) -> dict[int, dict[str, Any]]:
    """What ``qparam_dict`` gives of an observer that saw one weight, by the ``id`` of the weight.

    Left out are weights that are large, alone of their size, not float32, not on the CPU or not
    finite; and all of them when ``make_observer`` makes no ``PerChannelMinMaxObserver`` over the first axis.

    >>> one, other, alone = torch.ones(2, 3), torch.zeros(2, 3), torch.ones(5, 5)
    >>> found = weights_together(PerChannelMinMaxObserver, [one, other, alone])
    >>> len(found), found[id(one)]["scale"]
    (2, tensor([0.0039, 0.0039]))
    """
    alike: dict[tuple[int, int], dict[int, Tensor]] = {}
    for weight in weights:
        if _is_small(weight):
            alike.setdefault((len(weight), weight.numel()), {})[id(weight)] = weight
    several = {size: each for size, each in alike.items() if len(each) > 1}
    observer = make_observer() if several else None
    if type(observer) is not PerChannelMinMaxObserver or observer.ch_axis != 0:
        return {}
    if observer.min_val.dtype != torch.float32 or observer.min_val.device.type != "cpu":
        return {}
    found: dict[int, dict[str, Any]] = {}
    for (_, number), each in several.items():
        names, step = list(each), max(1, _PART // number)
        for start in range(0, len(names), step):
            part = names[start : start + step]
            found |= _measured(observer, {name: each[name] for name in part})
    return found


def _is_small(weight: Tensor) -> bool:
    plain = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return plain and weight.dim() > 1 and 0 < weight.numel() <= _SMALL


def _measured(
    observer: PerChannelMinMaxObserver, weights: dict[int, Tensor]
) -> dict[int, dict[str, Any]]:
    """The qparams of weights that have the same number of channels and of values."""
    values = torch.stack([weight.detach().reshape(len(weight), -1) for weight in weights.values()])
    low, high = values.amin(2), values.amax(2)
    if not bool(torch.isfinite(high - low).all()):
        return {}
    qparams = affine_qparams(low.view(-1), high.view(-1), observer.quant_range, observer.eps)
    scales, zero_points = (each.view(low.shape).unbind() for each in qparams)
    return {
        name: qparam_dict(observer, (scale.clone(), zero_point.clone()))
        for name, scale, zero_point in zip(weights, scales, zero_points, strict=True)
    }
