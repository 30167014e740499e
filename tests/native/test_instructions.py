"""Sets of instructions: which a CPU may use, and the kernels of each that this one has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from backquant.native import instructions
from backquant.native.build import FLAGS, MACHINES
from backquant.native.instructions import (
    AMX,
    INSTRUCTION_SETS,
    arm_features,
    capabilities_here,
    usable,
)

OLD = dict.fromkeys(("avx2", "fma3"), True)
ALDER_LAKE = OLD | {"avx_vnni": True}
SKYLAKE = OLD | dict.fromkeys(("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"), True)
ICE_LAKE = SKYLAKE | {"avx512_vnni": True}
SAPPHIRE_RAPIDS = ICE_LAKE | dict.fromkeys(("avx_vnni", "amx_int8"), True)
CORTEX_A72 = {"asimd": True, "asimddp": False, "i8mm": False}
CORTEX_A76 = CORTEX_A72 | {"asimddp": True}
NEOVERSE_V1 = CORTEX_A76 | {"i8mm": True}
TESTS = Path(__file__).parent

# A process of its own, as there is one library in each: the kernels on generated layers. The second argument
# replaces what the compiler is told.
TRIES = """
import sys
from pathlib import Path
from hypothesis import settings
settings.register_profile("here", deadline=None, database=None, derandomize=True, max_examples=60)
settings.load_profile("here")
import test_plan
from backquant.native import build, instructions, library
name, flags, folder = sys.argv[1:]
if flags:
    build.FLAGS[name] = tuple(flags.split())
chosen = next(found for found in instructions.INSTRUCTION_SETS if found.name == name)
path = next(Path(folder).glob(f"{build.sources_digest(name)}-*.so"), None)
print(library._start(path or build.build(Path(folder), name), chosen) or library.layout())
test_plan.test_any_layer_is_right()
"""


@pytest.mark.parametrize(
    ("cpu", "limit", "names"),
    [
        ({}, "", []),
        (OLD, "", ["avx2"]),
        (ALDER_LAKE, "", ["avx_vnni", "avx2"]),
        (SKYLAKE, "", ["avx512", "avx2"]),
        (ICE_LAKE, "", ["avx512_vnni", "avx512", "avx2"]),
        (ICE_LAKE, "AVX512_CORE", ["avx512", "avx2"]),
        (ICE_LAKE, "AVX512_CORE_VNNI", ["avx512_vnni", "avx512", "avx2"]),
        (ICE_LAKE, "AVX2_VNNI", ["avx2"]),
        (SAPPHIRE_RAPIDS, "", ["amx", "avx512_vnni", "avx_vnni", "avx512", "avx2"]),
        (SAPPHIRE_RAPIDS, "AVX512_CORE_AMX", ["amx", "avx512_vnni", "avx_vnni", "avx512", "avx2"]),
        (SAPPHIRE_RAPIDS, "AVX512_CORE_FP16", ["avx512_vnni", "avx_vnni", "avx512", "avx2"]),
        (ALDER_LAKE, "avx2_vnni", ["avx_vnni", "avx2"]),
        (ICE_LAKE, "AVX2", ["avx2"]),
        (ICE_LAKE, "AVX", []),
        (ICE_LAKE, "SSE41", []),
        (CORTEX_A72, "", ["neon"]),
        (CORTEX_A76, "", ["neon_dot", "neon"]),
        (NEOVERSE_V1, "", ["neon_i8mm", "neon_dot", "neon"]),
    ],
)
def test_what_a_cpu_may_use(cpu: dict[str, bool], limit: str, names: list[str]) -> None:
    assert [found.name for found in usable(cpu, limit)] == names


def test_each_has_flags() -> None:
    assert {found.name for found in INSTRUCTION_SETS} == set(FLAGS)
    assert sorted(name for names in MACHINES.values() for name in names) == sorted(FLAGS)


def test_what_linux_says_of_an_arm_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {16: 1 << 1 | 1 << 20, 26: 1 << 13}  # AT_HWCAP, AT_HWCAP2
    read = Mock(side_effect=words.get)
    monkeypatch.setattr(instructions.ctypes, "CDLL", Mock(return_value=Mock(getauxval=read)))
    monkeypatch.setattr(instructions.platform, "machine", lambda: "aarch64")
    assert arm_features() == NEOVERSE_V1
    words[26] = 0
    assert arm_features() == CORTEX_A76


@pytest.mark.parametrize("name", ["avx2", "avx512", "avx_vnni", "amx"])
def test_any_layer_is_right_with(name: str, built_kernels: Path) -> None:
    """AVX-VNNI is an instruction of AVX-512 VNNI in another encoding: without it, that one is run. Without
    AMX its tiles are emulated."""
    names = [found.name for found in usable()]
    flags = ""
    if name == "avx_vnni" and name not in names and "avx512_vnni" in names:
        flags = " ".join([*FLAGS["avx512_vnni"], "-DBACKQUANT_LANES=8"])
    elif name == "amx" and name not in names and "avx512_vnni" in names:
        flags = " ".join([*FLAGS["amx"], "-DBACKQUANT_EMULATED_TILES"])
    elif name not in names:
        pytest.skip(f"this CPU has no {name}")
    command = [sys.executable, "-W", "ignore", "-c", TRIES, name, flags, str(built_kernels)]
    path = os.pathsep.join([str(TESTS), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    layout = next(found.layout for found in INSTRUCTION_SETS if found.name == name)
    assert done.stdout.strip() == str(layout)


@pytest.mark.parametrize(("allowed", "has"), [(True, True), (False, False)])
def test_linux_is_asked_for_tiles(
    allowed: bool, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: SAPPHIRE_RAPIDS)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: allowed)
    assert AMX.is_on(capabilities_here()) is has


def test_a_limit_of_x86_says_nothing_on_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr(instructions.platform, "machine", lambda: "aarch64")
    assert instructions.limit_said() == ""
    assert [found.name for found in usable(CORTEX_A76)] == ["neon_dot", "neon"]
