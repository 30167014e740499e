"""The artifact file: a safetensors file whose ``__metadata__`` holds one JSON document. No pickle.

The document, under the key ``backquant``, names the format version, the versions of torch and
backquant that wrote it, the engine with its instruction set, and holds the graph and modules, the
backend's spec, the plan and the report. One model gives one file, byte for byte.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_save

from backquant.errors import ArtifactError, BackquantError, EngineError

__all__ = ["FORMAT_VERSION", "read_document", "read_file", "readable", "write_file"]

_KEY = "backquant"
FORMAT_VERSION = 1
_SAVE_AGAIN = "write it again: backquant.save(quantized, path)"
# What reading data of an unexpected shape raises.
_CAUSES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BackquantError,
    LookupError,
    MemoryError,
    RecursionError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def write_file(
    path: str | os.PathLike[str], document: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Write to a temporary name beside ``path`` and rename: no half-written file is ever seen.

    Raises ``ArtifactError`` when the folder does not exist or cannot be written to, or the disk is
    full; what stood at ``path`` before then still does.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise ArtifactError(
            f"the folder {target.parent} does not exist",
            where=str(target),
            fix=f"create it first: mkdir -p {target.parent}",
        )
    if target.is_dir():
        raise ArtifactError(
            f"{target} is a folder", where=str(target), fix=f"name a file: {target / 'model.bq'}"
        )
    metadata = {_KEY: json.dumps({"format_version": FORMAT_VERSION, **document})}
    payload = safetensors_save(tensors, metadata=metadata)
    try:
        _replace(target, payload)
    except OSError as error:
        raise ArtifactError(
            f"{target} cannot be written: {error.strerror or error}",
            where=str(target),
            fix=f"make room or choose another folder; the file needs {len(payload):,} bytes",
        ) from error


def _replace(target: Path, payload: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(payload)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(_mode(target))
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _mode(target: Path) -> int:
    """The permissions of the file that is replaced, else those of any new file."""
    with contextlib.suppress(OSError):
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


@contextlib.contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever a damaged file leads to into an ``ArtifactError`` that names the file.

    An ``EngineError`` says nothing about the file and stays as it is.
    """
    try:
        yield
    except EngineError:
        raise
    except ArtifactError as error:
        known = str(path) in error.where
        where = error.where if known else ": ".join(filter(None, (str(path), error.where)))
        raise ArtifactError(error.what, where=where, fix=error.fix) from error
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            f"{path} is not a readable artifact: {error}",
            where=str(path),
            fix=f"{_SAVE_AGAIN}; the file may be truncated",
        ) from error
    except _CAUSES as error:
        reason = error.what if isinstance(error, BackquantError) else error
        raise ArtifactError(
            f"{path} does not hold what its format asks for ({type(error).__name__}: {reason})",
            where=str(path),
            fix=_SAVE_AGAIN,
        ) from error


def _document(path: Path, metadata: dict[str, str] | None) -> dict[str, Any]:
    if not metadata or _KEY not in metadata:
        raise ArtifactError(
            f"{path} is a safetensors file, but not one that backquant wrote",
            where=str(path),
            fix="backquant.save(quantized, path) writes such files",
        )
    document: dict[str, Any] = json.loads(metadata[_KEY])
    if int(document["format_version"]) > FORMAT_VERSION:
        raise ArtifactError(
            f"{path} has format version {document['format_version']}; this backquant reads up to "
            f"{FORMAT_VERSION}",
            where=str(path),
            fix="pip install --upgrade backquant",
        )
    return document


def _open(
    path: Path, names: Sequence[str] | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ArtifactError(f"{path} {what}", where=str(path), fix="check the path")
    with readable(path), safe_open(str(path), framework="pt") as stream:
        document = _document(path, stream.metadata())
        keys = stream.keys() if names is None else names
        return document, {key: stream.get_tensor(key) for key in keys}


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON document alone; no tensor is read. Raises ``ArtifactError``."""
    return _open(Path(path), ())[0]


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The JSON document and all tensors. Raises ``ArtifactError``."""
    return _open(Path(path), None)
