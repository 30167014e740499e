from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import backquant
from backquant.lower import engine as engines
from backquant.lower.engine import MachineFacts
from backquant.report.model import Report

Run = Callable[..., Any]
IMAGE = "1,3,8,8:float32"


def quantize(*more: str) -> tuple[str, ...]:
    return ("quantize", "zoo:make", "--data", "images.npz", "-o", "out.bq", *more)


@pytest.mark.parametrize("model", ["zoo:PAIR", "zoo:with_inputs", "zoo:with_keywords"])
def test_explain(run: Run, model: str) -> None:
    result = run("explain", model)
    assert result.status == 0 and result.err == ""
    assert "act  Softplus  stays float" in result.out and "no-entry" in result.out
    assert "\nnode " in run("explain", model, "--table").out and "\nnode " not in result.out
    assert len(run("explain", model, "--json").data["rows"]) == 4


def test_explain_with_shapes(run: Run, here: Path) -> None:
    assert run("explain", "zoo:make", "--inputs", IMAGE, "-b", "qnnpack").out.startswith(
        "Net for qnnpack, planned: "
    )
    page = run("explain", "zoo:make", "--inputs", IMAGE, "--html", "deep/page.html")
    assert page.status == 0 and (here / "deep" / "page.html").exists()


def test_explain_needs_no_engine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "machine_facts", lambda: MachineFacts("aarch64"))
    assert run("explain", "zoo:PAIR").status == 0


def test_resume_needs_a_folder(run: Run, snapshot: Callable[..., None]) -> None:
    result = run(*quantize("--resume"))
    assert result.status == 2
    snapshot("resume-without-folder", result.err)


def test_quantize_then_inspect(run: Run, here: Path) -> None:
    result = run(*quantize("--html", "page.html"))
    assert result.status == 0 and "written: out.bq (" in result.out
    assert "calibrating" in result.err and "calibrating" not in result.out
    images = torch.from_numpy(np.load("images.npz")["x"])
    loaded = backquant.load("out.bq")
    assert loaded(images).shape == (10, 4) and (here / "page.html").stat().st_size > 10_000

    shown = run("inspect", "out.bq")
    assert shown.status == 0 and shown.out.startswith("out.bq: x86 on x86 (")
    data = run("inspect", "out.bq", "--json", "--html", "again.html").data
    assert Report.from_dict(data["report"]) == loaded.report and data["backend"] == "x86"
    assert sum(data["kernels"].values()) == len(loaded.kernels)
    assert (here / "again.html").read_text() == (here / "page.html").read_text()


@pytest.mark.parametrize("flow", ["prepare_fx", "prepare_qat_fx", "prepare_export"])
def test_inspect_of_every_flow(flow: str, run: Run, here: Path) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(8, 4)
    trains = flow == "prepare_qat_fx"
    kind = (
        backquant.get_default_qat_qconfig_mapping
        if trains
        else backquant.get_default_qconfig_mapping
    )
    config = backquant.get_backend_config("x86")
    prepare = getattr(backquant, flow)
    prepared = prepare(model.train(trains), kind("x86"), (x,), backend_config=config)
    prepared(x)
    backquant.save(backquant.convert_fx(prepared.eval()), here / "flow.bq")
    shown = run("inspect", "flow.bq")
    assert shown.status == 0
    assert "100.0% of the multiply-adds on integers" in " ".join(shown.out.split())


def test_quantize_as_data(run: Run) -> None:
    result = run(*quantize("--json"))
    assert result.status == 0 and result.err == ""
    assert result.data["artifact"] == "out.bq" and result.data["coverage"] == 1.0
    assert result.data["artifact_bytes"] > 1000


@pytest.mark.parametrize("data", ["zoo:BATCHES", "zoo:loader", "zoo:generator", "images.npz"])
def test_kinds_of_data(run: Run, data: str) -> None:
    assert run("quantize", "zoo:Net", "--data", data, "-o", "out.bq").status == 0


