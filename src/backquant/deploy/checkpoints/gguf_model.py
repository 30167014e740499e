"""What a GGUF file says beside its tensors: of the architecture, and of the tokenizer.

1. A table says for each architecture how llama.cpp names its tensors, and one for all how it names the
   numbers of ``config.json``; both are read in both directions.
2. Rows of projections lie in halves in a Hugging Face folder, and of some architectures in pairs in GGUF
   (rotary embeddings of neighbours).
3. Norms that compute ``1 + weight`` have 1 added in GGUF.
4. Experts are one tensor in GGUF.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from backquant.errors import ExportError, UsageError
from backquant.json_text import read_json

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_USUAL = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: Where the number of an expert stands.
_EXPERT = "{}"
_MIXTRAL = {
    **_ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_QWEN_MOE = {
    **_ATTENTION,
    **_HEAD_NORMS,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_ROTARY = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


@dataclass(frozen=True)
class Architecture:
    """``name``: llama.cpp's. ``model_type``: that of ``config.json``. ``blocks``: the names in a layer,
    GGUF's first. ``permuted``: rule 2, with the key that counts their heads. ``raised``: rule 3."""

    name: str
    model_type: str
    blocks: Mapping[str, str]
    permuted: Mapping[str, str]
    raised: bool = False

    def gguf_name(self, name: str) -> tuple[str, int | None]:
        """The name in GGUF of a tensor, and the number of the expert that it is of. Raises ``KeyError``.

        >>> mixtral = ARCHITECTURES["MixtralForCausalLM"]
        >>> mixtral.gguf_name("model.layers.1.block_sparse_moe.experts.3.w2.weight")
        ('blk.1.ffn_down_exps.weight', 3)
        """
        path, _, end = name.rpartition(".")
        outside = {there: here for here, there in _OUTSIDE.items()}
        if path in outside:
            return f"{outside[path]}.{end}", None
        prefix, _, rest = path.partition("layers.")
        number, _, part = rest.partition(".")
        if prefix != "model." or not number.isdecimal():
            raise KeyError(name)
        expert = re.search(r"(?<=experts\.)\d+(?=\.)", part)
        if expert is not None:
            part = part[: expert.start()] + _EXPERT + part[expert.end() :]
        inside = {there: here for here, there in self.blocks.items()}
        return f"blk.{number}.{inside[part]}.{end}", expert and int(expert.group())

    def source_name(self, name: str) -> str:
        """The inverse: experts have ``{}`` for their number. Raises ``KeyError``.

        >>> ARCHITECTURES["LlamaForCausalLM"].source_name("blk.1.ffn_down.weight")
        'model.layers.1.mlp.down_proj.weight'
        """
        path, _, end = name.rpartition(".")
        if path in _OUTSIDE:
            return f"{_OUTSIDE[path]}.{end}"
        block, number, part = [*path.split(".", 2), "", ""][:3]
        if block != "blk" or not number.isdecimal():
            raise KeyError(name)
        return f"model.layers.{number}.{self.blocks[part]}.{end}"

    def is_raised(self, name: str) -> bool:
        """Rule 3."""
        return self.raised and name.endswith("norm.weight")


#: By the architecture of ``config.json``.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", "llama", _USUAL, _ROTARY),
    "MistralForCausalLM": Architecture("llama", "mistral", _USUAL, _ROTARY),
    "MixtralForCausalLM": Architecture("llama", "mixtral", _MIXTRAL, _ROTARY),
    "Qwen2ForCausalLM": Architecture("qwen2", "qwen2", _USUAL, {}),
    "Qwen3ForCausalLM": Architecture("qwen3", "qwen3", {**_USUAL, **_HEAD_NORMS}, {}),
    "Qwen3MoeForCausalLM": Architecture("qwen3moe", "qwen3_moe", _QWEN_MOE, {}),
    "GemmaForCausalLM": Architecture("gemma", "gemma", _USUAL, {}, raised=True),
    "Gemma2ForCausalLM": Architecture("gemma2", "gemma2", _FOUR_NORMS, {}, raised=True),
}
#: GGUF's keys behind the name of the architecture, and those of ``config.json``, the first that is there.
#: ``u``: a whole number.
_NUMBERS = (
    ("block_count", "u", ("num_hidden_layers",)),
    ("context_length", "u", ("max_position_embeddings",)),
    ("embedding_length", "u", ("hidden_size",)),
    ("feed_forward_length", "u", ("intermediate_size",)),
    ("attention.head_count", "u", ("num_attention_heads",)),
    ("attention.head_count_kv", "u", ("num_key_value_heads", "num_attention_heads")),
    ("attention.layer_norm_rms_epsilon", "f", ("rms_norm_eps",)),
    ("attention.key_length", "u", ("head_dim",)),
    ("attention.value_length", "u", ("head_dim",)),
    ("attention.sliding_window", "u", ("sliding_window",)),
    ("rope.freq_base", "f", ("rope_theta",)),
    ("rope.dimension_count", "u", ("head_dim",)),
    ("vocab_size", "u", ("vocab_size",)),
    ("expert_count", "u", ("num_local_experts", "num_experts")),
    ("expert_used_count", "u", ("num_experts_per_tok",)),
    ("expert_feed_forward_length", "u", ("moe_intermediate_size",)),
    ("attn_logit_softcapping", "f", ("attn_logit_softcapping",)),
    ("final_logit_softcapping", "f", ("final_logit_softcapping",)),
)
#: What a model cannot be made without.
NEEDED = tuple(keys[0] for _, _, keys in _NUMBERS[:5])
#: Layers of the one model whose queries llama.cpp scales by hidden_size / num_attention_heads.
_GEMMA_27B = 46
_TOKENS = ("bos", "eos", "padding")
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


