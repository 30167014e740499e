"""Compare the request for one tensor with the constraints of the backend: one pure function per constraint.

Each function takes the request and the backend's ``DTypeWithConstraints`` and returns a ``Refusal``, or
``None`` where the request satisfies it. A constraint that is not set is always satisfied. Constraints on
scales are in ``scale_rules``.

PyTorch checks a range only when both of its bounds are set; here each is enforced on its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backquant.backend_config import DTypeWithConstraints
from backquant.backend_config.describe import range_text
from backquant.dtypes import Granularity, dtype_name, find_dtype, integer_range, plain_dtype
from backquant.errors import SpecError
from backquant.match.plan import TensorRequest
from backquant.match.refusal import Refusal, Rule
from backquant.match.scale_rules import SCALE_RULES
from backquant.reason_codes import ReasonCode


def dtype_matches(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """The dtype is the demanded token.

    >>> import torch
    >>> refusal = dtype_matches(TensorRequest(torch.uint8, "MinMaxObserver"),
    ...                         DTypeWithConstraints(torch.quint8))
    >>> refusal.rule, refusal.admitted
    ('dtype-token', 'quint8')
    """
    if demand.dtype is None or request.dtype == demand.dtype:
        return None
    # quint8 and uint8 (qint8, int8) have the same storage and still differ here; the reason code says so.
    rule = (
        ReasonCode.DTYPE_TOKEN
        if plain_dtype(request.dtype) == plain_dtype(demand.dtype)
        and integer_range(request.dtype) == integer_range(demand.dtype)
        and _bits(request.dtype) == _bits(demand.dtype)
        else ReasonCode.DTYPE
    )
    return Refusal(rule, dtype_name(request.dtype), dtype_name(demand.dtype))


def _bits(dtype: torch.dtype) -> int | None:
    row = find_dtype(dtype)
    return None if row is None else row.bits


def range_within(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """The quantized range lies within the demanded one; each bound counts on its own.

    >>> import torch
    >>> request = TensorRequest(torch.qint8, "MinMaxObserver", quant_min=-128, quant_max=127)
    >>> range_within(request, DTypeWithConstraints(torch.qint8, quant_min_lower_bound=-127)).admitted
    '[-127, …]'
    """
    low, high = demand.quant_min_lower_bound, demand.quant_max_upper_bound
    admitted = range_text(low, high)
    lower, upper = request.quant_min, request.quant_max
    if (low is not None and lower is None) or (high is not None and upper is None):
        unknown = f"{request.observer} with no quant_min and quant_max"
        return Refusal(ReasonCode.QUANT_RANGE, unknown, admitted)
    below = low is not None and lower is not None and lower < low
    above = high is not None and upper is not None and upper > high
    if below or above:
        return Refusal(ReasonCode.QUANT_RANGE, range_text(lower, upper), admitted)
    return None


def symmetry(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """The scheme is symmetric, or affine, as demanded.

    >>> import torch
    >>> request = TensorRequest(torch.qint8, "MinMaxObserver", qscheme="per_tensor_affine")
    >>> symmetry(request, DTypeWithConstraints(torch.qint8, symmetric=True)).admitted
    'a symmetric scheme'
    """
    if demand.symmetric is None or request.is_symmetric is demand.symmetric:
        return None
    wanted = "a symmetric scheme" if demand.symmetric else "an affine scheme"
    return Refusal(ReasonCode.SYMMETRIC, _scheme(request), wanted)


def granularity(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """The granularity of the scales is the one that the backend demands; by default per tensor or per
    channel.

    >>> import torch
    >>> request = TensorRequest(torch.qint8, "PerChannelMinMaxObserver", qscheme="per_channel_symmetric")
    >>> granularity(request, DTypeWithConstraints(torch.qint8, granularity="per_tensor")).asked
    'per_channel_symmetric'
    """
    if demand.granularity is None:
        if not request.granularity:
            return None
        wanted = "per tensor or per channel"
    else:
        admitted = Granularity.parse(demand.granularity)
        if admitted.admits(request.shared_over):
            return None
        wanted = admitted.words
    asked = request.shared_over.words if request.granularity else request.qscheme
    return Refusal(ReasonCode.GRANULARITY, asked or f"{request.observer} with no scheme", wanted)


def divides(
    request: TensorRequest, shape: Sequence[int], axes: Sequence[str] = ()
) -> Refusal | None:
    """The requested group or block size divides a weight of this shape; ``axes`` names the axes for messages.

    >>> import torch
    >>> request = TensorRequest(torch.int4, "O", granularity="per_group(size=128)")
    >>> refusal = divides(request, (8, 100), ("out_features", "in_features"))
    >>> refusal.asked, refusal.fix
    ('group size 128, in_features 100', 'group size 100 in place of 128')
    """
    shared = request.shared_over
    if not shared.has_blocks or not shape:
        return None
    names = dict(enumerate(axes))
    size = "group size" if shared.kind == "per_group" else "block size"
    try:
        wrong = shared.undivided(shape)
    except SpecError:
        asked = f"{shared.words} of a weight {list(shape)}"
        return Refusal(ReasonCode.GROUP_SIZE, asked, "a grid over the axes that the weight has")
    if wrong is None:
        return None
    axis = names.get(wrong.axis, f"axis {wrong.axis}")
    return Refusal(
        ReasonCode.GROUP_SIZE,
        f"{size} {wrong.size}, {axis} {wrong.length}",
        f"a {size} that divides {axis}",
        f"{size} {wrong.nearest} in place of {wrong.size}",
    )


def _scheme(request: TensorRequest) -> str:
    return request.qscheme or f"{request.observer} with no scheme"


def channel_axis(request: TensorRequest, demand: DTypeWithConstraints) -> Refusal | None:
    """Per channel, the channels lie on the demanded axis.

    >>> import torch
    >>> request = TensorRequest(torch.qint8, "O", qscheme="per_channel_symmetric", ch_axis=0)
    >>> channel_axis(request, DTypeWithConstraints(torch.qint8, ch_axis=1)).admitted
    'channels on axis 1'
    """
    if demand.ch_axis is None or not request.is_per_channel or request.ch_axis == demand.ch_axis:
        return None
    return Refusal(
        ReasonCode.CH_AXIS,
        *(f"channels on axis {axis}" for axis in (request.ch_axis, demand.ch_axis)),
    )


#: In the order in which they are reported. Rules after the first return None for another dtype.
RULES: tuple[Rule, ...] = (range_within, *SCALE_RULES, symmetry, granularity, channel_axis)


def check_tensor(request: TensorRequest, demand: DTypeWithConstraints) -> list[Refusal]:
    """Every rule that a request breaks; a demand without a dtype demands nothing.

    >>> import torch
    >>> request = TensorRequest(torch.qint8, "MinMaxObserver", quant_min=-128, quant_max=127)
    >>> narrow = DTypeWithConstraints(torch.qint8, quant_min_lower_bound=-127, quant_max_upper_bound=127)
    >>> [(broken.rule, broken.asked, broken.admitted) for broken in check_tensor(request, narrow)]
    [('quant-range', '[-128, 127]', '[-127, 127]')]
    """
    if demand.dtype is None:
        return []
    wrong = dtype_matches(request, demand)
    if wrong is not None:
        return [wrong]
    found = (rule(request, demand) for rule in RULES)
    return [refusal for refusal in found if refusal is not None]


def request_text(request: TensorRequest) -> str:
    """A request in words.

    >>> import torch
    >>> request_text(TensorRequest(torch.qint8, "MinMaxObserver", quant_min=-128, quant_max=127))
    'qint8 [-128, 127]'
    """
    text = dtype_name(request.dtype)
    if request.quant_min is not None or request.quant_max is not None:
        text += f" {range_text(request.quant_min, request.quant_max)}"
    return f"{text}, {request.shared_over.words}" if request.granularity else text
