"""The artifact file: a safetensors file whose ``__metadata__`` holds one JSON document. No pickle.

The document, under the key ``backquant``, is ``{"format_version": 2, "sha256": "…", "manifest": {…}}``, in
this order: the digest is that of the text of the manifest. The manifest (``manifest.py``) holds everything
beside the bytes of tensors, with a digest of those of each; so the digest of the manifest is one of the
whole. One model gives one file, byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from backquant.artifact.manifest import LONGEST, check_manifest
from backquant.errors import ArtifactError, BackquantError, EngineError
from backquant.files import is_folder, replace_file

_KEY = "backquant"
FORMAT_VERSION = 2
_VERSION = re.compile(r'\{"format_version": (\d{1,9})[,}]')
_LAYOUT = re.compile(
    r'\{"format_version": \d+, "sha256": "([0-9a-f]{64})", "manifest": (.*)\}', re.DOTALL
)
_SAVE_AGAIN = "write it again: backquant.save(quantized, path)"
# What reading data of an unexpected shape raises.
_CAUSES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BackquantError,
    LookupError,
    MemoryError,
    NameError,
    RecursionError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def write_file(
    path: str | os.PathLike[str], document: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Write manifest and tensors to a temporary name beside ``path`` and rename: no half-written file is
    ever seen. The table of tensors, with their digests, is added to the manifest.

    Raises ``ArtifactError`` when the folder does not exist or cannot be written to, or the disk is
    full; what stood at ``path`` before then still does.
    """
    target = Path(path)
    check_place(target)
    manifest = manifest_text(document, tensors)
    check_manifest(manifest)
    try:
        replace_file(target, _bounded(_pieces(manifest, tensors)))
    except OSError as error:
        size = sum(map(len, _pieces(manifest, tensors)))
        raise ArtifactError(
            f"{target} cannot be written: {error.strerror or error}",
            where=str(target),
            fix=f"make room or choose another folder; the file needs {size:,} bytes",
        ) from error


def check_place(target: Path) -> None:
    if not is_folder(target.parent):
        raise ArtifactError(
            f"the folder {target.parent} does not exist",
            where=str(target),
            fix=f"mkdir -p {target.parent}",
        )
    if is_folder(target):
        raise ArtifactError(
            f"{target} is a folder", where=str(target), fix=f"path={str(target / 'model.bq')!r}"
        )
    try:
        str(target).encode()
    except UnicodeEncodeError as error:
        raise ArtifactError(
            f"the name {str(target)!r} is no UTF-8, and safetensors opens no other files",
            where="path",
            fix="path='model.bq'",
        ) from error


def packed(manifest: str, tensors: dict[str, torch.Tensor]) -> bytes:
    """The bytes of a file, whatever the manifest says."""
    return b"".join(_pieces(manifest, tensors))


def _pieces(manifest: str, tensors: dict[str, torch.Tensor]) -> Iterator[memoryview]:
    digest = hashlib.sha256(manifest.encode()).hexdigest()
    text = f'{{"format_version": {FORMAT_VERSION}, "sha256": "{digest}", "manifest": {manifest}}}'
    return pieces(tensors, {_KEY: text})


def _bounded(parts: Iterator[memoryview]) -> Iterator[memoryview]:
    """The pieces of a file, whose first is its header."""
    first = next(parts)
    _check_length(len(first) - 8)
    yield first
    yield from parts


def _check_length(length: int) -> None:
    """Of the header of a file, before it is read."""
    if length > LONGEST:
        raise ArtifactError(
            f"the header has {length:,} bytes; at most {LONGEST:,} are read", where="manifest"
        )


