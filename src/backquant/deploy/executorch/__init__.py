"""ExecuTorch programs (``.pte``) on the XNNPACK delegate: written, read back, and run.

1. ``rewrites``: operators that XNNPACK takes in one spelling only get that spelling.
2. ``lowering``: what XNNPACK's partitioner takes becomes delegates; what it refuses stays in float,
   with its reason.
3. ``readback``: the nodes of the delegates in the finished file, with their datatypes.
4. ``runtime``: the file in ExecuTorch's own runtime.
"""

from __future__ import annotations

from backquant.deploy.executorch.lowering import ExecuTorchModel
from backquant.deploy.executorch.target import TARGET, ExecuTorchTarget

__all__ = ["TARGET", "ExecuTorchModel", "ExecuTorchTarget"]
