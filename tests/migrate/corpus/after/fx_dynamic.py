"""Dynamic quantization of a word model, as the FX guide describes it."""

import torch
from torch import nn
from backquant.ao.quantization import QConfigMapping, default_dynamic_qconfig
from backquant.ao.quantization import quantize_fx


class Words(nn.Module):
    def __init__(self, words=200, width=32):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, num_layers=1)
        self.decoder = nn.Linear(width, words)

    def forward(self, tokens):
        states, _ = self.rnn(self.embedding(tokens))
        return self.decoder(states)


torch.manual_seed(0)
model = Words().eval()
tokens = torch.randint(0, 200, (12, 2))

qconfig_mapping = (
    QConfigMapping()
    .set_object_type(nn.LSTM, default_dynamic_qconfig)
    .set_object_type(nn.Linear, default_dynamic_qconfig)
)
prepared = quantize_fx.prepare_fx(model, qconfig_mapping, (tokens,))
quantized = quantize_fx.convert_fx(prepared)  # no calibration needed

expected, actual = model(tokens), quantized(tokens)
error = (expected - actual).norm() / expected.norm()
print(f"relative error {error:.3f}")
assert error < 0.1
