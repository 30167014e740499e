"""The picture of a report in README.md, docs/report.png: a small vision transformer, drawn by Chromium.

Usage: python tools/report_picture.py [docs/report.png]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import benchmarks.stock  # noqa: E402, F401 - before torchvision
import torch  # noqa: E402
from torchvision.models import VisionTransformer  # noqa: E402

import backquant  # noqa: E402

WIDTH, HEIGHT = 1080, 860


def page(folder: Path) -> Path:
    torch.manual_seed(0)
    model = VisionTransformer(64, 16, 2, 4, 256, 1024, num_classes=10).eval()
    torch.nn.init.normal_(model.heads[0].weight)  # it begins as zeros
    images = [torch.rand(8, 3, 64, 64) for _ in range(4)]
    quantized = backquant.quantize(
        model, images[0], calibration=images, backend="x86", slower="keep"
    )
    quantized.report.save_html(folder / "report.html")
    return folder / "report.html"


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "report.png").resolve()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("it needs chromium on PATH")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += ["--disable-background-networking", f"--user-data-dir={folder / 'profile'}"]
        words += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={folder / 'report.png'}"]
        command = [*words, page(folder).as_uri()]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
        shutil.move(folder / "report.png", target)


if __name__ == "__main__":
    main()