def manifest_text(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    """``document`` as JSON, with the table of tensors and their digests."""
    table = {key: {**_entry(tensor), "sha256": _digest(tensor)} for key, tensor in tensors.items()}
    return json.dumps({**document, "tensors": table})


def _entry(tensor: torch.Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _digest(tensor: torch.Tensor) -> str:
    """The digest of a tensor's bytes, in the order in which the file holds them."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


class _Other(NamedTuple):
    what: str
    fix: str


_PICKLED = _Other("what torch.save wrote", _SAVE_AGAIN)
_DEPLOYED = "backquant.compare(model, path, batches)   # runs it in {}"
#: Files that people take for ours, by suffix.
_OTHER_FILES = {
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), _PICKLED),
    ".pt2": _Other("a program or a package of torch", _DEPLOYED.format("PyTorch")),
    ".onnx": _Other("an ONNX file", _DEPLOYED.format("ONNX Runtime")),
    ".xml": _Other("an OpenVINO file", _DEPLOYED.format("OpenVINO")),
    ".pte": _Other("an ExecuTorch file", _DEPLOYED.format("ExecuTorch")),
    ".tflite": _Other("a LiteRT file", _DEPLOYED.format("LiteRT")),
    ".gguf": _Other("a GGUF checkpoint", "backquant.load_checkpoint(path)"),
}


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
        other = _OTHER_FILES.get(Path(path).suffix.lower()) if Path(path).is_file() else None
        if other is not None:
            raise ArtifactError(
                f"{path} is {other.what}, not a file that backquant.save wrote",
                where=str(path),
                fix=other.fix,
            ) from error
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


@dataclass(frozen=True)
class ManifestText:
    """The text of a manifest that is what its digest says, and that digest."""

    manifest: str
    sha256: str


def _text(path: Path, metadata: dict[str, str] | None) -> ManifestText:
    if not metadata or _KEY not in metadata:
        raise ArtifactError(
            f"{path} is a safetensors file, but not one that backquant wrote",
            where=str(path),
            fix="backquant.save(quantized, path) writes such files",
        )
    stored = metadata[_KEY]
    version = _VERSION.match(stored)
    if version is not None:
        _check_version(path, int(version[1]))
    layout = _LAYOUT.fullmatch(stored)
    if layout is None:
        raise ArtifactError(
            f"{path} does not hold a manifest and its digest", where=str(path), fix=_SAVE_AGAIN
        )
    text = ManifestText(layout[2], layout[1])
    if hashlib.sha256(text.manifest.encode()).hexdigest() != text.sha256:
        raise _changed(path, "the manifest")
    return text


def _check_version(path: Path, version: int) -> None:
    if version > FORMAT_VERSION:
        raise ArtifactError(
            f"{path} has format version {version}; this backquant reads up to {FORMAT_VERSION}",
            where=str(path),
            fix="load it with the backquant that wrote it, or a newer one",
        )
    if version < FORMAT_VERSION:
        raise ArtifactError(
            f"{path} is of before the first release: it has no digests",
            where=str(path),
            fix="quantize the model again, and backquant.save(quantized, path)",
        )


def _changed(path: Path, what: str) -> ArtifactError:
    return ArtifactError(
        f"{what} of {path} is not what was saved: its sha-256 digest differs",
        where=str(path),
        fix="copy the file again from where it was saved; it was damaged or changed on the way",
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ArtifactError(f"{path} {what}", where=str(path), fix="check the path")
    with readable(path):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length < path.stat().st_size:  # else it is no file of safetensors, which says so
            _check_length(length)
        with safe_open(str(path), framework="pt") as stream:
            yield stream


def read_text(path: str | os.PathLike[str]) -> ManifestText:
    """The manifest alone; no tensor is read. Raises ``ArtifactError``."""
    with _opened(Path(path)) as stream:
        return _text(Path(path), stream.metadata())


def read_file(
    path: str | os.PathLike[str], *, verify: bool = True
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The checked manifest and all tensors. Raises ``ArtifactError``.

    Without ``verify`` tensors are mapped into memory and read when they are used, and what they hold is
    not compared with their digests.
    """
    target = Path(path)
    with _opened(target) as stream:
        document = check_manifest(_text(target, stream.metadata()).manifest)
        table = document["tensors"]
        if set(stream.keys()) != set(table):
            raise _changed(target, "the table of tensors")
        tensors = {}
        for key, entry in table.items():
            tensor = stream.get_tensor(key).clone() if verify else stream.get_tensor(key)
            if {**_entry(tensor), "sha256": entry["sha256"]} != entry:
                raise _changed(target, f"the header of tensor {key!r}")
            if verify and _digest(tensor) != entry["sha256"]:
                raise _changed(target, f"tensor {key!r}")
            tensors[key] = tensor
        return document, tensors


# A safetensors file in pieces, so that no tensor is copied and the file is never in memory as a whole.
#
# The bytes are those that ``safetensors`` itself writes: metadata first, tensors by dtype and then by name.
# Source: the format's description in the README of safetensors, and ``prepare`` in its ``tensor.rs``.

# As they are sorted in a file: larger ones first, so that each begins at a multiple of its size.
_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_NAMES)}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in the order of its elements; not copied where they lie so.

    >>> bytes(bytes_of(torch.tensor([1, 2], dtype=torch.int16)))
    b'\\x01\\x00\\x02\\x00'
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data if flat.numel() else memoryview(b"")


def pieces(tensors: Mapping[str, torch.Tensor], text: Mapping[str, str]) -> Iterator[memoryview]:
    """The file of these tensors with the metadata ``text``, one piece after the other.

    Raises ``ArtifactError`` for a dtype that the format has not.

    >>> b"".join(pieces({}, {"a": "b"}))[8:]
    b'{"__metadata__":{"a":"b"}}      '
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ArtifactError(
                f"{tensor.dtype} has no place in a safetensors file",
                where=name,
                fix="a buffer of another dtype: complex64 in place of complex128",
            )
    names = sorted(tensors, key=lambda name: (_RANKS[tensors[name].dtype], name))
    table: dict[str, object] = {"__metadata__": dict(text)}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        table[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for name in names:
        yield bytes_of(tensors[name])
