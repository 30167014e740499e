"""make bench: every benchmark in one run, each in a process of its own with a time limit.

    python -m benchmarks                # all that need not be named: 20 minutes on 2 cores
    python -m benchmarks models --models resnet18 bert_base --peers backquant openvino_int8
    python -m benchmarks calibration startup --out out/bench

Sections: models (speed and quality beside the peers), calibration, scaling, memory, startup, profiles,
kernels, lowbit, qat, and, only when they are named, quick (six models beside ONNX Runtime, 4 minutes),
run_memory (of inference beside the peers), pays (stock models beside float), and, hours long, tool (what
``quantize`` takes, by stage) and deploy (models on the targets of export; see ``benchmarks.deploy``).
Writes what each prints to ``SECTION.txt``, its figures to ``SECTION.json``, pictures beside them, and all of
it to ``bench.json`` and ``bench.md``. Exit status 1 when a section failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.deploy.cases import CASES
from benchmarks.deploy.targets import TARGETS
from benchmarks.machine import machine
from benchmarks.models import MODELS
from benchmarks.peers import PEERS

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Section:
    """``arguments``: of ``python -m benchmarks.MODULE``, with ``{out}`` for the folder."""

    title: str
    module: str
    arguments: tuple[str, ...]
    seconds: int

    def command(self, options: argparse.Namespace) -> list[str]:
        given = [part.format(out=options.out) for part in self.arguments]
        if self.module == "profile_rows":
            given += ["--models", *(options.models or MODELS)]
        if self.module == "speed":
            given += ["--models", *(options.models or MODELS), "--peers", *options.peers]
            given += ["--threads", options.threads, "--rounds", str(options.rounds)]
            given += ["--budget", str(self.limit(options) - 30)]
            given += ["--prepare-limit", str(240 * options.patience)]
        if self.module == "deploy":
            given += ["--models", *options.models] if options.models else []
            given += ["--targets", *options.targets] if options.targets else []
            given += ["--budget", str(self.limit(options) - 1500)]
        return [sys.executable, "-W", "ignore", "-m", f"benchmarks.{self.module}", *given]

    def limit(self, options: argparse.Namespace) -> int:
        return round(self.seconds * options.patience)


CALIBRATED = (
    *("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0"),
    *("shufflenet_v2_x1_0", "vit_b_16", "bert_base"),
)
SECTIONS: dict[str, Section] = {
    "models": Section("Speed and quality of models", "speed", ("--out", "{out}"), 840),
    "calibration": Section(
        "Calibration, per batch",
        "calibration",
        ("--models", *CALIBRATED, "--rounds", "5", "--batches", "2", "--out", "{out}"),
        300,
    ),
    "scaling": Section(
        "Time of the tool over the size of the graph",
        "scaling",
        (
            *("--blocks", "50", "200", "400", "800", "4000", "--torch-ao-up-to", "800"),
            *("--out", "{out}/scaling.json", "--plot", "{out}/scaling.png"),
        ),
        400,
    ),
    "tool": Section(
        "Time of quantize, by stage", "tool_time", ("--out", "{out}/tool.json"), 2 * 3600
    ),
    "memory": Section("Peak memory", "memory", ("--out", "{out}/memory.json"), 240),
    "run_memory": Section(
        "Memory of inference", "run_memory", ("--out", "{out}/run_memory.json"), 400
    ),
    "startup": Section("Start", "startup", ("--rounds", "3", "--out", "{out}/startup.json"), 240),
    "profiles": Section("Where our time goes", "profile_rows", ("--out", "{out}"), 240),
    "roofline": Section("How near to what the core can do", "roofline", ("--out", "{out}"), 1500),
    "kernels": Section("Kernels", "kernels", ("--repeat", "7", "--out", "{out}/kernels.json"), 60),
    "lowbit": Section("Weights of few bits", "lowbit", ("--out", "{out}"), 120),
    "qat": Section("A step of training", "qat_step", ("--out", "{out}/qat.json"), 300),
    "quick": Section("Six models beside ONNX Runtime", "quick", ("--out", "{out}"), 260),
    "pays": Section("Whether quantizing pays", "pays", ("--out", "{out}"), 1200),
    "deploy": Section("Models on the targets of export", "deploy", ("--out", "{out}"), 4 * 3600),
}
ASKED = ("quick", "run_memory", "pays", "tool", "roofline", "deploy")  # only when they are named
MARKDOWN = (
    "models",
    "calibration",
    "quick",
    "run_memory",
    "pays",
    "roofline",
    "deploy",
)  # what they print


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one section; what it prints goes to the screen and into a file."""
    section, log = SECTIONS[name], options.out / f"{name}.txt"
    source = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, source))}
    print(f"\n## {section.title}\n", flush=True)
    for suffix in (".json", ".md", ".png"):  # of an earlier run
        _file(name, options.out, suffix).unlink(missing_ok=True)
    start, failed = time.perf_counter(), ""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(section.command(options), stdout=file, env=environment, cwd=ROOT)
        try:
            status = process.wait(section.limit(options))
            failed = f"it ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            failed = f"it took longer than {section.limit(options)} s"
    table = _file(name, options.out, ".md")  # what a section that did not end has by then
    text = log.read_text(encoding="utf-8") or (table.exists() and table.read_text("utf-8")) or ""
    print(text, flush=True)
    if failed:
        print(f"{name} failed: {failed}", flush=True)
    return {
        "title": section.title,
        "seconds": round(time.perf_counter() - start, 1),
        "failed": failed,
        "text": text,
    }


def _file(name: str, out: Path, suffix: str) -> Path:
    return out / f"{'speed' if name == 'models' else name}{suffix}"


def write(found: dict[str, dict[str, Any]], out: Path) -> None:
    """Everything in one JSON file and one page of markdown."""
    data: dict[str, Any] = {"machine": machine(), "sections": {}}
    page = [f"{data['machine']['cpu']}, torch {data['machine']['torch']}"]
    for name, section in found.items():
        figures = _file(name, out, ".json")
        known = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else None
        data["sections"][name] = {**section, "figures": known}
        fence = "" if name in MARKDOWN else "```"
        page += [f"## {section['title']}", fence, section["text"].rstrip(), fence]
        page += [f"Failed: {section['failed']}"] if section["failed"] else []
    (out / "bench.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    (out / "bench.md").write_text("\n".join(page) + "\n", encoding="utf-8")


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"default: all but {', '.join(ASKED)}"
    )
    parser.add_argument("--models", nargs="+", choices=list(dict.fromkeys((*MODELS, *CASES))))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, help="of deploy")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--threads", default="1", help="of the models: a number, or all")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each peer on a model")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="times the time limits, on a slow machine"
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args(arguments)
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    options.sections = options.sections or [name for name in SECTIONS if name not in ASKED]
    options.out = options.out.resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for name in options.sections:
        found[name] = run(name, options)
        write(found, options.out)
    print(f"written to {options.out}")
    return int(any(section["failed"] for section in found.values()))


if __name__ == "__main__":
    sys.exit(main())
