"""How a deployment target wants the reference model written: rules about its quantize/dequantize nodes.

What was measured about each target stands in the descriptions of the backends; the steps that write a
reference model (prepare, match, convert) and the passes before an export read it from here. The
defaults are what ``torch.ao`` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from backquant.backend_config.checks import check_bool, check_choice, check_keys, within
from backquant.backend_config.leave_float import LeaveFloat, given_rules, rules_from
from backquant.backend_config.naming import operator_name
from backquant.backend_config.pattern import normal_form
from backquant.errors import SpecError

#: How the bias of a product is stored.
BIASES = ("float", "int32")
#: How a float addition of two activations is written.
ADDITIONS = ("add", "sum")
#: How attention that is quantized is written.
ATTENTIONS = ("whole", "products")
COLUMNS = ("columns", "lines", "integer_lines")
#: The fields that name operators.
OPERATOR_FIELDS = ("epilogues",)


#: How the weights of an exported model are stored.
WEIGHTS = ("integer", "quantized_float")


@dataclass(frozen=True, repr=False)
class QDQRules:
    """Rules about the quantize and dequantize nodes of reference models.

    1. ``dequantize_per_user``: every reader of a quantized value has a dequantize node of its own
       (ExecuTorch's partitioner needs it). Default: the readers share one.
    2. ``quantize_constants``: values that depend on no input of the model (a position embedding) are
       quantized, too, where a quantized operator reads them. Default: True. Operands of matrix products
       always are: they are weights.
    3. ``weights``: ``"integer"``: integers and a dequantize node; ``"quantized_float"``: floats, a
       quantize and a dequantize node, for targets that fold the weights themselves.
    4. ``bias``: of convolutions and matrix products in ONNX: ``"float"``, or ``"int32"``: integers with the
       scale input scale × weight scale.
    5. ``leave_float``: operators, and results of operators, that stay float at some places even if a
       mapping asks for integers.
    6. ``epilogues``: operators that the target computes at the end of the kernel of the convolution or
       matrix product before them: its result is not quantized if only the epilogue reads it. If an
       epilogue has two inputs, one may come from such a kernel; the other one is quantized.
    7. ``additions``: how a float addition of two activations is written in ONNX: ``"add"``, or ``"sum"``
       (of two) for a runtime that fuses an Add with the next operator into a kernel slower than the two.
    8. ``attention``: ``"whole"``: ``scaled_dot_product_attention`` stays one operator; ``"products"``: where
       a mapping asks for integers, it is decomposed into its matrix products and its softmax, each with an
       entry of its own.
    9. ``columns``: how convolutions along a column of one pixel (``[taps, 1]`` over ``[n, c, length, 1]``)
       are written: ``"columns"``, as they are, or for targets that are faster so ``"lines"``, with both axes
       of image, kernel and result swapped, of dequantized values; ``"integer_lines"``: of integers.

    Raises ``SpecError`` for a value outside its domain.

    >>> QDQRules(dequantize_per_user=True, leave_float=(LeaveFloat(("add",), unless_between_quantized=True),))
    QDQRules(dequantize_per_user=True, leave_float=(LeaveFloat((.add(),), unless_between_quantized=True),))
    >>> QDQRules(weights="int8")
    Traceback (most recent call last):
    backquant.errors.SpecError: weights cannot be 'int8'
      where  weights
      fix    one of 'integer', 'quantized_float'
    """

    dequantize_per_user: bool = False
    quantize_constants: bool = True
    weights: str = "integer"
    bias: str = "float"
    leave_float: tuple[LeaveFloat, ...] = ()
    epilogues: tuple[Any, ...] = ()
    additions: str = "add"
    attention: str = "whole"
    columns: str = "columns"

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is None:
                raise SpecError(f"{field.name} cannot be None", where=field.name)
        check_bool(self.dequantize_per_user, "dequantize_per_user")
        check_bool(self.quantize_constants, "quantize_constants")
        check_choice(self.weights, "weights", WEIGHTS)
        check_choice(self.bias, "bias", BIASES)
        check_choice(self.additions, "additions", ADDITIONS)
        check_choice(self.attention, "attention", ATTENTIONS)
        check_choice(self.columns, "columns", COLUMNS)
        object.__setattr__(self, "leave_float", given_rules(self.leave_float))
        for name in OPERATOR_FIELDS:
            object.__setattr__(self, name, _operators(getattr(self, name), name))

    def to_dict(self) -> dict[str, Any]:
        """The rules that differ from their defaults.

        >>> QDQRules(quantize_constants=False).to_dict()
        {'quantize_constants': False}
        """
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                values[field.name] = list(value) if isinstance(value, tuple) else value
        if self.leave_float:
            values["leave_float"] = [rule.to_dict() for rule in self.leave_float]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QDQRules:
        """The inverse of ``to_dict``. Raises ``SpecError`` for an unknown key.

        >>> QDQRules.from_dict({"quantize_constants": False}).quantize_constants
        False
        """
        check_keys(values, [field.name for field in fields(cls)], "QDQRules")
        rules = (
            {"leave_float": rules_from(values["leave_float"])} if "leave_float" in values else {}
        )
        return cls(**{**values, **rules})

    def __repr__(self) -> str:
        parts = []
        for name, value in self.to_dict().items():
            if name == "leave_float":
                parts.append(f"leave_float={self.leave_float!r}")
            elif isinstance(value, list):
                comma = "," if len(value) == 1 else ""
                parts.append(f"{name}=({', '.join(map(operator_name, value))}{comma})")
            else:
                parts.append(f"{name}={value!r}")
        return f"QDQRules({', '.join(parts)})"


def _operators(given: Any, name: str) -> tuple[Any, ...]:
    """``given`` as a tuple of single operators. Raises ``SpecError``."""
    if not isinstance(given, (tuple, list)):
        raise SpecError(
            f"operators are named in a tuple, got {given!r}",
            where=name,
            fix=f"QDQRules({name}=(torch.add,))",
        )
    for index, operator in enumerate(given):
        with within(f"{name}[{index}]"):
            if normal_form(operator).size > 1:
                raise SpecError("single operators are named here, not patterns")
    return tuple(given)
