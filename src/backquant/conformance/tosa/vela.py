"""Whether Arm's Vela compiles a file for an Ethos-U (``pip install ethos-u-vela``)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

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


def compiled(file: bytes, kind: str, accelerator: str) -> Any:
    """What Vela makes of a file (``kind``: TFLITE or TOSA) for EthosU55, EthosU65 or EthosU85.

    Raises ``RuntimeError`` with what it says, where it does not take it.
    """
    from ethosu import regor

    system = _system(accelerator)
    return regor.compile(accelerator, file, kind, system, options=_OPTIONS, verbose=False)
