"""Models exported for ExecuTorch's XNNPACK delegate, beside its floats and its own XNNPACKQuantizer.

As in ``deploy_onnx``: one process, one thread, in turns; ratios of CPU time within a round.

    python -m benchmarks.deploy_executorch resnet18 mobilenet_v2 --out out/deploy_executorch.json
"""

from __future__ import annotations

from benchmarks import deploy_onnx
from benchmarks.peers import executorch


def main() -> None:
    forms = {
        "float": executorch.prepare_float,
        "own": executorch.prepare_own,
        "ours": executorch.prepare_ours,
    }
    deploy_onnx.runtimes = lambda: {"executorch": forms}
    deploy_onnx.main()


if __name__ == "__main__":
    main()
