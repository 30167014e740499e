"""The artifact file: a safetensors file whose ``__metadata__`` holds one JSON document. No pickle.

The document names the format version, the versions of torch and backquant that wrote it, the engine
with its instruction set, and holds the graph and modules, the backend's spec, the plan and the report.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_save

from backquant.errors import ArtifactError

__all__ = ["FORMAT", "FORMAT_VERSION", "read_document", "read_file", "write_file"]

FORMAT = "backquant"
FORMAT_VERSION = 1


def write_file(
    path: str | os.PathLike[str], document: dict[str, Any], tensors: dict[str, Any]
) -> None:
    """Write to a temporary name beside ``path`` and rename: no half-written file is ever seen."""
    target = Path(path)
    if not target.parent.is_dir():
        raise ArtifactError(
            f"the folder {target.parent} does not exist",
            where=str(target),
            fix=f"create it first: mkdir -p {target.parent}",
        )
    metadata = {"format": FORMAT, "version": str(FORMAT_VERSION), "document": json.dumps(document)}
    payload = safetensors_save(tensors, metadata=metadata)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(payload)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _check_metadata(path: Path, metadata: dict[str, str] | None) -> dict[str, Any]:
    if not metadata or metadata.get("format") != FORMAT:
        raise ArtifactError(
            f"{path} is a safetensors file, but not one that backquant wrote",
            where=str(path),
            fix="backquant.save(quantized, path) writes such files",
        )
    if int(metadata["version"]) > FORMAT_VERSION:
        raise ArtifactError(
            f"{path} has format version {metadata['version']}; this backquant reads up to "
            f"{FORMAT_VERSION}",
            where=str(path),
            fix="pip install --upgrade backquant",
        )
    document: dict[str, Any] = json.loads(metadata["document"])
    return document


def _open(
    path: Path, names: Sequence[str] | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if not path.is_file():
        raise ArtifactError(f"{path} does not exist", where=str(path), fix="check the path")
    try:
        with safe_open(str(path), framework="pt") as stream:
            document = _check_metadata(path, stream.metadata())
            keys = stream.keys() if names is None else names
            return document, {key: stream.get_tensor(key) for key in keys}
    except SafetensorError as error:
        raise ArtifactError(
            f"{path} is not a readable artifact: {error}",
            where=str(path),
            fix="write it again with backquant.save(quantized, path); the file may be truncated",
        ) from error


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON document alone; no tensor is read."""
    return _open(Path(path), ())[0]


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The JSON document and all tensors."""
    return _open(Path(path), None)
