"""Write docs/conformance/registries.md: descriptions beside what their runtimes register, both ways.

python -m tools.registries_page
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import ModuleType

from tools import onnxruntime_registry, xnnpack_registry

PAGE = Path(__file__).resolve().parents[1] / "docs" / "conformance" / "registries.md"
#: By description: where its runtime's registry is read, the package that has it, what it is, and why it has
#: more than the description.
REGISTRIES: dict[str, tuple[ModuleType, str, str, str]] = {
    "onnxruntime": (
        onnxruntime_registry,
        "onnxruntime",
        "definitions of kernels by type",
        "signed activations and unsigned weights are slower than float there, or leave neighbours in float; "
        "no operator that is quantized becomes QLinearWhere",
    ),
    "xnnpack": (
        xnnpack_registry,
        "executorch",
        "configurations of the XNNPACK partitioner",
        "all but slices is what exporting makes of claimed operators, or of their quantization",
    ),
}


def page() -> Iterator[str]:
    """The lines of the page."""
    yield "# Descriptions beside the registries of their runtimes"
    yield ""
    day = datetime.now(tz=timezone.utc).date().isoformat()
    yield (
        f"Written by `python -m tools.registries_page`, {day}. OpenVINO registers operators without the "
        "types that a kernel computes on integers: what it does is known once a model is compiled "
        "([its page](engines.md#openvino))."
    )
    for name, (module, package, what, why) in REGISTRIES.items():
        yield ""
        yield f"## `{name}`: {what} of {package} {metadata.version(package)}"
        yield from _listed("Claimed, and not registered", list(module.beyond_the_registry()))
        yield from _listed(f"Registered, and not claimed ({why})", list(module.unclaimed()))


def _listed(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield ""
    yield f"{title}: {len(lines) or 'nothing'}{'.' if not lines else ''}"
    if lines:
        yield ""
        yield from (f"- {line}" for line in lines)


if __name__ == "__main__":
    PAGE.write_text("\n".join(page()) + "\n", encoding="utf-8")
