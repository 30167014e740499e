"""Checkpoint formats as targets of ``export``: a folder beside the others' files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from backquant.deploy.job import ExportJob
from backquant.deploy.target import Requirement
from backquant.errors import UsageError
from backquant.match.plan import Reason

#: The option that names the Hugging Face folder of the float model.
SOURCE = "source"
#: The option that names layers of a checkpoint that are written in float.
IGNORE = "ignore"


@dataclass(frozen=True)
class CheckpointTarget:
    """See ``backquant.deploy.target.Target``. Options: ``source``, the Hugging Face folder of the float
    model; ``ignore``, patterns of a checkpoint's layers that are written in float.

    It is written from layers, not from a graph, so nothing is captured: ``backquant.export`` calls
    ``write_checkpoint``.
    """

    name: str
    backend: str
    extra: str = "checkpoints"
    suffixes: tuple[str, ...] = ()
    requires: tuple[Requirement, ...] = ()
    options: tuple[str, ...] = (SOURCE, IGNORE)

    def check(self, job: ExportJob) -> Sequence[Reason]:
        """Nothing of a graph is refused."""
        del job
        return ()

    def write(self, job: ExportJob, path: Path) -> NoReturn:
        """Raises ``UsageError``: a checkpoint is not written from a graph."""
        del job
        raise UsageError(
            f"{self.name} is written from the layers of a model, not from a graph",
            where=str(path),
            fix=f'backquant.export(quantized, folder, to="{self.name}", options={{"source": folder}})',
        )


COMPRESSED_TENSORS = CheckpointTarget("compressed-tensors", "compressed_tensors")
GPTQ = CheckpointTarget("gptq", "gptq")
AWQ = CheckpointTarget("awq", "awq")
TORCHAO = CheckpointTarget("torchao", "torchao")
MLX = CheckpointTarget("mlx", "mlx")
GGUF = CheckpointTarget("gguf", "gguf", "gguf", (".gguf",), (Requirement("gguf", "gguf"),))
