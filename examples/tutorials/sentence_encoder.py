# %% [markdown]
# # A sentence encoder (MiniLM's shape) in int8
# BERT with mean pooling, sentences of several lengths with masks, as dicts of keyword arguments.
# Random weights: load yours with `from_pretrained`. Needs transformers.

# %%
import torch
from torch import nn
from transformers import BertConfig, BertModel

import backquant

torch.manual_seed(0)


class Encoder(nn.Module):
    """Token embeddings, averaged over the tokens that are not padding, of length one."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids, attention_mask):
        tokens = self.bert(input_ids=input_ids, attention_mask=attention_mask)[0]
        weight = attention_mask.unsqueeze(-1).to(tokens.dtype)
        pooled = (tokens * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(pooled, dim=1)


config = BertConfig(
    vocab_size=500,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=512,
)
model = Encoder(BertModel(config, add_pooling_layer=False)).eval()


def sentences(count: int, length: int) -> dict[str, torch.Tensor]:
    """What a tokenizer returns: ids, padded at the end, and the mask."""
    lengths = torch.randint(4, length + 1, (count, 1))
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": torch.randint(5, 500, (count, length)) * mask, "attention_mask": mask}


# %% [markdown]
# Calibrate with batches of several lengths. They are dicts, as the tokenizer gives them. Sizes that
# the model does not fix stay free.

# %%
calibration = [sentences(8, length) for length in (16, 24, 32, 24)]
quantized = backquant.quantize(
    model,
    calibration[0],
    backend="x86",
    calibration=calibration,
    slower="keep",  # it is small
)
print(quantized.report)

# %%
test = sentences(16, 20)
with torch.no_grad():
    expected = model(**test)
cosine = nn.functional.cosine_similarity(quantized(**test), expected).min().item()
print(f"least cosine to the float embedding {cosine:.4f}")
assert cosine > 0.97
assert any("linear" in kernel.kernel for kernel in quantized.kernels)
assert quantized(**sentences(3, 11)).shape == (3, 128)

# %% [markdown]
# One file; who loads it needs neither transformers nor this class.

# %%
backquant.save(quantized, "encoder.bq")
again = backquant.load("encoder.bq")
assert torch.equal(again(**test), quantized(**test))
