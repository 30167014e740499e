from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_conform(run: Callable[..., Any], here: Path) -> None:
    """Exit status 0 where all claims hold, 1 where one does not; the pages lie in the folder."""
    options = ("--jobs", "0", "--rounds", "1")
    good = run("conform", "x86", "-e", "nn.ReLU(torch.mul)", *options, "-o", "out", "--json")
    assert good.status == 0 and good.data["conforms"] and good.data["cases"] > 5
    assert {"x86.html", "x86.md", "x86.json"} <= {path.name for path in Path("out").iterdir()}
    (here / "wrong.yaml").write_text(
        "schema_version: 1\nname: wrong\nengine: x86\nentries:\n"
        "- operators: [silu]\n  dtype_configs: [{input_dtype: quint8, output_dtype: quint8}]\n"
        "- pattern: torch.special.erf\n"
        "  dtype_configs: [{input_dtype: quint8, output_dtype: quint8}]\n"
    )
    bad = run("conform", "wrong.yaml", *options)
    assert bad.status in (0, 1) and "wrong on x86" in bad.out
    assert run("conform", "x86", "--engine", "nothing").status == 2
