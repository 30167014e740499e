"""GGUF: the one file that llama.cpp, Ollama and LM Studio open.

Names and numbers are those of llama.cpp; tensors are written one at a time, after a header that is known
before. What is not quantized keeps its dtype; vectors are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backquant.deploy.checkpoints.layer import Layer, Scheme
from backquant.deploy.checkpoints.one_scheme import half
from backquant.deploy.checkpoints.write import Contents, Source, check_bytes
from backquant.errors import ExportError, UsageError
from backquant.files import replacing
from backquant.json_text import read_json

_WEIGHT = ".weight"
_SKIPPED = ("rotary_emb.inv_freq",)
_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file: its name there and in the source, its shape, type and bytes."""

    name: str
    source: str
    shape: tuple[int, ...]
    kind: str
    size: int


def write_gguf(
    source: Source,
    contents: Contents,
    place: Path,
    progress: Callable[[int, int | None], None] | None = None,
) -> list[Path]:
    """Write the file ``place``.

    Raises ``UsageError`` for an architecture that is not written, ``ExportError`` for tensors without a name
    there, a tokenizer of another kind, or a file that cannot be written.
    """
    known = architecture_of(source.config, source.place)
    entries = list(_entries(source, contents, known))
    check_bytes(place, sum(entry.size for entry in entries))
    try:
        with replacing(place.resolve()) as staging:
            _write(staging, source, contents, known, entries, progress)
    except OSError as error:
        raise ExportError(
            f"{place} cannot be written: {error.strerror or error}",
            where=str(error.filename or place),
            fix="make room, or choose another folder",
        ) from error
    return [place]


def _entries(source: Source, contents: Contents, known: Architecture) -> Iterator[_Entry]:
    import gguf

    arches = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(arches[known.name], int(source.config["num_hidden_layers"]))
    for name, size in source.sizes.items():
        if name.endswith(_SKIPPED):
            continue
        found = names.get_name(name, try_suffixes=(_WEIGHT, ".bias"))
        if found is None:
            raise ExportError(
                f"{name} has no name in GGUF's {known.name}",
                where=str(source.place),
                fix="a model of that architecture, without tensors that it does not have",
            )
        path = name.removesuffix(_WEIGHT)
        shape = tuple(size.shape)
        scheme = contents.schemes.get(path) if name.endswith(_WEIGHT) else None
        if scheme is not None:
            rows, count = block_bytes(scheme, *shape)
            yield _Entry(found, name, shape, TYPES[scheme.dtype][0], rows * count)
            continue
        dtype = torch.float32 if len(shape) < 2 else size.dtype
        if dtype not in _PLAIN:
            raise ExportError(
                f"{name} is {dtype}", where=str(source.place), fix="float32, float16 or bfloat16"
            )
        yield _Entry(found, name, shape, _PLAIN[dtype], size.numel() * dtype.itemsize)