def out_of_pairs(tensor: Tensor, heads: int) -> Tensor:
    """The inverse of ``in_pairs``.

    >>> import torch
    >>> out_of_pairs(torch.tensor([0, 2, 1, 3]), 1)
    tensor([0, 1, 2, 3])
    """
    rows = tensor.shape[0]
    return tensor.reshape(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)


def write_architecture(writer: Any, config: Mapping[str, Any], name: str, dtype: str) -> None:
    """The numbers that ``config.json`` has."""
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default") if rope else "default"
    if kind != "default" or config.get("rope_scaling"):
        raise ExportError(
            f"rotary embeddings of the type {kind!r} are not written as GGUF",
            where=f"config.json: {rope or config.get('rope_scaling')}",
            fix='to="compressed-tensors", which keeps config.json',
        )
    size = int(config["hidden_size"]) // int(config["num_attention_heads"])
    known = {
        **config,
        "rope_theta": config.get("rope_theta") or rope.get("rope_theta") or 10000.0,
        "head_dim": config.get("head_dim") or size,
    }
    scalar = config.get("query_pre_attn_scalar")
    if scalar not in (None, known["head_dim"]) and int(config["num_hidden_layers"]) != _GEMMA_27B:
        raise ExportError(
            f"queries times 1/sqrt({scalar}) have no place in GGUF, which takes 1/sqrt(head_dim)",
            where=f"config.json: query_pre_attn_scalar {scalar}, head_dim {known['head_dim']}",
            fix='to="compressed-tensors", which keeps config.json',
        )
    writer.add_name(name)
    writer.add_file_type({"int8": 7, "int4": 2, "uint4": 3}[dtype])
    writer.add_quantization_version(2)
    for key, number, names in _NUMBERS:
        value = next((known[one] for one in names if known.get(one) is not None), None)
        if value is None:
            continue
        add = writer.add_uint32 if number == "u" else writer.add_float32
        add(f"{writer.arch}.{key}", int(value) if number == "u" else float(value))


def config_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: ``config.json`` by what a file says; of an unknown architecture it names none."""
    name = values.get("general.architecture")
    found: dict[str, Any] = {}
    for key, number, names in _NUMBERS:
        value = values.get(f"{name}.{key}")
        if isinstance(value, int if number == "u" else float):
            found[names[0]] = value if number == "u" else float(str(np.float32(value)))
    moe = "num_local_experts" in found
    known = [
        (there, arch)
        for there, arch in ARCHITECTURES.items()
        if arch.name == name and ("ffn_gate_exps" in arch.blocks) == moe
    ]
    if not known:
        return {"architectures": []}
    architecture, arch = known[0]
    if arch.blocks is _FOUR_NORMS and "head_dim" in found:
        large = found.get("num_hidden_layers") == _GEMMA_27B
        part = found["hidden_size"] // found["num_attention_heads"] if large else 0
        found["query_pre_attn_scalar"] = part or found["head_dim"]
    for token in _TOKENS:
        value = values.get(f"tokenizer.ggml.{token}_token_id")
        if isinstance(value, int):
            found[f"{token.removesuffix('ding')}_token_id"] = value
    return {"architectures": [architecture], "model_type": arch.model_type, **found}


def write_tokenizer(writer: Any, files: Iterable[Path], config: Mapping[str, Any]) -> None:
    """The tokenizer of ``tokenizer.json``; without one the file says so, and takes tokens by number.

    Raises ``ExportError`` for one that is no byte-pair encoding.
    """
    by_name = {file.name: file for file in files}
    file = by_name.get("tokenizer.json")
    data = {} if file is None else read_json(file.read_bytes())
    if file is None or not data.get("model"):
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
    template, settings = by_name.get("chat_template.jinja"), by_name.get("tokenizer_config.json")
    if template is not None:
        writer.add_chat_template(template.read_text(encoding="utf-8"))
    elif settings is not None:
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
