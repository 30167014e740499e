"""Architectures in plain PyTorch for ``tools/zoo.py``: what people write, in all its forms."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from zoo_entry import Entry


def images(batch: int = 2, size: int = 16, channels: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def rows(batch: int = 4, width: int = 16) -> torch.Tensor:
    return torch.randn(batch, width)


def sequences(batch: int = 2, length: int = 12, width: int = 16) -> torch.Tensor:
    return torch.randn(batch, length, width)


def words(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 50, (batch, length))


def conv(inputs: int, outputs: int, **options: Any) -> nn.Sequential:
    norm = nn.BatchNorm2d(outputs)
    nn.init.uniform_(norm.running_mean, -0.5, 0.5)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, **options), norm, nn.ReLU())


class UNet(nn.Module):
    """Skip connections by concatenation, up-sampling by transposed convolution and by interpolation."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = conv(3, 8), conv(8, 16), conv(16, 16)
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2) if learned else None
        self.up2, self.up1, self.head = conv(32, 8), conv(16, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        y = self.middle(F.max_pool2d(two, 2))
        y = self.up(y) if self.up is not None else F.interpolate(y, scale_factor=2, mode="nearest")
        y = self.up2(torch.cat([y, two], 1))
        y = F.interpolate(y, size=one.shape[-2:], mode="bilinear", align_corners=False)
        return self.head(self.up1(torch.cat((y, one), dim=1)))


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv3d(3, 8, 3, padding=1),
            nn.BatchNorm3d(8),
            nn.ReLU(),
            nn.MaxPool3d(2),
            nn.Conv3d(8, 16, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool3d(1),
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.rnn = kind(16, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(tokens))[0])


class PackedTagger(Tagger):
    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        output, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(output)


class CellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(16, 24), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[0], 24)
        for step in range(x.shape[1]):
            h, c = self.cell(x[:, step], (h, c))
        return self.head(h)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        y, weights = self.attention(x, x, x, key_padding_mask=mask)
        return self.head(self.norm(x + y)), weights


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.transformer = nn.Transformer(16, 4, 2, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 50)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        y = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask)
        return self.head(y)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu")
        self.embedding, self.encoder = nn.Embedding(50, 16), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return self.head(hidden.mean(1))


class Pair(NamedTuple):
    logits: torch.Tensor
    features: torch.Tensor


@dataclass
class Found:
    logits: torch.Tensor
    features: list[torch.Tensor]
    name: str = "found"


