"""May a match be quantized as asked? Every dtype config of its entry answers with its refusals.

Equal to PyTorch's decision for functional operators and activations, and beyond it:

1. Weight dtype and constraints count for modules, too (PyTorch looks at them for functional
   operators only, and drops modules with another weight dtype in ``convert``, silently).
2. Bounds count one by one, ``scale_max_upper_bound`` and the extended constraints count
   (see ``constraints``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from backquant.backend_config import BackendPatternConfig, DTypeConfig
from backquant.backend_config.describe import describe_dtype
from backquant.dtypes import dtype_name, find_dtype, is_narrow_float
from backquant.match.constraints import check_tensor, request_text
from backquant.match.plan import TensorRequest
from backquant.match.refusal import Refusal
from backquant.match.scale_rules import (
    ScaleDemand,
    bias_range_demand,
    bias_step_demand,
    ratio_demands,
    scale_demands,
)
from backquant.reason_codes import ReasonCode


@dataclass(frozen=True)
class QConfigRequest:
    """What the QConfig of a match asks for; ``output`` None: outputs as ``activation``."""

    activation: TensorRequest | None
    weight: TensorRequest | None
    output: TensorRequest | None = None

    @property
    def of_output(self) -> TensorRequest | None:
        """What is asked for outputs."""
        return self.activation if self.output is None else self.output

    @property
    def bias_dtype(self) -> torch.dtype:
        """float16 or bfloat16 when activation and weight are statically of that dtype, else float32.

        *Different:* PyTorch knows float16 only.
        """
        if self.activation is None or self.weight is None or self.activation.is_dynamic:
            return torch.float32
        dtype = self.activation.dtype
        narrow = dtype == self.weight.dtype and is_narrow_float(dtype)
        return dtype if narrow else torch.float32


@dataclass(frozen=True)
class Roles:
    """Which tensors of an occurrence have to be admitted.

    ``input_known`` and ``output_known``: whether input and output may be float tensors at all.
    """

    activation: bool
    weight: bool
    bias: bool
    input_known: bool = True
    output_known: bool = True
    output: bool = True  # False: the entry leaves the output in float
    bias_known: bool = True  # True: the bias is a parameter, and can be quantized at conversion
    sums_axis: int | None = None  # the axis of the weight along which the output channels lie
    unmet: tuple[tuple[Refusal, ...], ...] = ()  # conditions that do not hold, by dtype config


@dataclass(frozen=True)
class Ruling:
    """The first dtype config that admits the request, or the refusals of each.

    ``refused[i]`` holds (role, refusal) pairs of dtype config ``i``; ``scales`` is what
    measured scales have to satisfy.
    """

    dtype_config: int | None
    refused: tuple[tuple[tuple[str, Refusal], ...], ...] = ()
    scales: tuple[ScaleDemand, ...] = ()

    @property
    def nearest(self) -> int | None:
        """The dtype config with the fewest refusals that concern a constraint, not the dtype."""
        if not self.refused:
            return None
        return min(range(len(self.refused)), key=lambda i: (_distance(self.refused[i]), i))


def judge(config: BackendPatternConfig, requests: QConfigRequest, roles: Roles) -> Ruling:
    """The ruling of an entry on a request.

    >>> entry = BackendPatternConfig(torch.nn.Linear).add_dtype_config(
    ...     DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float))
    >>> weight = TensorRequest(torch.int8, "O")
    >>> requests = QConfigRequest(TensorRequest(torch.quint8, "MinMaxObserver"), weight)
    >>> ruling = judge(entry, requests, Roles(activation=True, weight=True, bias=False))
    >>> [(role, refusal.rule) for role, refusal in ruling.refused[0]]
    [('weight', 'dtype-token')]
    """
    refused = []
    for position, dtype_config in enumerate(config.dtype_configs):
        conditions = roles.unmet[position] if roles.unmet else ()
        found = (
            *(("operator", refusal) for refusal in conditions),
            *_refusals(dtype_config, requests, roles),
        )
        if not found:
            return Ruling(position, (), tuple(_scales(dtype_config, requests, roles)))
        refused.append(found)
    return Ruling(None, tuple(refused))


class Judge:
    """``judge``, once for each distinct question, however many nodes ask it.

    >>> entry, requests = BackendPatternConfig(torch.add), QConfigRequest(None, None)
    >>> Judge().rule(0, entry, requests, Roles(True, False, False))
    Ruling(dtype_config=None, refused=(), scales=())
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, QConfigRequest, Roles], Ruling] = {}

    def rule(
        self, entry: int, config: BackendPatternConfig, requests: QConfigRequest, roles: Roles
    ) -> Ruling:
        """The ruling of the entry at a position in its backend."""
        key = (entry, requests, roles)
        if key not in self._known:
            self._known[key] = judge(config, requests, roles)
        return self._known[key]


