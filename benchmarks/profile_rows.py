"""Where the time of our quantized models goes: per model a table of kernel families.

    python -m benchmarks.profile_rows --models efficientnet_b0 --out out/bench

One thread, batch 1. Each operator of the recorded graph is timed by torch's profiler (which adds about half a
microsecond to each; the smallest of ``--runs`` counts), and gets its family by name and by the shape of
its weight. ``rest`` is what the call takes without the profiler beyond the operators: the interpreter. For
convolutions and linear layers the table has the multiply-adds per second, too: where they are as high
as in resnet50 (VNNI's limit), only fewer of them would help. With a ``speed.json`` of
``benchmarks.speed`` in ``--out``, the peers that are ahead are named above the table. Prints markdown and
writes ``profiles.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import backquant
from backquant.runtime.replay.record import Call, Recording, known_constants, record
from backquant.runtime.replay.shortened import pass_on
from benchmarks.machine import machine
from benchmarks.models import MODELS, build

# What would make a family smaller, said once for all models.
CLOSES = {
    "convolution 1×1": "kept primitives with activations other than ReLU (torch has none)",
    "convolution k×k": "at VNNI's limit; for images of 3 channels the turn to channels last is in it",
    "depthwise convolution": "kept primitives with activations other than ReLU (torch has none)",
    "convolution + addition": "kept primitives with an addition (torch has them for one setting only)",
    "linear": "at VNNI's limit; fewer float results",
    "elementwise": "a product of integers with a gate per channel that does not pass through float",
    "pooling": "little to gain",
    "float island": "attention and norms in bf16, or on integers",
    "quantize, dequantize": "fewer changes of scale: joins that share one scale",
    "reshapes, copies": "views without calls: planned memory",
    "rest": "fewer operators",
}
_ELEMENTWISE = (
    "add", "add_", "add_relu", "mul", "mul_", "mul_relu", "sub", "div", "div_", "relu", "relu_", "clamp_",
    "maximum", "index_select", "hardswish", "hardsigmoid", "sigmoid", "silu", "gelu", "tanh", "erf",
)  # fmt: skip
_POOLING = ("max_pool2d", "_adaptive_avg_pool2d", "avg_pool2d", "mean", "max_pool2d_with_indices")
_FLOAT = (
    "native_layer_norm", "softmax", "_softmax", "bmm", "matmul", "addmm", "mm", "baddbmm",
    "_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention", "layer_norm",
)  # fmt: skip
_BOUNDARIES = ("quantize_per_tensor", "dequantize", "_make_per_tensor_quantized_tensor")


@dataclass
class Family:
    """``calls`` of a model's run take ``ms`` together; ``gmacs``: 10⁹ multiply-adds a second."""

    name: str
    calls: int = 0
    ms: float = 0.0
    share: float = 0.0
    macs: int = 0
    gmacs: float | None = None


def family_of(call: Call, recording: Recording) -> tuple[str, int]:
    """The family of a recorded operator, and its multiply-adds."""
    name = str(call.operator._schema.name).split("::")[1]
    output = call.outputs[0]
    size = recording.layouts[output].size if isinstance(output, str) else ()
    if "conv" in name:
        weight = _weight(call, recording)
        macs = math.prod(size) * math.prod(weight[1:])
        if call.operator._schema.overload_name.startswith("binary"):
            return "convolution + addition", macs
        if weight[1] == 1 and size[1] > 1:
            return "depthwise convolution", macs
        return ("convolution 1×1" if set(weight[2:]) == {1} else "convolution k×k"), macs
    if "linear" in name:
        source = recording.layouts[call.arguments[0].name].size
        return _linear(call, recording, size), math.prod(size) * source[-1]
    for family, names in (
        ("elementwise", _ELEMENTWISE),
        ("pooling", _POOLING),
        ("float island", _FLOAT),
        ("quantize, dequantize", _BOUNDARIES),
    ):
        if name in names:
            return family, 0
    return "reshapes, copies", 0


def _weight(call: Call, recording: Recording) -> tuple[int, ...]:
    """The sizes of a convolution's weight."""
    packed = call.arguments[1]
    if isinstance(packed, torch.ScriptObject):
        return tuple(packed.unpack()[0].shape)  # type: ignore[attr-defined]
    return tuple(recording.constants[call.arguments[3].name].shape)


def _linear(call: Call, recording: Recording, size: Sequence[int]) -> str:
    """Images reach a linear layer as convolutions of one pixel, channels last."""
    maker = next((c for c in recording.calls if call.arguments[0].name in c.outputs), None)
    moved = maker is not None and maker.operator is torch.ops.aten.permute.default
    return "convolution 1×1" if moved and len(size) == 4 else "linear"