class Heads(nn.Module):
    """``pack`` says what the outputs come in."""

    def __init__(self, pack: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.body, self.one, self.two = conv(3, 8), nn.Conv2d(8, 4, 1), nn.Linear(8, 3)
        self.pack = pack

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(x)
        return self.pack(self.two(y.mean((2, 3))), self.one(y))


class Keywords(nn.Module):
    """Nothing by position, and one argument that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 8), nn.Linear(4, 8)

    def forward(
        self, *, left: torch.Tensor, right: torch.Tensor, scale: float = 2.0
    ) -> torch.Tensor:
        return torch.relu(self.left(left)) * scale + self.right(right)


class Nested(nn.Module):
    """Inputs in a dict of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, batch: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {"sum": sum(self.layer(x) for x in batch["rows"])}


class ShapeBranch(nn.Module):
    """Control flow over shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = conv(3, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] % 2:
            x = F.pad(x, (0, 1))
        if x.dim() == 3:
            x = x.unsqueeze(0)
        assert x.shape[1] == 3, "three channels"
        y = self.body(x)
        return self.head(y.view(y.size(0), 8, -1).mean(-1))


class ValueBranch(nn.Module):
    """Control flow over values in a submodule."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum() > 0 else x

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(16, 16), self.Gate(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.gate(torch.relu(self.first(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(50, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(self.embedding(tokens))))


class Shared(nn.Module):
    """One layer, several calls; another under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.first = nn.Linear(16, 16)
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.relu(self.layer(x))
        return self.again(torch.tanh(self.first(x)))


def parametrized() -> nn.Module:
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))
    return nn.Sequential(weighted, nn.ReLU(), spectral, nn.ReLU(), orthogonal).eval()


class Counter(nn.Module):
    """A buffer that ``forward`` updates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = conv(3, 8), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        z = self.two(y)
        z += y
        z.relu_().mul_(0.5)
        z[:, :4] = z[:, 4:] + 1
        return self.out(F.relu_(z))


class Spectrum(nn.Module):
    """Complex numbers and views."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(18, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.before(x))
        return self.after(torch.view_as_real(spectrum).flatten(-2))


class Dispatch(nn.Module):
    """Modules found by name in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.heads = nn.ModuleDict({"a": nn.Conv2d(8, 2, 1), "b": nn.Conv2d(8, 3, 1)})
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))

    def forward(self, x: torch.Tensor, task: str = "a") -> dict[str, torch.Tensor]:
        y = self.stem(x)
        for index, layer in enumerate(self.layers):
            y = layer(y) + y if index else layer(y)
        return {name: head(y) for name, head in self.heads.items()} | {"task": self.heads[task](y)}


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(8, 3, 3, 3) / 5), nn.Parameter(torch.randn(4, 8) / 3)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(F.conv2d(input=x, weight=self.weights[0], padding=1))
        y = F.adaptive_avg_pool2d(y, 1).squeeze(-1).squeeze(-1)
        return F.log_softmax(F.linear(y, weight=self.weights[1]), dim=-1)


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.mix = nn.Parameter(torch.randn(4, 4, 8) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (layer(x).unflatten(-1, (4, 4)) for layer in (self.query, self.key))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqk,bkhd,hde->bqhe", scores, k, self.mix).flatten(2)


class Mixture(nn.Module):
    """Experts chosen by value, each computed on the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).argmax(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            y = y + expert(x) * (chosen == index).unsqueeze(-1)
        return self.head(y)


class Wavenet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
        self.inp, self.out = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inp(x)
        for layer in self.layers:
            pad = layer.dilation[0]
            gate, value = layer(F.pad(y, (pad, 0))).chunk(2, dim=1)
            y = y + torch.sigmoid(gate) * torch.tanh(value)
        return self.out(y)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 8 * 4 * 4),
            nn.Unflatten(1, (8, 4, 4)),
            nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.InstanceNorm2d(8),
            nn.PReLU(),
            nn.PixelShuffle(2),
            nn.Conv2d(2, 3, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.net(z)


class SqueezeExcite(nn.Module):
    """Depthwise, squeeze and excite, hard swish: as in MobileNetV3."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.stem, self.down, self.up = conv(3, 8), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.hardswish(self.norm(self.depthwise(self.stem(x))))
        y = y * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(y, 1)))))
        return self.head(y.mean([-1, -2]))


class Dropping(nn.Module):
    """Left in training mode by its user."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.drop, self.two = conv(3, 8), nn.Dropout2d(0.5), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.two(self.drop(self.one(x))), training=self.training)


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(30, 8, mode="sum") for _ in range(2))
        self.bottom = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())

    def forward(self, dense: torch.Tensor, sparse: list[torch.Tensor]) -> torch.Tensor:
        found = [table(index) for table, index in zip(self.tables, sparse, strict=True)]
        return self.top(torch.cat([self.bottom(dense), *found], 1)).squeeze(1)


class Graph(nn.Module):
    """A graph network: gather by index, scatter by index."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(16, 16), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        sent = torch.relu(self.message(x))[edges[0]]
        got = torch.zeros_like(x).index_add(0, edges[1], sent)
        return self.update(torch.cat([x, got], -1))


class Scripted(nn.Module):
    """An autocast block, a checkpoint, and a module of its own in half precision around them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.utils.checkpoint.checkpoint(self.one, x, use_reentrant=False)
        with torch.autocast("cpu", enabled=False):
            return self.two(F.silu(y.float()))


class Half(nn.Module):
    """Half precision at the inputs, float inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = conv(3, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.float()).mean((2, 3))).half()


def lazy() -> nn.Module:
    model = nn.Sequential(
        nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )
    model(images())
    return model.eval()


def exported(
    build: Callable[[], nn.Module], example: Any, shapes: Any, *, file: bool = False
) -> Any:
    program = torch.export.export(build().eval(), example, dynamic_shapes=shapes)
    if not file:
        return program
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    return torch.export.load(stored)


def _image(name: str, make: Callable[[], nn.Module], *others: tuple[Any, ...]) -> Entry:
    return Entry(name, make, images, others or ((3,), (1, 24)))


def entries() -> Iterator[Entry]:
    yield from _images()
    yield from _sequences()
    yield from _forms()
    yield from _programs()


