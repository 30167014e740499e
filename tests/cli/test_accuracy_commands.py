from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]


def test_compare_and_sensitivity(run: Run, here: Path) -> None:
    made = run("quantize", "zoo:PAIR", "-d", "zoo:BATCHES", "-o", "out.bq", "--slower", "keep")
    assert made.status == 0
    (here / "judge.py").write_text("def weight(model):\n    return 0.25\n")
    options = ("--metric", "judge:weight", "--html", "page.html")
    found = run("compare", "zoo:PAIR", "out.bq", "-d", "zoo:BATCHES", "--json", *options)
    assert found.status == 0 and found.data["batches"] == 3 and found.data["sqnr"] > 10
    assert found.data["metric"] == [0.25, 0.25] and (here / "page.html").exists()
    assert (
        "SQNR in dB, higher is better"
        in run("compare", "zoo:PAIR", "out.bq", "-d", "zoo:BATCHES").out
    )
    costs = run("sensitivity", "zoo:PAIR", "-d", "zoo:BATCHES", "--json", "--resume", "s.json")
    assert {group["name"] for group in costs.data["groups"]} == {"conv", "fc"}
    assert "with everything quantized" in run("sensitivity", "zoo:PAIR", "-d", "zoo:BATCHES").out


def test_search(run: Run, here: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    options = ("zoo:PAIR", "-d", "zoo:BATCHES", "-o", "found.bq", "--resume", "s.json")
    found = run("search", *options, "--budget", "min_sqnr=15", "--html", "page.html", "--json")
    assert found.status == 0 and found.data["met"] and (here / "page.html").exists()
    assert (here / "cache" / "backquant").is_dir() and (here / "found.bq").exists()
    assert run("search", *options, "--budget", "max_bytes=1").status == 1
    assert run("search", *options, "--budget", "max_ms").status == 2


def test_an_exported_file(run: Run) -> None:
    made = run("quantize", "zoo:PAIR", "-d", "zoo:BATCHES", "-b", "onnxruntime", "-o", "out.bq",
               "--to", "onnx", "--weight-bits", "7", "--slower", "keep")  # fmt: skip
    assert made.status == 0
    found = run(
        "compare", "zoo:PAIR", "out.onnx", "-d", "images.npz", "--batch-size", "1", "--json"
    )
    assert found.status == 0 and found.data["sqnr"] > 10


def test_a_file_of_another_model(run: Run) -> None:
    run("quantize", "zoo:PAIR", "-d", "zoo:BATCHES", "-o", "out.bq", "--slower", "keep")
    found = run("compare", "zoo:soft", "out.bq", "-d", "zoo:BATCHES")
    assert found.status == 2 and "not the model that was quantized" in found.err