def recorded(quantized: Any, x: torch.Tensor) -> Recording:
    module = quantized.graph_module
    _, found = record(module, (x,), {}, lambda: known_constants(module))
    if not isinstance(found, Recording):
        raise found
    return pass_on(found)


def timed(quantized: Any, x: torch.Tensor, runs: int) -> list[tuple[str, float]]:
    """The operators of a replay in order, each with its smallest time in µs."""
    best: list[tuple[str, float]] = []
    for _ in range(runs):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            quantized(x)
        events = [
            event
            for event in profiler.events() or ()
            if event.cpu_parent is not None and event.cpu_parent.cpu_parent is None
        ]
        events.sort(key=lambda event: event.time_range.start)
        found = [(event.name, event.time_range.elapsed_us()) for event in events]
        pairs = zip(best, found, strict=True)
        best = [(n, min(a, b)) for (n, a), (_, b) in pairs] if best else found
    return best


def aligned(recording: Recording, times: Sequence[tuple[str, float]]) -> list[tuple[Call, float]]:
    """Each timed operator with its call; calls on constants ran once, before."""
    calls, found = iter(recording.calls), []
    for name, microseconds in times:
        call = next((c for c in calls if c.operator._schema.name == name), None)
        if call is None:
            raise RuntimeError(f"the profiler saw {name}, which was not recorded")
        found.append((call, microseconds))
    return found


def milliseconds(quantized: Any, x: torch.Tensor, runs: int) -> float:
    best = math.inf
    for _ in range(4 * runs):
        start = time.thread_time()
        quantized(x)
        best = min(best, time.thread_time() - start)
    return best * 1e3


def families(model: str, runs: int) -> tuple[float, list[Family]]:
    """The CPU time of a run, and its families, largest first."""
    float_model = build(model)
    torch.manual_seed(1)
    batches = [MODELS[model].sample(1) for _ in range(2)]
    quantized: Any = backquant.quantize(float_model, batches[0], calibration=batches)
    for _ in range(4):
        quantized(batches[0])
    if not quantized.replays.programs:
        raise RuntimeError(f"{model} is not replayed: {quantized.replays.refused}")
    recording = recorded(quantized, batches[0])
    total, times = milliseconds(quantized, batches[0], runs), timed(quantized, batches[0], runs)
    found: dict[str, Family] = {}
    for call, microseconds in aligned(recording, times):
        name, macs = family_of(call, recording)
        family = found.setdefault(name, Family(name))
        family.calls += 1
        family.ms += microseconds / 1e3
        family.macs += macs
    inside = sum(family.ms for family in found.values())
    found["rest"] = Family("rest", 1, max(0.0, total - inside))
    for family in found.values():
        family.share = family.ms / max(total, inside)
        family.gmacs = family.macs / family.ms / 1e6 if family.macs and family.ms else None
    return total, sorted(found.values(), key=lambda family: -family.ms)


def ahead(model: str, speed: Path) -> dict[str, float]:
    """Peers that were faster, with how many times as fast as ours they were."""
    if not speed.exists():
        return {}
    rows = json.loads(speed.read_text(encoding="utf-8"))["rows"]
    times = {row["peer"]: row["ms"] for row in rows if row["model"] == model and "ms" in row}
    ours = times.get("backquant")
    return {peer: ours / ms for peer, ms in times.items() if ours and ms < ours}


def table(model: str, total: float, found: Sequence[Family], faster: dict[str, float]) -> str:
    lines = [f"### {model}: {total:.2f} ms", ""]
    if faster:
        peers = ", ".join(f"{peer} ({ratio:.2f} ×)" for peer, ratio in faster.items())
        lines += [f"Ahead: {peers}.", ""]
    lines += ["| family | calls | ms | share | G MAC/s | what would close it |"]
    lines += ["|---|---|---|---|---|---|"]
    for family in found:
        rate = f"{family.gmacs:.0f}" if family.gmacs else ""
        lines.append(
            f"| {family.name} | {family.calls} | {family.ms:.3f} | {family.share:.0%} | {rate} "
            f"| {CLOSES[family.name] if faster and family.share >= 0.03 else ''} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--runs", type=int, default=7, help="runs under the profiler")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for model in options.models:
        with torch.no_grad():
            total, found = families(model, options.runs)
        faster = ahead(model, options.out / "speed.json")
        print(table(model, total, found, faster), flush=True)
        parts = [asdict(family) for family in found]
        rows.append({"model": model, "ms": total, "ahead": faster, "families": parts})
    options.out.mkdir(parents=True, exist_ok=True)
    data = {"machine": machine(), "rows": rows}
    (options.out / "profiles.json").write_text(json.dumps(data, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
