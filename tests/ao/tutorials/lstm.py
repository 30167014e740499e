"""Dynamic quantization of an LSTM and of the layer after it, as the word language model of the tutorials."""

import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(50, 16)
        self.rnn = nn.LSTM(16, 24, num_layers=2)
        self.decoder = nn.Linear(24, 50)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output), hidden


model = LanguageModel().eval()
tokens = torch.randint(50, (12, 3))
hidden = (torch.zeros(2, 3, 24), torch.zeros(2, 3, 24))
quantized = quantize_dynamic(model, {nn.LSTM, nn.Linear}, dtype=torch.qint8)
outputs, _ = quantized(tokens, hidden)
step = float(model(tokens, hidden)[0].abs().max()) / 127
