"""Vela's own verdict on one operator: is it placed on the NPU?"""

from __future__ import annotations

from typing import Any

from tools.vela.cases import Call
from tools.vela.tflite import written

from backquant.conformance.tosa.engine import compiled

__all__ = ["on_the_npu"]

_CUSTOM = 32  # the code of the operator that stands for a compiled command stream


def on_the_npu(call: Call, accelerator: str) -> bool:
    """Whether Vela compiles the operator for ``accelerator`` (EthosU55, EthosU65, EthosU85).

    What the accelerator does not take is in Vela's result as it was.
    """
    from ethosu.vela.tflite import Model

    try:
        made = compiled(written(call), "TFLITE", accelerator)
    except RuntimeError:  # no TFLite has the operator in this dtype
        return False
    model: Any = Model.Model.GetRootAsModel(bytes(made.model), 0)
    graph = model.Subgraphs(0)
    codes = [
        model.OperatorCodes(graph.Operators(at).OpcodeIndex()).BuiltinCode()
        for at in range(graph.OperatorsLength())
    ]
    return all(code == _CUSTOM for code in codes)