def _refusals(
    config: DTypeConfig, requests: QConfigRequest, roles: Roles
) -> Iterator[tuple[str, Refusal]]:
    if roles.activation and config.input_dtype is not None:
        yield from _input_refusals(config, requests, roles)
    if roles.weight and config.weight_dtype is not None:
        if requests.weight is None:
            demand = describe_dtype(config.weight_dtype_with_constraints)
            yield "weight", Refusal(ReasonCode.NO_OBSERVER, "no weight observer", demand)
        else:
            for refusal in check_tensor(requests.weight, config.weight_dtype_with_constraints):
                yield "weight", refusal
            yield from _no_step_of_sums(config, requests.weight, roles)
    derived = config.bias_scale is not None and roles.bias_known
    if roles.bias and config.bias_scale is not None and not derived:
        fix = "a bias that is a parameter or a buffer of the model"
        owned = "that belongs to the model"
        yield "bias", Refusal(ReasonCode.DTYPE, "that is computed", owned, fix)
    elif roles.bias and not derived and config.bias_dtype not in (None, requests.bias_dtype):
        asked = dtype_name(requests.bias_dtype)
        yield "bias", Refusal(ReasonCode.DTYPE, asked, dtype_name(config.bias_dtype))
    if roles.output and config.output_dtype is not None:
        yield from _output_refusals(config, requests, roles)


def _no_step_of_sums(
    config: DTypeConfig, request: TensorRequest, roles: Roles
) -> Iterator[tuple[str, Refusal]]:
    """Refuses scales along other axes than the output channels where the hardware needs one step for each
    sum: products with different weight scales cannot be summed as integers."""
    if config.bias_scale == "input_times_weight" and request.shared_over.has_blocks:
        admitted = "one scale, or one for each channel that comes out, for integer biases"
        yield "weight", Refusal(ReasonCode.GRANULARITY, request.shared_over.words, admitted)
    wanted = roles.sums_axis
    if wanted is None or not request.is_per_channel or not reads_sums(config):
        return
    axes = (request.ch_axis or 0, wanted)
    if axes[0] != wanted:
        yield "weight", Refusal(ReasonCode.CH_AXIS, *(f"channels on axis {axis}" for axis in axes))


def reads_sums(config: DTypeConfig) -> bool:
    """Whether the description says something of the integer sums themselves (requantization, bias or ratio).

    >>> reads_sums(DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float, requantization="shift"))
    True
    """
    by_integers = config.requantization not in (None, "float")
    return (
        by_integers
        or config.bias_scale == "input_times_weight"
        or config.requantization_ratio is not None
    )


