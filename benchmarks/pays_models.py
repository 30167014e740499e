"""Models for ``benchmarks.pays``: stock definitions, and three that are built from their papers.

Of the libraries' models the small ones, whose time is the time of calling operators: what integers gain
there is lost at the borders first. Random weights; trained ones where a package has them inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import benchmarks.stock  # noqa: F401 - before torchvision, which transformers imports, too
from benchmarks.stock.catalogue import catalogue
from benchmarks.stock.trained import frames, mels, sound

__all__ = ["CASES", "Case"]


class Case(NamedTuple):
    """A model and the function that gives inputs for it."""

    model: nn.Module
    sample: Callable[[], Any]


def _images(model: nn.Module, size: int, batch: int = 1) -> Case:
    return Case(model, lambda: torch.randn(batch, 3, size, size))


def _torchvision(name: str, size: int) -> Case:
    import torchvision

    return _images(getattr(torchvision.models, name)(weights=None), size)


def _timm(name: str, size: int) -> Case:
    import timm

    options = {"img_size": size} if name.startswith(("vit", "deit", "maxvit")) else {}
    return _images(timm.create_model(name, pretrained=False, **options), size)


def _transformers(name: str, sample: Callable[[], Any], **config: Any) -> Case:
    import transformers

    made = getattr(transformers, f"{name.split('For', maxsplit=1)[0].removesuffix('Model')}Config")(
        **config
    )
    return Case(getattr(transformers, name)(made), sample)


class M5(nn.Module):
    """Dai et al. 2016, "Very deep convolutional neural networks for raw waveforms", table 1."""

    def __init__(self, channels: int = 32, classes: int = 35) -> None:
        super().__init__()
        widths = (1, channels, channels, 2 * channels, 2 * channels)
        layers: list[nn.Module] = []
        for index, (before, after) in enumerate(itertools.pairwise(widths)):
            size = {"kernel_size": 80, "stride": 16} if index == 0 else {"kernel_size": 3}
            layers += [nn.Conv1d(before, after, **size), nn.BatchNorm1d(after), nn.ReLU()]
            layers += [nn.MaxPool1d(4)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.head(self.features(x).mean(-1)), -1)


class DLRM(nn.Module):
    """Naumov et al. 2019, "Deep learning recommendation model for personalization and recommendation"."""

    def __init__(self, tables: int = 26, rows: int = 10000, width: int = 64) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = _mlp(13, 512, 256, width)
        pairs = tables * (tables + 1) // 2
        self.top = _mlp(pairs + width, 512, 256, 1)[:-1]
        rows_, columns = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("rows", rows_)
        self.register_buffer("columns", columns)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        looked_up = [bag(sparse[:, i]) for i, bag in enumerate(self.bags)]
        vectors = torch.stack([x, *looked_up], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.sigmoid(self.top(torch.cat([x, products[:, self.rows, self.columns]], 1)))


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)


class TabTransformer(nn.Module):
    """Huang et al. 2020, "TabTransformer: tabular data modeling using contextual embeddings"."""

    def __init__(self, categories: int = 10, numbers: int = 6, width: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(categories * 20, width)
        self.register_buffer("offsets", torch.arange(categories) * 20)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        inside = categories * width + numbers
        self.norm = nn.LayerNorm(numbers)
        self.head = _mlp(inside, 4 * inside, 2 * inside, 1)[:-1]

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.table(categories + self.offsets)).flatten(1)
        return self.head(torch.cat([x, self.norm(numbers)], 1))


class ConvTasNet(nn.Module):
    """Luo, Mesgarani 2018, "Conv-TasNet", with the sizes of its best model but fewer channels."""

    def __init__(self, filters: int = 128, width: int = 64, inside: int = 128) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, filters, 16, 8, 8, bias=False)
        self.before = nn.Sequential(nn.GroupNorm(1, filters), nn.Conv1d(filters, width, 1))
        blocks = []
        for _ in range(2):
            for power in range(8):
                wide = 2**power
                blocks.append(
                    nn.Sequential(
                        *(nn.Conv1d(width, inside, 1), nn.PReLU(), nn.GroupNorm(1, inside)),
                        nn.Conv1d(inside, inside, 3, padding=wide, dilation=wide, groups=inside),
                        *(nn.PReLU(), nn.GroupNorm(1, inside)),
                    )
                )
        self.blocks = nn.ModuleList(blocks)
        self.residual = nn.ModuleList(nn.Conv1d(inside, width, 1) for _ in blocks)
        self.skip = nn.ModuleList(nn.Conv1d(inside, width, 1) for _ in blocks)
        self.masks = nn.Sequential(nn.PReLU(), nn.Conv1d(width, 2 * filters, 1), nn.Sigmoid())
        self.decoder = nn.ConvTranspose1d(filters, 1, 16, 8, 8, bias=False)
        self.filters = filters

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(wave)
        x, total = self.before(encoded), 0.0
        for block, residual, skip in zip(self.blocks, self.residual, self.skip, strict=True):
            found = block(x)
            x, total = x + residual(found), total + skip(found)
        masks = self.masks(total).reshape(-1, 2, self.filters, encoded.shape[-1])
        apart = (masks * encoded.unsqueeze(1)).reshape(-1, self.filters, encoded.shape[-1])
        return self.decoder(apart).reshape(wave.shape[0], 2, -1)


class Demucs(nn.Module):
    """Défossez et al. 2019, "Music source separation in the waveform domain", fewer channels."""

    def __init__(self, depth: int = 5, width: int = 16) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        before = 2
        for level in range(depth):
            after = width * 2**level
            self.down.append(
                nn.Sequential(
                    *(nn.Conv1d(before, after, 8, 4), nn.ReLU()),
                    *(nn.Conv1d(after, 2 * after, 1), nn.GLU(1)),
                )
            )
            out = 8 if level == 0 else before
            last = [] if level == 0 else [nn.ReLU()]
            self.up.insert(
                0,
                nn.Sequential(
                    *(nn.Conv1d(after, 2 * after, 3, padding=1), nn.GLU(1)),
                    *(nn.ConvTranspose1d(after, out, 8, 4), *last),
                ),
            )
            before = after
        self.lstm = nn.LSTM(before, before, 2, bidirectional=True)
        self.join = nn.Linear(2 * before, before)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for part in self.down:
            x = part(x)
            skips.append(x)
        found, _ = self.lstm(x.permute(2, 0, 1))
        x = self.join(found).permute(1, 2, 0)
        for part in self.up:
            skip = skips.pop()
            x = part(x + skip[..., : x.shape[-1]])
        return x


class StyleGenerator(nn.Module):
    """Karras et al. 2020, "Analyzing and improving the image quality of StyleGAN": modulated weights."""

    def __init__(self, width: int = 128, levels: int = 4) -> None:
        super().__init__()
        self.mapping = nn.Sequential(
            *(part for _ in range(8) for part in (nn.Linear(width, width), nn.LeakyReLU(0.2)))
        )
        self.start = nn.Parameter(torch.randn(1, width, 4, 4))
        self.styles = nn.ModuleList(nn.Linear(width, width) for _ in range(2 * levels))
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(width, width, 3, 3) * 0.05) for _ in range(2 * levels)
        )
        self.colours = nn.Conv2d(width, 3, 1)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        w, x = self.mapping(z), self.start
        for index, (style, weight) in enumerate(zip(self.styles, self.weights, strict=True)):
            if index % 2 == 0 and index:
                x = nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear")
            own = weight * style(w).reshape(1, -1, 1, 1)
            own = own * torch.rsqrt(own.square().sum((1, 2, 3), keepdim=True) + 1e-8)
            x = nn.functional.leaky_relu(nn.functional.conv2d(x, own, padding=1), 0.2)
        return self.colours(x)


def _words(length: int, vocabulary: int = 1000) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"input_ids": torch.randint(3, vocabulary, (1, length))}


def _wave(samples: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(1, samples) * 0.3


def _stock(name: str, sample: Callable[[], Any]) -> Case:
    return Case(catalogue()[name].make(), sample)


_BERT = {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_BERT["intermediate_size"] = 512
_SPEECH = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
_CONVS = {
    "conv_dim": (64, 64, 64),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 32,
    "num_conv_pos_embedding_groups": 4,
}


def _transformer() -> Case:
    model = nn.Transformer(128, 4, 2, 2, 512, batch_first=True)
    return Case(model, lambda: (torch.randn(1, 20, 128), torch.randn(1, 12, 128)))


def _attention() -> Case:
    model = nn.MultiheadAttention(128, 4, batch_first=True)
    return Case(model, lambda: tuple(torch.randn(1, 32, 128) for _ in range(3)))


_LLAMA = {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA |= {"intermediate_size": 256, "use_cache": False}

CASES: dict[str, Callable[[], Case]] = {
    "attention": _attention,
    "llama_step": lambda: _transformers("LlamaModel", _words(1), **_LLAMA),
    "maxvit": lambda: _timm("maxvit_rmlp_pico_rw_256", 64),
    "m5": lambda: Case(M5(), lambda: torch.randn(1, 1, 8000)),
    "crepe_tiny": lambda: _stock("torchcrepe.tiny", partial(frames, 8)),
    "silero": lambda: _stock("silero_vad", partial(sound, 1)),
    "conv_tasnet": lambda: Case(ConvTasNet(), lambda: torch.randn(1, 1, 4000)),
    "demucs": lambda: Case(Demucs(), lambda: torch.randn(1, 2, 21844)),
    "resemblyzer": lambda: _stock("resemblyzer.VoiceEncoder", partial(mels, 1, 160)),
    "wav2vec2": lambda: _transformers("Wav2Vec2Model", _wave(8000), **_SPEECH, **_CONVS),
    "hubert": lambda: _transformers("HubertModel", _wave(8000), **_SPEECH, **_CONVS),
    "sew": lambda: _transformers("SEWModel", _wave(8000), **_SPEECH, **_CONVS),
    "speech_to_text": lambda: _transformers(
        "Speech2TextModel",
        lambda: {
            "input_features": torch.randn(1, 100, 80),
            "decoder_input_ids": torch.randint(3, 1000, (1, 8)),
        },
        vocab_size=1000,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
    ),
    "encodec": lambda: _transformers(
        "EncodecModel", lambda: torch.randn(1, 1, 4800) * 0.3, num_filters=16, hidden_size=64
    ),
    "dac": lambda: _transformers(
        "DacModel", lambda: torch.randn(1, 1, 5120) * 0.3, encoder_hidden_size=16,
        decoder_hidden_size=256,
    ),
    "dlrm": lambda: Case(
        DLRM(), lambda: (torch.randn(1, 13), torch.randint(0, 10000, (1, 26, 1)))
    ),
    "dlrm_64": lambda: Case(
        DLRM(), lambda: (torch.randn(64, 13), torch.randint(0, 10000, (64, 26, 1)))
    ),
    "tabtransformer": lambda: Case(
        TabTransformer(), lambda: (torch.randint(0, 20, (1, 10)), torch.randn(1, 6))
    ),
    "tabtransformer_32": lambda: Case(
        TabTransformer(), lambda: (torch.randint(0, 20, (32, 10)), torch.randn(32, 6))
    ),
    "transformer": _transformer,
    "stylegan": lambda: Case(StyleGenerator(), lambda: torch.randn(1, 128)),
    "bert_small": lambda: _transformers("BertModel", _words(32), **_BERT),
    "gpt2_small": lambda: _transformers(
        "GPT2Model", _words(16), vocab_size=1000, n_embd=128, n_layer=2, n_head=4, use_cache=False
    ),
    "t5_small": lambda: _transformers(
        "T5EncoderModel", _words(32), vocab_size=1000, d_model=128, d_kv=32, d_ff=512,
        num_layers=2, num_heads=4,
    ),
    "pnet": lambda: _stock("facenet.PNet", lambda: torch.randn(1, 3, 96, 96)),
    "rnet": lambda: _stock("facenet.RNet", lambda: torch.randn(4, 3, 24, 24)),
    "onet": lambda: _stock("facenet.ONet", lambda: torch.randn(4, 3, 48, 48)),
    "squeezenet1_1": lambda: _torchvision("squeezenet1_1", 64),
    "resnet18": lambda: _torchvision("resnet18", 64),
    "mobilenet_v2": lambda: _torchvision("mobilenet_v2", 96),
    "mobilenet_v3_small": lambda: _torchvision("mobilenet_v3_small", 96),
    "shufflenet_v2_x0_5": lambda: _torchvision("shufflenet_v2_x0_5", 96),
    "efficientnet_b0": lambda: _torchvision("efficientnet_b0", 96),
    "regnet_y_400mf": lambda: _torchvision("regnet_y_400mf", 96),
    "densenet121": lambda: _torchvision("densenet121", 64),
    "ghostnet_050": lambda: _timm("ghostnet_050", 96),
    "convnext_atto": lambda: _timm("convnext_atto", 64),
    "vit_tiny_patch16": lambda: _timm("vit_tiny_patch16_224", 96),
    "levit_128s": lambda: _timm("levit_128s", 224),
    "mobilevit_xxs": lambda: _timm("mobilevit_xxs", 128),
}  # fmt: skip
