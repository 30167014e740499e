"""What a GGUF file says beside its tensors: of the architecture, and of the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from backquant.errors import ExportError, UsageError
from backquant.json_text import read_json


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