def _input_refusals(
    config: DTypeConfig, requests: QConfigRequest, roles: Roles
) -> Iterator[tuple[str, Refusal]]:
    request = requests.activation
    demand = describe_dtype(config.input_dtype_with_constraints)
    if not roles.input_known:
        yield "input", Refusal(ReasonCode.NO_TENSOR, "no float tensor", demand)
    elif request is None:
        yield "input", Refusal(ReasonCode.NO_OBSERVER, "no activation observer", demand)
    else:
        if request.is_dynamic != bool(config.is_dynamic):
            names = {True: "dynamic quantization", False: "static quantization"}
            wanted = names[bool(config.is_dynamic)]
            yield "input", Refusal(ReasonCode.DYNAMIC, names[request.is_dynamic], wanted)
        row = find_dtype(request.dtype)
        in_blocks = request.is_dynamic and request.shared_over.has_blocks
        if row is not None and row.packed and not in_blocks:
            asked = dtype_name(request.dtype)
            yield (
                "input",
                Refusal(ReasonCode.ACTIVATION_DTYPE, asked, "a dtype that does not share bytes"),
            )
        for refusal in check_tensor(request, config.input_dtype_with_constraints):
            yield "input", refusal


def _output_refusals(
    config: DTypeConfig, requests: QConfigRequest, roles: Roles
) -> Iterator[tuple[str, Refusal]]:
    request = requests.of_output
    demand = config.output_dtype_with_constraints
    if not roles.output_known:
        yield "output", Refusal(ReasonCode.NO_TENSOR, "no float tensor", describe_dtype(demand))
    elif request is None:
        yield (
            "output",
            Refusal(ReasonCode.NO_OBSERVER, "no activation observer", describe_dtype(demand)),
        )
    elif request.is_dynamic:
        # A dynamically quantized operator computes its output in float32.
        if config.output_dtype != torch.float32:
            yield "output", Refusal(ReasonCode.DTYPE, "float32 (dynamic)", describe_dtype(demand))
    else:
        for refusal in check_tensor(request, demand):
            yield "output", refusal


def _scales(config: DTypeConfig, requests: QConfigRequest, roles: Roles) -> Iterator[ScaleDemand]:
    tensors = (
        ("input", roles.activation, requests.activation, config.input_dtype_with_constraints),
        ("weight", roles.weight, requests.weight, config.weight_dtype_with_constraints),
        ("output", roles.output, requests.of_output, config.output_dtype_with_constraints),
    )
    for role, present, request, demand in tensors:
        if present and request is not None:
            yield from scale_demands(role, request, demand)
    if config.requantization_ratio is not None and roles.weight and requests.weight is not None:
        yield from ratio_demands(config.requantization_ratio)
    bound = config.bias_step_upper_bound
    if bound is not None and roles.weight and requests.weight is not None:
        yield bias_step_demand(float(bound))
    weight = config.weight_dtype_with_constraints
    is_narrow = config.bias_dtype in (torch.int8, torch.uint8, torch.int16)
    if config.bias_scale == "output" or (
        config.bias_scale and (is_narrow or weight.scale_exact_match is not None)
    ):
        yield bias_range_demand(config.bias_dtype)


# Distance of a request from a dtype config: conditions weigh most, then static or dynamic, dtypes, bounds.
_WEIGHTS = {
    ReasonCode.CONDITION: 1000,
    ReasonCode.DYNAMIC: 100,
    ReasonCode.DTYPE: 10,
    ReasonCode.NO_OBSERVER: 10,
    ReasonCode.DTYPE_TOKEN: 5,
}

# One that has the dtypes requested, and is refused by conditions alone, is nearer than one of other dtypes.
_CONDITIONS_ALONE = 8


def _distance(refusals: tuple[tuple[str, Refusal], ...]) -> int:
    if all(refusal.rule == ReasonCode.CONDITION for _, refusal in refusals):
        return _CONDITIONS_ALONE
    return sum(_WEIGHTS.get(refusal.rule, 1) for _, refusal in refusals)


def tensor_text(role: str, request: TensorRequest | None) -> str:
    """A request for one tensor in words.

    >>> tensor_text("weight", TensorRequest(torch.qint8, "O", quant_min=-128, quant_max=127))
    'weight qint8 [-128, 127]'
    """
    return f"{role} {request_text(request)}" if request is not None else f"{role} not observed"
