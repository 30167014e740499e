"""Which operator gives as a new value what another one writes into its first argument."""

from __future__ import annotations

from functools import cache

import torch
from torch._ops import OpOverload

_aten = torch.ops.aten


@cache
def functional(overload: OpOverload) -> OpOverload | None:
    """``aten.add.Tensor`` for ``aten.add_.Tensor``: of the same arguments, whatever the name (of
    ``aten.pow_.Scalar`` it is ``aten.pow.Tensor_Scalar``; ``aten.pow.Scalar`` raises a number to a tensor).

    >>> functional(_aten.floor_divide_.Tensor), functional(_aten.rrelu_with_noise_.default)
    (<OpOverload(op='aten.floor_divide', overload='default')>, None)
    """
    name = overload._schema.name.split("::")[1]
    packet = getattr(_aten, name.removesuffix("_"), None) if name.endswith("_") else None
    found = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    wanted = _arguments(overload)
    return next(
        (one for one in found if not one._schema.is_mutable and _arguments(one) == wanted), None
    )


def _arguments(overload: OpOverload) -> list[tuple[str, str, bool]]:
    return [(a.name, str(a.type), a.kwarg_only) for a in overload._schema.arguments]
