"""Figures of README.md and docs/support.md, each from one file.

What stands between ``<!-- figures: NAME -->`` and ``<!-- /figures -->`` is written here:

- ``speed`` from benchmarks/log/models.json, one dated run of ``make bench-models``
- ``accuracy`` from the table of six trained models in docs/accuracy.md
- ``models`` from the counts in docs/models.md
- ``runtimes`` from the extras of pyproject.toml, with the versions of constraints.txt

Usage: python tools/figures.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from math import exp, log
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- /figures -->)", re.DOTALL)
PAGES = {"README.md": ("accuracy", "speed", "models"), "docs/support.md": ("runtimes",)}
#: Packages whose versions docs/support.md lists.
RUNTIMES = (
    "onnxruntime",
    "onnx",
    "openvino",
    "executorch",
    "ai-edge-litert",
    "ethos-u-vela",
    "torchao",
)
RUNTIMES += ("transformers", "compressed-tensors", "gguf")
#: Rows of docs/accuracy.md that README shows, under their names there.
TOOLS = {
    "float": "float",
    "torch.ao FX, x86": "torch.ao FX",
    "ONNX Runtime, min-max": "ONNX Runtime's quantizer",
    "NNCF, OpenVINO": "NNCF",
    "NNCF, accuracy control": "NNCF with accuracy control",
    "backquant x86": "**backquant**, `x86`",
    "backquant ONNX Runtime": "**backquant**, `onnxruntime`",
    "backquant OpenVINO": "**backquant**, `openvino`",
}


def speed() -> str:
    run = json.loads((ROOT / "benchmarks/log/models.json").read_text(encoding="utf-8"))
    rows, peers = run["rows"], ("onnxruntime", "openvino", "backquant")
    lines = [
        f"{run['date']} (`{run['commit']}`), {run['cpu']}; {run['how']}:",
        "",
        "| model | float, ms | ONNX Runtime int8 | OpenVINO int8 (NNCF) | backquant `x86` |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        best = max(row[peer]["ratio"] for peer in peers)
        cells = [_speedup(row[peer], row[peer]["ratio"] == best) for peer in peers]
        lines.append(f"| {row['model']} | {row['float_ms']} | {' | '.join(cells)} |")
    means = [exp(mean(log(row[peer]["ratio"]) for row in rows)) for peer in peers]
    lines.append(f"| geometric mean | | {' | '.join(f'{value:.2f} ×' for value in means)} |")
    return "\n".join(lines) + "\n"


def _speedup(cell: dict[str, float], best: bool) -> str:
    ratio = f"{cell['ratio']:.2f} ×"
    return f"{f'**{ratio}**' if best else ratio} ({cell['sqnr']:.1f} dB)"


def accuracy() -> str:
    page = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    head, _, *rows = re.findall(r"^\| tool \|.*?\n(?=\n)", page, re.MULTILINE | re.DOTALL)[0].split(
        "\n"
    )
    shown = {_cells(row)[0]: _cells(row)[1:] for row in rows if row}
    lines = [head, "| --- " * len(_cells(head)) + "|"]
    for name, title in TOOLS.items():
        shares = [cell.partition(",")[0] for cell in shown[name]]
        lines.append(f"| {title} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def models() -> str:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    counts = {road: (int(tried), int(work)) for road, tried, work, _ in rows}
    tried, work = counts["x86"]
    others = ("ONNX Runtime", "OpenVINO", "XNNPACK", "AOTInductor")
    exported = ", ".join(f"{name} {counts[name][1]} of {counts[name][0]}" for name in others)
    return (
        f"Of [{tried} stock models](docs/models.md) of torchvision, timm, transformers and others,\n"
        f"{work} run on the integer kernels of `x86`, with the results of their simulation (small inputs).\n"
        f"Exports with these results: {exported}.\n"
    )


def runtimes() -> str:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = ["| runtime or package | CI | declared |", "| --- | --- | --- |"]
    for name in RUNTIMES:
        declared = {
            found for found in re.findall(rf'"{name}(>=[\w.,<>=]+)', project) if "<" in found
        }
        [bounds] = declared  # the same in each extra
        [version] = re.findall(rf"^{name}==([\w.]+)", pinned, re.MULTILINE)
        lines.append(f"| {name} | {version} | {bounds.replace(',', ', ')} |")
    return "\n".join(lines) + "\n"


FIGURES: dict[str, Callable[[], str]] = {
    "speed": speed,
    "accuracy": accuracy,
    "models": models,
    "runtimes": runtimes,
}


def written(page: str) -> str:
    """The page with its figures as their files have them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return BLOCK.sub(lambda found: found[1] + FIGURES[found[2]]() + found[4], text)


def main() -> int:
    stale = [page for page in PAGES if written(page) != (ROOT / page).read_text(encoding="utf-8")]
    if "--check" in sys.argv[1:]:
        for page in stale:
            print(f"{page}: figures differ from their files; run python tools/figures.py")
        return bool(stale)
    for page in stale:
        (ROOT / page).write_text(written(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
