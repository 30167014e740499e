"""Language models of two layers with random weights, in folders as ``save_pretrained`` writes them."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import benchmarks.stock  # noqa: F401 - transformers imports torchvision, which needs its operators
import torch
from torch import nn

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
#: By family: the class of its configuration, and what it has beside the sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 256}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}


def make(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model, in evaluation mode, the same at each call."""
    import transformers

    name, more = FAMILIES[family]
    config = getattr(transformers, name)(**{**_SIZES, **more})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(3)
    return model


@functools.cache
def _written(family: str, dtype: torch.dtype, shard: str, root: Path) -> Path:
    folder = root / f"{family}-{str(dtype)[6:]}-{shard}"
    make(family, dtype).save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text("{}\n", encoding="utf-8")
    return folder


def folder_of(
    family: str, root: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB"
) -> Path:
    """A folder of its own with the model, its weights in shards of at most this size."""
    kept = _written(family, dtype, shard, root / "made")
    own = root / f"own-{len(list(root.iterdir()))}"
    shutil.copytree(kept, own)
    return own


def logits(model: nn.Module) -> torch.Tensor:
    """What it says to some tokens."""
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def dequantized(checkpoint: Any, root: Path) -> nn.Module:
    """What transformers makes of the float weights that a quantized checkpoint stands for."""
    import json

    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder = root / f"dequantized-{len(list(root.iterdir()))}"
    folder.mkdir()
    tensors = {}
    for name, size in checkpoint.sizes.items():
        path = name.removesuffix(".weight")
        quantized = name.endswith(".weight") and path in checkpoint.schemes
        tensor = checkpoint.layer(path).dequantized() if quantized else checkpoint.read(name)
        tensors[name] = tensor.to(size.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(checkpoint.config)), encoding="utf-8")
    return AutoModelForCausalLM.from_pretrained(folder)
