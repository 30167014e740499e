"""GGUF read back: what its own package dequantizes, bit for bit; converted; and files that lie refused."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import backquant
from backquant.deploy.checkpoints.gguf_blocks import BLOCK_TYPES
from backquant.deploy.checkpoints.gguf_model import in_pairs
from backquant.errors import ArtifactError, BackquantError, ExportError, UsageError
from tiny_decoders import dequantized, folder_of, logits

gguf = pytest.importorskip("gguf")


def some_bytes(kind: str, rows: int, columns: int) -> np.ndarray:
    """Blocks of any bits whose float16 numbers are finite."""
    block = BLOCK_TYPES[kind]
    made = np.random.default_rng(0).integers(0, 256, (rows, columns // block.count, block.size))
    made = made.astype(np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0, 2))
    for place in places if block.size > 34 or kind.endswith(("_1", "_K")) else places[:1]:
        made[..., place + 1] &= 0b10111011  # no exponent of infinities
    return made.reshape(rows, -1)


def write(place: Path, kind: str, arch: str = "llama", **values: int) -> np.ndarray:
    """A file with a matrix of this type; its bytes."""
    writer = gguf.GGUFWriter(place, arch)
    known = {"block_count": 1, "context_length": 8, "embedding_length": 256}
    known |= {"feed_forward_length": 8, "attention.head_count": 2}
    for key, value in {**known, **values}.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    stored = some_bytes(kind, 8, 256)
    number = gguf.GGMLQuantizationType[kind]
    writer.add_tensor("token_embd.weight", stored, raw_dtype=number)
    writer.add_tensor("blk.0.attn_q.weight", stored, raw_dtype=number)
    writer.add_tensor("output_norm.weight", np.arange(256, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES))
def test_bit_for_bit(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "model.gguf"
    stored = write(place, kind)
    checkpoint = backquant.load_checkpoint(place)
    theirs = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
    layer = checkpoint.layer("model.embed_tokens")
    assert torch.equal(layer.dequantized(), torch.from_numpy(theirs))
    rows = in_pairs(checkpoint.layer("model.layers.0.self_attn.q_proj").dequantized(), 2)
    assert torch.equal(rows, torch.from_numpy(theirs))
    assert torch.equal(checkpoint.read("model.norm.weight"), torch.arange(256.0))


@pytest.mark.parametrize("weights", ["int4:32", "uint4:32", "int8:32"])
def test_to_a_folder_and_back(weights: str, tmp_path: Path, opened: Any) -> None:
    """The same bytes; and transformers computes with the folder what the file says."""
    source, place = folder_of("llama", tmp_path, torch.float16), tmp_path / "model.gguf"
    ignore = ("lm_head", "model.embed_tokens")
    backquant.quantize_checkpoint(source, place, to="gguf", weights=weights, ignore=ignore)
    checkpoint = backquant.load_checkpoint(place)
    folder, again = tmp_path / "folder", tmp_path / "again.gguf"
    backquant.export(checkpoint, folder, to="compressed-tensors")
    read = backquant.load_checkpoint(folder)
    for path in checkpoint.schemes:
        assert torch.equal(checkpoint.layer(path).unsigned()[0], read.layer(path).unsigned()[0])
    if not weights.startswith("u"):  # transformers lays out no packed zero points
        assert torch.equal(logits(opened(folder)), logits(dequantized(read, tmp_path)))
    backquant.export(read, again, to="gguf", options={"source": source})
    first, second = (gguf.GGUFReader(file) for file in (place, again))
    stored = {tensor.name: tensor.data for tensor in second.tensors}
    for tensor in first.tensors:
        assert np.array_equal(tensor.data, stored[tensor.name])


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    place = tmp_path / "model.gguf"
    write(place, "Q4_1")
    checkpoint = backquant.load_checkpoint(place)
    with pytest.raises(ExportError, match=r"does not hold model\.embed_tokens as it is"):
        backquant.export(checkpoint, tmp_path / "out", to="compressed-tensors")
    options = {"ignore": ["model.embed_tokens"]}
    with pytest.raises(ExportError, match=r"the minima of .*q_proj are no zero points"):
        backquant.export(checkpoint, tmp_path / "out", to="compressed-tensors", options=options)
    with pytest.raises(UsageError, match="no quantized layer is called 'head'"):
        backquant.export(checkpoint, tmp_path / "out", to="mlx", options={"ignore": ["head"]})
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".out*"))
    backquant.export(checkpoint, tmp_path / "out", to="mlx")  # which stores minima
    read = backquant.load_checkpoint(tmp_path / "out")
    for path in checkpoint.schemes:
        assert torch.equal(read.layer(path).dequantized(), checkpoint.layer(path).dequantized())


def test_an_unknown_architecture_is_read(tmp_path: Path) -> None:
    place = tmp_path / "model.gguf"
    write(place, "Q8_0", arch="falcon")
    checkpoint = backquant.load_checkpoint(place)
    assert list(checkpoint.schemes) == ["token_embd", "blk.0.attn_q"]
    with pytest.raises(UsageError, match="the architecture 'falcon' is not known"):
        backquant.export(checkpoint, tmp_path / "out", to="mlx")


def with_the_folder(fix: str, names: dict[str, Any]) -> None:
    assert fix.startswith('options={"source": folder}')
    options = {"source": names["source"]}
    backquant.export(names["checkpoint"], names["tmp_path"] / "mlx", to="mlx", options=options)


BY_HAND = {'options={"source"': with_the_folder}


def test_what_a_file_alone_does_not_say(tmp_path: Path, snapshot: Any) -> None:
    """Its folder does: the fix is followed."""
    source, place = folder_of("llama", tmp_path, torch.float16), tmp_path / "model.gguf"
    backquant.quantize_checkpoint(source, place, to="gguf", weights="int8:32")
    checkpoint = backquant.load_checkpoint(place)
    checkpoint.source.file.values["llama.rope.scaling.type"] = "yarn"
    with pytest.raises(UsageError) as raised:
        backquant.export(checkpoint, tmp_path / "out", to="mlx")
    snapshot("rotary-embeddings-of-a-type", str(raised.value).replace(str(place), "PLACE"))


def test_other_types_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "model.gguf"
    write(place, "Q8_0")
    data = bytearray(place.read_bytes())
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", 23)
    place.write_bytes(data)
    with pytest.raises(UsageError, match=r"blk.0.attn_q.weight of .* is IQ4_XS, which is not read"):
        backquant.load_checkpoint(place)


def header(*parts: bytes, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(parts)


def text(words: bytes) -> bytes:
    return struct.pack("<Q", len(words)) + words


def tensor(name: bytes, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


LIES = {
    "empty": b"",
    "another file": b"PK\3\4" + bytes(64),
    "a version": b"GGUF" + struct.pack("<I", 99) + bytes(64),
    "as many tensors": header(tensors=2**60),
    "as many keys": header(keys=2**63),
    "a long text": header(struct.pack("<Q", 2**60), bytes(64), keys=1),
    "a long list": header(text(b"a"), struct.pack("<IIQ", 9, 0, 2**60), bytes(64), keys=1),
    "a list of lists": header(text(b"a"), struct.pack("<IIQ", 9, 9, 2), bytes(64), keys=1),
    "no text": header(text(b"\xff\xfe"), struct.pack("<I", 0), bytes(64), keys=1),
    "a kind of value": header(text(b"a"), struct.pack("<I", 77), bytes(64), keys=1),
    "a key twice": header(*[text(b"a") + struct.pack("<IQ", 10, 1)] * 2, bytes(64), keys=2),
    "a tensor twice": header(tensor(b"a", 1), tensor(b"a", 1), bytes(64), tensors=2),
    "axes": header(tensor(b"a", *[1] * 9), bytes(64), tensors=1),
    "no size": header(tensor(b"a", 0, 4), bytes(64), tensors=1),
    "a large size": header(tensor(b"a", 2**40, 2**40), bytes(64), tensors=1),
    "a kind of tensor": header(tensor(b"a", 4, kind=999), bytes(64), tensors=1),
    "no whole blocks": header(tensor(b"a", 33, 1, kind=8), bytes(99), tensors=1),
    "far away": header(tensor(b"a", 4, offset=2**60), bytes(64), tensors=1),
    "not aligned": header(tensor(b"a", 4, offset=3), bytes(64), tensors=1),
    "overlapping": header(tensor(b"a", 4), tensor(b"b", 4), bytes(128), tensors=2),
    "alignment": header(text(b"general.alignment"), struct.pack("<II", 4, 0), bytes(64), keys=1),
}


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie(lie: str, tmp_path: Path) -> None:
    place = tmp_path / "model.gguf"
    place.write_bytes(LIES[lie])
    with pytest.raises(ArtifactError, match="is no whole GGUF file"):
        backquant.load_checkpoint(place)


def test_damaged_files_are_errors_of_ours(tmp_path: Path) -> None:
    place = tmp_path / "model.gguf"
    write(place, "Q4_0")
    whole, chance = place.read_bytes(), random.Random(0)
    end = whole.index(b"output_norm.weight") + 60
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(end)] = chance.choice([0, 1, 7, 127, 128, 255])
        place.write_bytes(data[: chance.choice([len(data), chance.randrange(len(data))])])
        try:
            checkpoint = backquant.load_checkpoint(place)
            for path in checkpoint.schemes:
                checkpoint.layer(path)
        except BackquantError:
            pass