def _images() -> Iterator[Entry]:
    yield _image("UNet transposed", partial(UNet, True))
    yield _image("UNet interpolated", partial(UNet, False))
    yield Entry("Conv3d", Video, lambda b=2, d=8: torch.randn(b, 3, d, 8, 8), ((3,), (1, 6)))
    yield _image("SqueezeExcite", SqueezeExcite)
    yield Entry("Generator", Generator, rows, ((3,),))
    yield _image("InPlace", InPlace)
    yield _image("Dispatch", Dispatch)
    yield _image("Functional", Functional)
    yield _image("ShapeBranch", ShapeBranch, (3,), (1, 24))
    yield _image("Dropping in training mode", lambda: Dropping().train())
    yield _image("Lazy", lazy, (3,))
    yield Entry("Half inputs", Half, lambda b=2: images(b).half(), ((3,),))
    yield Entry("Half model", lambda: conv(3, 8).half(), lambda b=2: images(b).half(), ((3,),))
    yield Entry(
        "BFloat16 model", lambda: conv(3, 8).bfloat16(), lambda b=2: images(b).bfloat16(), ((3,),)
    )
    yield Entry(
        "Double model", lambda: conv(3, 8).double(), lambda b=2: images(b).double(), ((3,),)
    )
    yield _image("Channels last", lambda: conv(3, 8).to(memory_format=torch.channels_last))


def _sequences() -> Iterator[Entry]:
    yield Entry("nn.LSTM tagger", partial(Tagger, nn.LSTM), words, ((3, 9),))
    yield Entry("nn.GRU tagger", partial(Tagger, nn.GRU), words, ((3, 9),))
    packed = lambda b=3: (words(b), torch.tensor([12, 5, 7])[:b])  # noqa: E731
    yield Entry("packed LSTM tagger", partial(PackedTagger, nn.LSTM), packed, ((2,),))
    yield Entry("LSTMCell loop", CellLoop, sequences, ((3,),))
    yield Entry("nn.MultiheadAttention", Attention, sequences, ((3, 7),))
    masked = lambda b=2, n=12: (sequences(b, n), torch.zeros(b, n, dtype=torch.bool))  # noqa: E731
    yield Entry("nn.MultiheadAttention masked", Attention, masked, ((3, 7),))
    yield Entry("nn.Transformer", Seq2Seq, lambda b=2, n=9: (words(b), words(b, n)), ((3, 7),))
    yield Entry("nn.TransformerEncoder", Encoder, lambda *a: words(*a).clamp(min=1), ((3, 9),))
    yield Entry("Einsum", Einsum, sequences, ((3, 7),))
    yield Entry("Spectrum", Spectrum, sequences, ((3, 7),))
    yield Entry("Wavenet", Wavenet, lambda b=2, n=32: torch.randn(b, 1, n), ((3, 40),))
    yield Entry("Tied", Tied, words, ((3, 9),))


def _forms() -> Iterator[Entry]:
    yield _image("tuple", partial(Heads, lambda a, b: (a, b)))
    yield _image("list", partial(Heads, lambda a, b: [a, b]))
    yield _image("dict", partial(Heads, lambda a, b: {"a": a, "b": b}))
    yield _image("nested", partial(Heads, lambda a, b: {"a": (a, [b, None, 3])}))
    yield _image("named tuple", partial(Heads, Pair))
    yield _image("dataclass", partial(Heads, lambda a, b: Found(a, [b])))
    keywords = lambda b=4: {"left": rows(b), "right": rows(b, 4)}  # noqa: E731
    yield Entry("Keywords", Keywords, keywords, ((3,),))
    yield Entry("Nested inputs", Nested, lambda b=4: ({"rows": [rows(b), rows(b)]},), ((3,),))
    yield Entry("ValueBranch", ValueBranch, rows, ((3,),))
    yield Entry("Shared", Shared, rows, ((3,),))
    yield Entry("Parametrized", parametrized, rows, ((3,),))
    yield Entry("Counter", Counter, rows, ((3,),))
    yield Entry("Mixture", Mixture, rows, ((3,),))
    yield Entry("Autocast and checkpoint", Scripted, rows, ((3,),))
    sparse = lambda b=4: (rows(b), [torch.randint(0, 30, (b, 3)) for _ in range(2)])  # noqa: E731
    yield Entry("Recommender", Recommender, sparse, ((3,),))
    yield Entry("Graph", Graph, lambda n=6, e=9: (rows(n), torch.randint(0, n, (2, e))), ((4, 7),))


def _programs() -> Iterator[Entry]:
    batch = torch.export.Dim("batch")
    image = partial(exported, partial(UNet, True), (images(),), ({0: batch},))
    yield Entry("exported UNet", image, images, ((3,),))
    text = partial(exported, Tied, (words(),), ({0: batch, 1: torch.export.Dim("n")},), file=True)
    yield Entry(".pt2 Tied", text, words, ((3, 9),))
    fixed = partial(exported, Encoder, (words().clamp(min=1),), None)
    yield Entry("exported TransformerEncoder", fixed, lambda *a: words(*a).clamp(min=1))