def _write(
    path: Path,
    source: Source,
    contents: Contents,
    known: Architecture,
    entries: list[_Entry],
    progress: Callable[[int, int | None], None] | None,
) -> None:
    import gguf

    writer: Any = gguf.GGUFWriter(str(path), known.name)
    try:
        dtype = next(iter(contents.schemes.values())).dtype
        write_architecture(writer, source.config, source.place.resolve().name, dtype)
        write_tokenizer(writer, source.place, source.config)
        for entry in entries:
            kind = gguf.GGMLQuantizationType[entry.kind]
            writer.add_tensor_info(entry.name, entry.shape, np.dtype("float32"), entry.size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for number, entry in enumerate(entries):
            writer.write_tensor_data(_bytes(source, contents, known, entry))
            if progress is not None:
                progress(number + 1, len(entries))
    finally:
        with suppress(OSError):
            writer.close()


def _bytes(source: Source, contents: Contents, known: Architecture, entry: _Entry) -> Any:
    path = entry.source.removesuffix(_WEIGHT)
    parent = entry.source.rpartition(".")[0]
    heads = permuted_rows(known, parent, source.config)
    if path in contents.schemes and entry.source.endswith(_WEIGHT):
        layer = contents.make(path)
        return blocks_of(_rows_in_pairs(layer, heads) if heads else layer).numpy()
    tensor = contents.changed.get(entry.source)
    tensor = source.read(entry.source) if tensor is None else tensor
    tensor = in_pairs(tensor, heads) if heads else tensor
    dtype = torch.float32 if tensor.dim() < 2 else source.sizes[entry.source].dtype
    return tensor.detach().to(dtype).contiguous().view(torch.uint8).numpy()


def _rows_in_pairs(layer: Layer, heads: int) -> Layer:
    def moved(tensor: Tensor) -> Tensor:
        return in_pairs(tensor, heads) if len(tensor) == len(layer.values) else tensor

    zero = None if layer.zero_point is None else moved(layer.zero_point)
    return replace(layer, values=moved(layer.values), scale=moved(layer.scale), zero_point=zero)


# GGUF's blocks of 32 weights, each with its scale (float16) before its values.
#
# | type | block | weight |
# | --- | --- | --- |
# | Q8_0 | scale, 32 × int8 | ``scale · q`` |
# | Q4_0 | scale, 32 × 4 bits | ``scale · (q - 8)`` |
# | Q4_1 | scale, minimum, 32 × 4 bits | ``scale · q + minimum`` |
#
# Of 4-bit values the first 16 lie in the low halves of 16 bytes, the other 16 in the high ones. Larger
# groups are
# several blocks with one scale. A minimum is ``-zero_point · scale`` in float16.

BLOCK = 32
#: By the dtype of the weights: the name of the type, and its bytes for 32 weights.
TYPES = {"int8": ("Q8_0", 34), "int4": ("Q4_0", 18), "uint4": ("Q4_1", 20)}


def block_bytes(scheme: Scheme, rows: int, columns: int) -> tuple[int, int]:
    """The shape of the bytes of a weight.

    >>> block_bytes(Scheme("int4", 64), 8, 128)
    (8, 72)
    """
    return rows, columns // BLOCK * TYPES[scheme.dtype][1]


def blocks_of(layer: Layer) -> Tensor:
    """The bytes of a layer, row by row. Raises ``ExportError`` for scales that are no float16.

    >>> layer = Layer("fc", "int8", torch.ones(1, 32, dtype=torch.int8), torch.full((1, 1), 0.5))
    >>> blocks_of(layer)[0, :4]
    tensor([ 0, 56,  1,  1], dtype=torch.uint8)
    """
    rows, columns = layer.values.shape
    count = columns // BLOCK
    repeats = count // layer.scale.shape[1]
    scale = half(layer).repeat_interleave(repeats, 1).reshape(rows, count, 1)
    parts = [scale]
    values, zero = layer.unsigned()
    if layer.zero_point is not None:
        minimum = -zero.double() * layer.scale.double()
        parts.append(minimum.half().repeat_interleave(repeats, 1).reshape(rows, count, 1))
    if layer.dtype == "int8":
        packed = layer.values.reshape(rows, count, BLOCK).view(torch.uint8)
    else:
        low, high = values.to(torch.uint8).reshape(rows, count, 2, BLOCK // 2).unbind(2)
        packed = low | (high << 4)
    heads = [part.contiguous().view(torch.uint8) for part in parts]
    return torch.cat([*heads, packed], -1).reshape(rows, -1)


# What a GGUF file says beside its tensors: of the architecture, and of the tokenizer.


@dataclass(frozen=True)
class Architecture:
    """``name``: llama.cpp's. ``permuted``: projections whose rows lie in halves in the files, and in pairs in
    GGUF (rotary embeddings of neighbours), with the key of ``config.json`` that counts their heads."""

    name: str
    permuted: Mapping[str, str]


_ROTARY = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
#: By the architecture of ``config.json``.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", _ROTARY),
    "MistralForCausalLM": Architecture("llama", _ROTARY),
    "Qwen2ForCausalLM": Architecture("qwen2", {}),
    "Qwen3ForCausalLM": Architecture("qwen3", {}),
}
#: Words in the patterns of a tokenizer, and llama.cpp's name of what splits so; the first that is there.
_SPLITS = (
    (r"\p{N}{1,3}", "llama-bpe"),
    (r"|\p{N}|", "qwen2"),
    ('"individual_digits": true', "smollm"),
    ("", "gpt-2"),
)
_NORMAL, _CONTROL, _USER, _UNUSED, _BYTE = 1, 3, 4, 5, 6


def architecture_of(config: Mapping[str, Any], place: Path) -> Architecture:
    """Raises ``UsageError`` for an architecture that is not written."""
    name = str(next(iter(config.get("architectures") or ["none"])))
    if name not in ARCHITECTURES:
        raise UsageError(
            f"a {name} is not written as GGUF",
            where=str(place / "config.json"),
            fix=f'one of {", ".join(ARCHITECTURES)}; or to="compressed-tensors", which takes all',
        )
    return ARCHITECTURES[name]


def permuted_rows(known: Architecture, path: str, config: Mapping[str, Any]) -> int:
    """In how many heads the rows of a projection are laid out anew; 0: as they are."""
    key = known.permuted.get(path.rpartition(".")[2])
    if key is None:
        return 0
    return int(config.get(key) or config["num_attention_heads"])


def in_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Rows in two halves of each head, as pairs of neighbours.

    >>> import torch
    >>> in_pairs(torch.arange(4), 1)
    tensor([0, 2, 1, 3])
    """
    rows = tensor.shape[0]
    return tensor.reshape(heads, 2, rows // heads // 2, -1).transpose(1, 2).reshape(tensor.shape)


def write_architecture(writer: Any, config: Mapping[str, Any], name: str, dtype: str) -> None:
    """The sizes that ``config.json`` has."""
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or config["hidden_size"] // heads)
    rope = config.get("rope_parameters") or {}
    base = config.get("rope_theta") or rope.get("rope_theta") or 10000.0
    kind = rope.get("rope_type", "default") if rope else "default"
    if kind != "default" or config.get("rope_scaling"):
        raise ExportError(
            f"rotary embeddings of the type {kind!r} are not written as GGUF",
            where=f"config.json: {rope or config.get('rope_scaling')}",
            fix='to="compressed-tensors", which keeps config.json',
        )
    writer.add_name(name)
    writer.add_file_type({"int8": 7, "int4": 2, "uint4": 3}[dtype])
    writer.add_quantization_version(2)
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_rope_freq_base(float(base))
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_vocab_size(int(config["vocab_size"]))


def write_tokenizer(writer: Any, place: Path, config: Mapping[str, Any]) -> None:
    """The tokenizer of ``tokenizer.json``; without one the file says so, and takes tokens by number.

    Raises ``ExportError`` for one that is no byte-pair encoding.
    """
    file = place / "tokenizer.json"
    data = read_json(file.read_bytes()) if file.is_file() else {}
    if not data.get("model"):
        writer.add_tokenizer_model("none")
        return
    model = data["model"]
    if model.get("type", "BPE") != "BPE":
        raise ExportError(
            f"a tokenizer of the type {model.get('type')!r} is not written as GGUF",
            where=str(file),
            fix="a model with a byte-pair encoding",
        )
    tokens, types = _tokens(data, int(config["vocab_size"]))
    by_pieces = bool(model.get("byte_fallback"))
    writer.add_tokenizer_model("llama" if by_pieces else "gpt2")
    if by_pieces:
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
    else:
        text = file.read_text(encoding="utf-8").replace("\\\\", "\\")
        writer.add_tokenizer_pre(next(pre for words, pre in _SPLITS if words in text))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = model.get("merges") or ()
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    added: tuple[tuple[str, Callable[[int], None]], ...] = (
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
        ("pad_token_id", writer.add_pad_token_id),
    )
    for key, add in added:
        value = config.get(key)
        value = value[0] if isinstance(value, list) else value
        if isinstance(value, int) and 0 <= value < len(tokens):
            add(value)
    template = place / "chat_template.jinja"
    settings = place / "tokenizer_config.json"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))
    elif settings.is_file():
        chat = read_json(settings.read_bytes()).get("chat_template")
        if isinstance(chat, str):
            writer.add_chat_template(chat)


def _tokens(data: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Tokens by number, and their kinds."""
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [_UNUSED] * size
    for token, index in data["model"]["vocab"].items():
        if index < size:
            is_byte = len(token) == 6 and token.startswith("<0x")
            tokens[index], types[index] = token, _BYTE if is_byte else _NORMAL
    for entry in data.get("added_tokens") or ():
        if entry["id"] < size:
            tokens[entry["id"]] = entry["content"]
            types[entry["id"]] = _CONTROL if entry.get("special") else _USER
    return tokens, types
