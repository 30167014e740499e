"""Models exported for AOTInductor, beside its floats and its own X86InductorQuantizer.

As in ``deploy_onnx``: one process, one thread, in turns; ratios of CPU time within a round.

    python -m benchmarks.deploy_inductor resnet18 mobilenet_v2 --out out/deploy_inductor.json
"""

from __future__ import annotations

from benchmarks import deploy_onnx
from benchmarks.peers import inductor


def main() -> None:
    forms = {
        "float": inductor.prepare_float,
        "own": inductor.prepare_own,
        "ours": inductor.prepare_ours,
    }
    deploy_onnx.runtimes = lambda: {"inductor": forms}
    deploy_onnx.main()


if __name__ == "__main__":
    main()
