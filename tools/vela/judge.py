"""Vela's own verdict on one operator: is it placed on the NPU?"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from tools.vela.cases import Call
from tools.vela.tflite import written

__all__ = ["on_the_npu"]

_CUSTOM = 32  # the code of the operator that stands for a compiled command stream
#: Multiply-adds per cycle, system and memory of Vela's own configuration file.
_SYSTEMS = {
    "EthosU55": (128, "Ethos_U55_High_End_Embedded", "Shared_Sram"),
    "EthosU65": (256, "Ethos_U65_High_End", "Dedicated_Sram"),
    "EthosU85": (256, "Ethos_U85_SYS_DRAM_Mid", "Dedicated_Sram"),
}


@lru_cache
def _system(accelerator: str) -> str:
    import ethosu

    path = Path(next(iter(ethosu.__path__))) / "config_files" / "Arm" / "vela.ini"
    macs, system, memory = _SYSTEMS[accelerator]
    return (
        f"[architecture]\nmacs={macs}\ncores=1\n"
        f"[vela]\nsystem_config_name={system}\nmemory_mode_name={memory}\n"
        + path.read_text(encoding="utf-8")
    )


_OPTIONS = """
[compiler]
output_format=TFLite
cop_format=COP1

[scheduler]
optimize=Size
disable_feature=
cpu_tensor_alignment=16
tensor_allocator=HillClimb

[graph]
"""


def on_the_npu(call: Call, accelerator: str) -> bool:
    """Whether Vela compiles the operator for ``accelerator`` (EthosU55, EthosU65, EthosU85).

    What the accelerator does not take is in Vela's result as it was.
    """
    from ethosu import regor
    from ethosu.vela.tflite import Model

    file, system = written(call), _system(accelerator)
    try:
        compiled = regor.compile(
            accelerator, file, "TFLITE", system, options=_OPTIONS, verbose=False
        )
    except RuntimeError:  # no TFLite has the operator in this dtype
        return False
    model: Any = Model.Model.GetRootAsModel(bytes(compiled.model), 0)
    graph = model.Subgraphs(0)
    codes = [
        model.OperatorCodes(graph.Operators(at).OpcodeIndex()).BuiltinCode()
        for at in range(graph.OperatorsLength())
    ]
    return all(code == _CUSTOM for code in codes)
