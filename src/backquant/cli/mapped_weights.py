"""``backquant quantize --files``: what goes with weights that stay in their files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backquant.errors import UsageError
from backquant.report.model import Report


@contextmanager
def made_empty(files: Path | None) -> Iterator[None]:
    """Models are made without memory for their weights, where they are in files.

    >>> import torch
    >>> with made_empty(Path("weights.safetensors")):
    ...     torch.nn.Linear(2, 2).weight.device.type
    'meta'
    """
    if files is None:
        yield
        return
    from backquant.mapped import EmptyOnMeta

    with EmptyOnMeta():
        yield


def check_one_process(group: Any) -> None:
    """Raise ``UsageError`` for ranks."""
    if group is not None:
        raise UsageError(
            "weights in files are read by one process",
            where="--files",
            fix="backquant quantize ..., without torchrun",
        )


def written(output: Path, report: Report) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "artifact": str(output),
        "artifact_bytes": output.stat().st_size,
        **report.to_dict(),
    }
