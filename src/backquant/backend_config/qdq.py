"""How a deployment target wants the reference model written: rules about its quantize/dequantize nodes.

What was measured about each target stands in the descriptions of the backends; the steps that write a
reference model (prepare, match, convert) and the passes before an export read it from here. The
defaults are what ``torch.ao`` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from backquant.backend_config.declared import Record
from backquant.backend_config.kinds import Operators
from backquant.backend_config.leave_float import LeaveFloat


@dataclass(frozen=True, repr=False)
class QDQRules(Record):
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

    dequantize_per_user: Annotated[
        bool, "Every reader of a quantized value dequantizes it by itself."
    ] = False
    quantize_constants: Annotated[bool, "Values that depend on no input are quantized, too."] = True
    weights: Annotated[
        Literal["integer", "quantized_float"],
        "How the weights of an exported model are stored.",
    ] = "integer"
    bias: Annotated[Literal["float", "int32"], "How the bias of a product is stored in ONNX."] = (
        "float"
    )
    leave_float: Annotated[tuple[LeaveFloat, ...], "What stays float whatever is asked for."] = ()
    epilogues: Annotated[
        tuple[Any, ...],
        Operators(),
        "Operators computed in the kernel of the weighted operator before them.",
    ] = ()
    additions: Annotated[
        Literal["add", "sum"], "How a float addition of two activations is written in ONNX."
    ] = "add"
    attention: Annotated[
        Literal["whole", "products"], "How attention that is quantized is written."
    ] = "whole"
    columns: Annotated[
        Literal["columns", "lines", "integer_lines"],
        "How convolutions along a column of one pixel are written.",
    ] = "columns"
