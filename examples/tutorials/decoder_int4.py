# %% [markdown]
# # A decoder with weights of 4 bits that generates
# Weights of 4 bits in groups, activations as they are; one model serves prefill and decoding, and
# `generate()` of transformers runs it. Random weights: load yours with `from_pretrained`. Needs
# transformers.

# %%
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import backquant

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(3, 128, (1, 24))

# %% [markdown]
# `decoder_inputs` gives the inputs with a cache of keys and values. Weights alone need no
# calibration data; with data, `recipe=["gptq"]` rounds them better.

# %%
example = backquant.decoder_inputs(model, prompt, cached=12)
weights = {"": "int4:32", "lm_head": "int8"}  # groups of 32; the last layer in 8 bits
quantized = backquant.quantize(model, example, backend="x86_lowbit", weights=weights)
print(quantized.report)
backquant.save(quantized, "decoder.bq")

# %%
with torch.device("meta"):
    empty = LlamaForCausalLM(config)  # the configuration without weights
generator = backquant.as_generator(backquant.load("decoder.bq"), empty)
tokens = generator.generate(prompt[:, :5], max_new_tokens=8, do_sample=False)
print(tokens)
assert tokens.shape[1] > 5

# %% [markdown]
# How near is it? The logits beside the float model's.

# %%
with torch.no_grad():
    expected = model(prompt).logits
    error = generator(prompt).logits - expected
sqnr = 10 * torch.log10(expected.square().mean() / error.square().mean()).item()
print(f"SQNR {sqnr:.1f} dB (higher is better)")
assert sqnr > 10