def test_an_exported_program(run: Run, here: Path) -> None:
    """A ``.pt2`` file in place of a factory."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: batch},))
    torch.export.save(program, here / "net.pt2")
    explained = run("explain", "net.pt2", "--inputs", "1,3,8,8:float32")
    assert explained.status == 0 and "captured by torch.export" in explained.out
    done = run("quantize", "net.pt2", "--data", "zoo:BATCHES", "-o", "net.bq")
    assert done.status == 0
    loaded = backquant.load(here / "net.bq")
    assert loaded(torch.randn(3, 3, 8, 8)).shape == (3, 4, 6, 6)


def test_several_arguments(run: Run) -> None:
    x = np.random.default_rng(0).normal(size=(6, 3, 8, 8))
    np.savez("two.npz", x=x, scale=np.ones((6, 1)))
    result = run("quantize", "zoo:Scaled", "-d", "two.npz", "-o", "out.bq", "--batch-size", "4")
    assert result.status == 0 and "x, scale: float64 in the file" in result.err
    rows = run("inspect", "out.bq", "--json").data["report"]["rows"]
    assert any(row["operator"] == "operator.mul" for row in rows)
    given = run("quantize", "zoo:make", "-d", "images.npz", "-o", "one.bq", "--inputs", IMAGE)
    assert given.status == 0


def test_a_backend_without_an_engine_says_so(run: Run) -> None:
    result = run(*quantize("-b", "tensorrt"))
    assert (
        result.status == 0
        and "is for export only" in result.err
        and "reference model" in result.err
    )
    assert "reference model" in result.out


def test_a_backend_in_a_file(run: Run, here: Path) -> None:
    backquant.get_backend_config("x86").set_name("mine").save(here / "mine.yaml")
    assert run(*quantize("-b", "mine.yaml")).out.startswith("Net for mine: ")


def test_an_output_that_exists_is_replaced_only_on_demand(run: Run, here: Path) -> None:
    (here / "out.bq").write_text("precious")
    result = run(*quantize())
    assert result.status == 2 and "out.bq exists" in result.err and "--force" in result.err
    assert (here / "out.bq").read_text() == "precious"
    assert run(*quantize("--force")).status == 0
    assert backquant.load("out.bq").engine is not None


def test_requirements(run: Run, here: Path) -> None:
    assert run(*quantize("--require", "0.9")).status == 0
    assert run(*quantize("--force", "--require", "fc", "--require", "conv")).status == 0
    (here / "out.bq").unlink()
    refused = run(*quantize("--require", "act"))
    assert refused.status == 1 and "'act' is required to be quantized" in refused.err
    assert not (here / "out.bq").exists()
    assert run("quantize", "zoo:soft", "-d", "images.npz", "-o", "out.bq", "--json").status == 1


BAD: dict[str, tuple[str, ...]] = {
    "no-data": ("quantize", "zoo:make", "-o", "out.bq"),
    "model-branches": ("explain", "zoo:branches", "--inputs", "1:float32"),
    "model-missing": ("explain", "zoom:make", "--inputs", IMAGE),
    "inputs-missing": ("explain", "zoo:make"),
    "inputs-odd": ("explain", "zoo:make", "--inputs", "1x3"),
    "inputs-shape": ("explain", "zoo:make", "--inputs", "1,4,8,8"),
    "backend-unknown": ("explain", "zoo:PAIR", "-b", "x68"),
    "backend-file": quantize("-b", "nothing.yaml"),
    "html-folder": ("explain", "zoo:PAIR", "--html", "."),
    "data-missing": ("quantize", "zoo:make", "-d", "nothing.npz", "-o", "out.bq"),
    "data-wide": ("quantize", "zoo:doubled", "-d", "images.npz", "-o", "out.bq"),
    "output-exists": ("quantize", "zoo:make", "-d", "images.npz", "-o", "images.npz"),
    "html-unwritable": ("explain", "zoo:PAIR", "--html", "images.npz/page.html"),
    "output-folder": ("quantize", "zoo:make", "-d", "images.npz", "-o", "."),
    "output-no-folder": ("quantize", "zoo:make", "-d", "images.npz", "-o", "deep/out.bq"),
    "require-both": quantize("--require", "0.5", "--require", "fc"),
    "require-percent": quantize("--require", "90"),
    "require-misspelt": quantize("--require", "convv"),
    "artifact-missing": ("inspect", "nothing.bq"),
    "artifact-foreign": ("inspect", "images.npz"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_usage(name: str, run: Run, here: Path, snapshot: Callable[..., None]) -> None:
    before = sorted(path.name for path in here.iterdir())
    result = run(*BAD[name])
    assert result.status == 2 and result.out == ""
    after = {path.name for path in here.iterdir()} - {"__pycache__"}
    assert sorted(after) == before
    err = result.err
    if "not a readable artifact" in err:
        err = err.replace(err.split("artifact: ")[1].splitlines()[0], "<reason>")
    snapshot(f"command-{name}", err, {str(Path(torch.__file__).parent): "<torch>"})
    data = run(*BAD[name], "--json")
    assert data.status == 2 and data.data["error"]["what"]


def test_labels_beside_the_inputs_are_left_out(run: Run, here: Path) -> None:
    assert run("quantize", "zoo:make", "-d", "zoo:labelled", "-o", "out.bq").status == 0
    assert (here / "out.bq").is_file()


def test_an_engine_that_is_not_here(
    run: Run, monkeypatch: pytest.MonkeyPatch, snapshot: Callable[..., None]
) -> None:
    facts = MachineFacts("aarch64", quantized_engines=("qnnpack",), torch_version=torch.__version__)
    monkeypatch.setattr(engines, "machine_facts", lambda: facts)
    result = run(*quantize())
    assert result.status == 2
    snapshot("command-engine", result.err)


def test_missing_options_are_bad_usage(run: Run) -> None:
    for arguments in (("quantize",), ("quantize", "zoo:make"), ("explain",), ("inspect",)):
        result = run(*arguments)
        assert result.status == 2 and result.out == "" and "Missing" in result.err


def _done(names: dict[str, Any], *arguments: str) -> None:
    assert names["run"](*arguments).status == 0


BY_HAND = {
    "backquant.quantize(model.float()": lambda _, n: _done(n, *quantize("--force")),
    **dict.fromkeys(
        ["run from the folder", "move these lines", "example_inputs=(x,)"],
        lambda _, n: _done(n, "explain", "zoo:make", "--inputs", IMAGE),
    ),
    "check the path": lambda _, n: _done(n, *quantize()) or _done(n, "inspect", "out.bq"),
    "give a file": lambda _, n: _done(n, *quantize()),
    "--data batches.npz": lambda _, n: _done(n, *quantize()),
    "require=0.9": lambda _, n: _done(n, *quantize("--require", "0.9")),
    "mkdir -p deep": lambda _, n: Path("deep").mkdir() or _done(n, *quantize("-o", "deep/out.bq")),
}
