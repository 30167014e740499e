from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from backquant.errors import EngineError
from backquant.lower.engine import engine_info
from backquant.lower.kernels.prepared import engine_for, engine_for_line
from backquant.lower.machine import EngineInfo, MachineFacts, machine_facts

ENGINES = ("x86", "onednn", "fbgemm", "qnnpack")

VNNI = MachineFacts(
    "x86_64",
    {"avx2": True, "avx512_bw": True, "avx512_vnni": True},
    onednn=True,
    quantized_engines=("onednn", "x86", "fbgemm", "qnnpack"),
    torch_version="2.13.0",
)
NO_VNNI = dataclasses.replace(VNNI, capabilities={"avx2": True})


def test_this_machine_has_the_engines_it_reports():
    facts = machine_facts()
    assert facts.torch_version == torch.__version__.split("+")[0]
    for name in ENGINES:
        if name in facts.quantized_engines:
            assert engine_info(name).torch_version == facts.torch_version


@pytest.mark.parametrize(
    ("facts", "isa", "wide"),
    [
        (VNNI, "avx512_vnni", True),
        (NO_VNNI, "avx2", False),
        (dataclasses.replace(VNNI, capabilities={"avx_vnni": True}), "avx_vnni", True),
        (dataclasses.replace(VNNI, isa_limit="AVX512_CORE"), "avx512_core", False),
        (dataclasses.replace(VNNI, isa_limit="AVX512_CORE_VNNI"), "avx512_vnni", True),
        (dataclasses.replace(VNNI, isa_limit="AVX2_VNNI"), "avx2", False),
        (dataclasses.replace(VNNI, isa_limit="avx2_vnni_2"), "avx2", False),
        (dataclasses.replace(VNNI, isa_limit="ALL"), "avx512_vnni", True),
        (
            dataclasses.replace(VNNI, capabilities={"avx_vnni": True}, isa_limit="AVX2_VNNI"),
            "avx_vnni",
            True,
        ),
        (
            dataclasses.replace(
                VNNI, capabilities={"avx_vnni": True}, isa_limit="AVX512_CORE_VNNI"
            ),
            "avx2",
            False,
        ),
        (dataclasses.replace(VNNI, architecture="aarch64", capabilities={}), "aarch64", True),
    ],
)
def test_the_instruction_set_decides_whether_sums_are_wide(facts, isa, wide):
    info = engine_info("onednn", facts)
    assert (info.isa, info.wide_accumulation) == (isa, wide)
    assert (info.max_product() is None) is wide


def test_the_variable_of_onednn_is_read(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert machine_facts().isa_limit == "AVX2"


def test_without_vnni_fbgemm_sums_in_16_bits_and_qnnpack_does_not():
    assert engine_info("fbgemm", VNNI).wide_accumulation
    assert not engine_info("fbgemm", NO_VNNI).wide_accumulation
    assert engine_info("qnnpack", NO_VNNI).wide_accumulation
    assert engine_info("fbgemm", VNNI).max_product(depthwise=True) == 16383
    assert engine_info("qnnpack", VNNI).max_product(depthwise=True) is None


def test_an_unknown_engine_is_refused_with_the_nearest_name():
    with pytest.raises(EngineError, match="did you mean 'fbgemm'"):
        engine_info("fbgem")


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_the_build_lacks_is_refused_with_an_alternative(name):
    others = tuple(engine for engine in ENGINES if engine != name)
    facts = MachineFacts("x86_64", quantized_engines=others, torch_version="2.13.0")
    with pytest.raises(EngineError) as caught:
        engine_info(name, facts)
    assert "backend=" in caught.value.fix
    assert "2.13.0" in caught.value.where or "quantized engines" in caught.value.where


def test_a_build_without_any_engine_says_what_is_left():
    with pytest.raises(EngineError) as caught:
        engine_info("onednn", MachineFacts("riscv64"))
    assert "reference model" in caught.value.fix


def test_x86_needs_an_x86_cpu():
    facts = dataclasses.replace(VNNI, architecture="aarch64", quantized_engines=("onednn",))
    with pytest.raises(EngineError, match="needs an x86 CPU") as caught:
        engine_info("x86", facts)
    assert "onednn" in caught.value.fix


def test_engines_of_fbgemm_are_left_out_on_arm(monkeypatch):
    """PyTorch's builds for ARM list them, and their kernels raise."""
    named = ["qnnpack", "onednn", "x86", "fbgemm"]
    monkeypatch.setattr(torch.backends.quantized.__class__, "supported_engines", named)
    assert machine_facts().quantized_engines == tuple(named)
    assert engine_for(4) == engine_for_line(100) == "fbgemm"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    facts = machine_facts()
    assert facts.quantized_engines == ("qnnpack", "onednn")
    assert engine_for(4) == engine_for_line(100) == "onednn"
    with pytest.raises(EngineError, match="fbgemm needs an x86 CPU") as caught:
        engine_info("fbgemm", facts)
    assert 'backend="onednn"' in caught.value.fix


def test_an_engine_survives_json():
    info = engine_info("onednn", VNNI)
    assert EngineInfo.from_dict(json.loads(json.dumps(info.to_dict()))) == info
