"""Loading a quantized model from its file."""

from __future__ import annotations

import os
from collections.abc import Sequence

from backquant import artifact
from backquant.pipeline.lower import lowered_again
from backquant.runtime import QuantizedModel

__all__ = ["load"]


def load(
    path: str | os.PathLike[str], *, allow: Sequence[str] = (), verify: bool = True
) -> QuantizedModel:
    """Read back what ``save`` wrote. The model's own code is not needed.

    A file can make nothing run but tensor operators from a list: see ``backquant.artifact``.

    Args:
        path: the file.
        allow: packages besides torch and backquant whose classes and functions the file may name.
        verify: compare each tensor with its digest. Without it a very large file is mapped into memory and
            read on use; it must then not change while the model lives.

    Raises:
        ArtifactError: no such file, another kind of file, a damaged one, one of a newer version, or one
            that names something that is not allowed.
        EngineError: the engine that the model was lowered to does not run here.
    """
    return lowered_again(artifact.read_model(path, allow=allow, verify=verify))
