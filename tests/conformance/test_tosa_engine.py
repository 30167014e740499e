"""Vela and TOSA's reference model as engines; neither runs here, so that what they say is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backquant.backend_config import BackendConfig
from backquant.conformance import ConformanceVerdict as Verdict
from backquant.conformance.attempt import Setting
from backquant.conformance.engines import find_conformance_engine
from backquant.conformance.results import Outcome, Trial
from backquant.conformance.run import claims, outcomes_of
from backquant.conformance.tosa import engine as tosa
from tosa_in_numpy import evaluated

ROOT = Path(__file__).resolve().parents[2]
ETHOS = ROOT / "examples" / "backends" / "ethos_u85.yaml"


def outcomes(pattern: str, file: Path = ETHOS, engine: str | None = None) -> list[Outcome]:
    backend = BackendConfig.load(file)
    setting = Setting(backend, find_conformance_engine(backend, engine))
    claim = next(one for one in claims(backend) if one.pattern == pattern)
    return [each for _, each in outcomes_of([Trial(claim)], setting) if each is not None]


def test_what_vela_refuses_is_refused_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its words; it is asked for the accelerator of the description, with a file of TOSA."""
    asked = []

    def refuses(file: bytes, kind: str, accelerator: str) -> Any:
        asked.append((file, kind, accelerator))
        raise RuntimeError("Compilation failed: no such operator")

    monkeypatch.setattr(tosa, "_program", lambda: Path("tosa_reference_model"))
    monkeypatch.setattr(tosa, "binary", lambda graph, *_: graph.written().encode())
    monkeypatch.setattr(tosa, "compiled", refuses)
    [found] = outcomes("torch.nn.ReLU(torch.nn.Conv2d)")
    assert found.verdict is Verdict.REFUSED_BY_ENGINE
    assert found.detail == "Vela: Compilation failed: no such operator"
    assert asked == [(b"CONV2D + RESCALE", "TOSA", "EthosU85")]


def test_what_the_reference_model_computes_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other integers than the reference's are wrong."""
    monkeypatch.setattr(tosa, "_program", lambda: Path("tosa_reference_model"))
    monkeypatch.setattr(tosa, "binary", lambda *_: b"")
    monkeypatch.setattr(tosa, "compiled", lambda *_: None)

    class Off(tosa._Kernels):
        def _computed(self, graph: Any, output: str, folder: Path, out: Any, kernel: Any) -> Any:
            return out ^ 1

    monkeypatch.setattr(tosa, "_Kernels", Off)
    found = outcomes("torch.nn.ReLU(torch.nn.Conv2d)")
    assert {each.verdict for each in found} == {Verdict.WRONG}
    assert all(each.kernel == "CONV2D + RESCALE" and each.steps >= 1 for each in found)


@pytest.mark.parametrize(
    ("pattern", "written"), [(".unsqueeze_()", "RESHAPE"), (".chunk()", "SLICE, SLICE")]
)
def test_moves_in_place_and_lists(
    monkeypatch: pytest.MonkeyPatch, pattern: str, written: str
) -> None:
    """``unsqueeze_`` changes the sizes of what it reads, ``chunk`` gives a list."""
    monkeypatch.setattr(tosa, "_program", lambda: Path("tosa_reference_model"))
    monkeypatch.setattr(tosa, "run", lambda graph, output, *_: evaluated(graph, output))
    found = outcomes(pattern, ROOT / "tools" / "tosa" / "tosa.yaml", "tosa")
    assert {each.verdict for each in found} == {Verdict.CONFORMS}
    assert {each.kernel for each in found} == {written}


def test_what_vela_takes_of_tflite_files_alone_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transposed convolutions of 16 bits; those of 8 bits are asked about."""
    asked = []
    monkeypatch.setattr(tosa, "_program", lambda: Path("tosa_reference_model"))
    monkeypatch.setattr(tosa, "binary", lambda *_: b"")
    monkeypatch.setattr(tosa, "compiled", lambda *told: asked.append(told))
    monkeypatch.setattr(tosa, "run", lambda graph, output, *_: evaluated(graph, output))
    backend = BackendConfig.load(ROOT / "examples" / "backends" / "ethos_u55.yaml")
    setting = Setting(backend, find_conformance_engine(backend, None))
    claimed = [one for one in claims(backend) if one.pattern == "torch.nn.ConvTranspose2d"]
    found = {}
    for claim in claimed:
        for _, each in outcomes_of([Trial(claim)], setting):
            if each is not None:
                found["int16" in claim.dtypes] = each.verdict
    assert found[True] is Verdict.UNTRIED
    assert found[False] is not Verdict.UNTRIED
    assert asked
