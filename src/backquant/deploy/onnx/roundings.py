"""The ``rounding`` and ``requantization`` of a description in ONNX, whose own QuantizeLinear rounds ties to
even.

1. Each is first written as ``QuantizeLinear``, because compilers look for pairs of QuantizeLinear and
DequantizeLinear. Then each node

2. becomes the call of a function in the domain ``backquant``, which the file holds. The body of the function
computes the described arithmetic by operators of ONNX. A compiler can read its name and inputs (multiplier
and shift among them); a runtime that does not know the name runs the body. Or,

3. with the option ``standard_quantize``, it stays ``QuantizeLinear``, and its metadata holds the described
arithmetic.

The arithmetic is that of ``backquant.dtypes.arithmetic``, bit for bit: integer sums are recovered in
float64. Source: ONNX operator documentation, Mod-13 (the sign of the divisor), Div-14, Round-11, Clip-13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from backquant.deploy.job import ExportJob
from backquant.deploy.onnx.exporter import ORIGIN
from backquant.deploy.onnx.rewrite import OnnxCalls, rewrite
from backquant.deploy.onnx.translate import Table, quantize_linear
from backquant.deploy.roundings import STANDARD, arithmetic_words, described_quantizes
from backquant.dtypes import Requantization, quantize_multiplier, shift_of
from backquant.lower.qdq import described_arithmetic

if TYPE_CHECKING:
    import onnx_ir as ir

#: The domain of the functions.
DOMAIN = "backquant"

_UP = {
    "half_up": "up = GreaterOrEqual (twice, whole)",
    "half_away": "over = Greater (twice, whole)\n"
    "half = Equal (twice, whole)\n"
    "none = Constant <value_int = 0> ()\n"
    "least = GreaterOrEqual (wide, none)\n"
    "tie = And (half, least)\n"
    "up = Or (over, tie)",
    "half_even": "over = Greater (twice, whole)\n"
    "half = Equal (twice, whole)\n"
    "two_parts = Constant <value_int = 2> ()\n"
    "odd = Mod (floor, two_parts)\n"
    "is_odd = Cast <to = 9> (odd)\n"
    "tie = And (half, is_odd)\n"
    "up = Or (over, tie)",
}
_ROUND = {
    "half_up": "half = Constant <value = double {0.5}> ()\n"
    "above = Add (steps, half)\n"
    "rounded = Floor (above)",
    "half_away": "half = Constant <value = double {0.5}> ()\n"
    "size = Abs (steps)\n"
    "above = Add (size, half)\n"
    "whole = Floor (above)\n"
    "side = Sign (steps)\n"
    "rounded = Mul (side, whole)",
}
_STEPS = "wide = Cast <to = 11> (x)\nunit = Cast <to = 11> (scale)\nsteps = Div (wide, unit)\n"
_INTO_RANGE = (
    "moved = Add (rounded, zero)\nheld = Clip (moved, low, high)\ny = CastLike (held, zero_point)\n"
)
_SUMS = (
    "float_sums = Round (steps)\n"
    "whole_sums = Cast <to = 7> (float_sums)\n"
    "least_sum = Constant <value = int64 {-2147483648}> ()\n"
    "largest_sum = Constant <value = int64 {2147483647}> ()\n"
    "sums = Clip (whole_sums, least_sum, largest_sum)\n"
)
_SHIFTED = (
    "rest = Mod (wide_sums, whole)\n"
    "below = Sub (wide_sums, rest)\n"
    "floor = Div (below, whole)\n"
    "two = Constant <value_int = 2> ()\n"
    "twice = Mul (rest, two)\n"
)
_TWICE = (
    "moved_sums = Mul (sums, left)\n"
    "left_sums = Clip (moved_sums, least_sum, largest_sum)\n"
    "product = Mul (left_sums, multiplier)\n"
    "half_of_it = Constant <value = int64 {1073741824}> ()\n"
    "all_of_it = Constant <value = int64 {2147483648}> ()\n"
    "above_it = Add (product, half_of_it)\n"
    "rest_of_it = Mod (above_it, all_of_it)\n"
    "without = Sub (above_it, rest_of_it)\n"
    "divided = Div (without, all_of_it)\n"
    "wide_sums = Clip (divided, least_sum, largest_sum)\n"
)
_ONCE = "product = Mul (sums, multiplier)\nwide_sums = Mul (product, left)\n"


def described_quantize(job: ExportJob) -> Table:
    """Translations of the quantize operators that reference models have for described arithmetic."""
    own = torch.ops.backquant
    clips = bool(job.options.get(STANDARD, False))

    def rounded(x: Any, scale: float, *others: Any) -> Any:
        return quantize_linear(x, scale, *others[:4], clips=clips)

    def requantized(x: Any, _: Any, __: int, scale: float, *others: Any) -> Any:
        return quantize_linear(x, scale, *others[:4], clips=clips)

    return {own.quantize_rounded.default: rounded, own.requantize.default: requantized}


def spell_roundings(model: Any, job: ExportJob) -> None:
    """Rules 2 and 3, in place, on an ``onnx_ir.Model``."""
    described = described_quantizes(job)

    def spell(node: ir.Node) -> Any:
        made_for = described.get(node.metadata_props.get(ORIGIN, ""))
        if made_for is None:
            return None
        arithmetic, rounding = described_arithmetic(made_for)
        if job.options.get(STANDARD, False):
            words = arithmetic_words(made_for)
            node.metadata_props.update({f"backquant.{name}": word for name, word in words.items()})
            return None
        if arithmetic != "float":
            return _requantized(model, job, node, made_for)
        name = f"Quantize{_word(rounding)}"
        _add(model, name, _STEPS + _ROUND[rounding] + "\n" + _INTO_RANGE, ())
        return _as_function(node, name, _limits(made_for, np.float64), ())

    rewrite(model, {"QuantizeLinear": spell})


def _word(text: str) -> str:
    return "".join(part.capitalize() for part in text.split("_"))


def _limits(made_for: fx.Node, dtype: Any) -> dict[str, Any]:
    zero_point, low, high = _qparams(made_for)[1:4]
    return {
        name: np.array(v, dtype) for name, v in (("zero", zero_point), ("low", low), ("high", high))
    }


def _qparams(made_for: fx.Node) -> tuple[Any, ...]:
    first = 1 if described_arithmetic(made_for)[0] == "float" else 3
    return made_for.args[first : first + 5]


def _requantized(model: Any, job: ExportJob, node: ir.Node, made_for: fx.Node) -> Any:
    """Rule 2 for sums: the multiplier and the shift of the hardware become inputs of the function."""
    arithmetic, rounding = described_arithmetic(made_for)
    step, axis = made_for.args[1:3]
    assert isinstance(step, fx.Node)
    unit = job.module.get_buffer(str(step.target)).detach().double()
    kind = Requantization(arithmetic)
    real = unit / float(_qparams(made_for)[0])
    multiplier, shift = quantize_multiplier(real)
    if kind is Requantization.SHIFT:
        multiplier, shift = torch.ones_like(shift), shift_of(real)
    elif kind is Requantization.FIXED_POINT:
        shift = shift - 31
    places = {"scale": unit, "multiplier": multiplier, "left": 1 << shift.clamp(0, 31)}
    shape = (-1, *([1] * (-int(axis) - 1)))  # type: ignore[arg-type]
    found = {**places, "whole": 1 << (-shift).clamp(0, 62)}
    inputs = {name: value.reshape(shape).numpy() for name, value in found.items()}
    if unit.numel() == 1:
        inputs = {name: value.reshape(()) for name, value in inputs.items()}
    inputs |= _limits(made_for, np.int64)
    own = "" if kind is Requantization.FIXED_POINT_TWICE else _word(rounding)
    name = f"Requantize{_word(arithmetic)}{own}"
    more = ("multiplier", "left", "whole")
    _add(model, name, _requantized_body(kind, rounding), more)
    return _as_function(node, name, inputs, more)


def _requantized_body(kind: Requantization, rounding: str) -> str:
    twice = kind is Requantization.FIXED_POINT_TWICE
    up = _UP["half_away" if twice else rounding].replace("(wide,", "(wide_sums,")
    return (
        _STEPS
        + _SUMS
        + (_TWICE if twice else _ONCE)
        + _SHIFTED
        + up
        + "\none = Cast <to = 7> (up)\nrounded = Add (floor, one)\n"
        + _INTO_RANGE
    )


def _as_function(node: ir.Node, name: str, inputs: dict[str, Any], more: tuple[str, ...]) -> Any:
    """The call of the function in the place of ``node``: its value, scale, zero point, then ``more`` and
    the limits."""
    write = OnnxCalls(node)
    held = {part: write.constant(array, f"{node.name}/{part}") for part, array in inputs.items()}
    x, scale, zero_point = node.inputs[:3]
    last = (held[part] for part in (*more, "zero", "low", "high"))
    return write.call(name, x, held.get("scale", scale), zero_point, *last, domain=DOMAIN)


def _add(model: Any, name: str, body: str, more: tuple[str, ...]) -> None:
    import onnx
    import onnx_ir as ir

    version = model.opset_imports[""]
    inputs = ", ".join(("x", "scale", "zero_point", *more, "zero", "low", "high"))
    head = f'<domain: "{DOMAIN}", opset_import: ["": {version}]>\n{name} ({inputs}) => (y) {{\n'
    function = ir.serde.deserialize_function(onnx.parser.parse_function(f"{head}{body}}}"))
    model.functions[function.identifier()] = function
