"""Models of the usual families, our flow up to a prepared model, and PyTorch's as the oracle."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.ao.quantization as tq
import torch.nn.functional as F
from torch import fx, nn
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config as torch_x86
from torch.ao.quantization.observer import MinMaxObserver as TorchMinMax
from torch.ao.quantization.quantize_fx import prepare_fx

import backquant.observe as bo
import backquant.qconfig as bq
from against_torch.torch_side import min_max
from backquant.backend_config import BackendConfig, get_x86_backend_config
from backquant.fuse import apply_fusion
from backquant.graph import capture
from backquant.match import make_plan, plan_fusion
from backquant.prepare import PreparedModule, Record, insert_observers
from unkept import beside_numbers


def conv_bn(
    inputs: int, outputs: int, size: int, groups: int = 1, stride: int = 1
) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*conv_bn(channels, channels, 3), nn.ReLU(inplace=True))
        self.second = nn.Sequential(*conv_bn(channels, channels, 3))
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.second(self.first(x)) + x)


class ResidualCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        layers = [*conv_bn(inputs, hidden, 1), nn.ReLU6()] if expand != 1 else []
        layers += [*conv_bn(hidden, hidden, 3, groups=hidden, stride=stride), nn.ReLU6()]
        self.layers = nn.Sequential(*layers, *conv_bn(hidden, outputs, 1))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.layers(x) if self.residual else self.layers(x)


class InvertedResidualCNN(nn.Module):
    """The layout of MobileNetV2; ``plan`` lists (expand, channels, repeats, stride)."""

    def __init__(self, stages: tuple[tuple[int, int, int, int], ...]) -> None:
        super().__init__()
        layers = [*conv_bn(3, 8, 3, stride=2), nn.ReLU6()]
        channels = 8
        for expand, outputs, repeats, stride in stages:
            for i in range(repeats):
                step = stride if i == 0 else 1
                layers.append(InvertedResidual(channels, outputs, step, expand))
                channels = outputs
        self.features = nn.Sequential(*layers, *conv_bn(channels, 64, 1), nn.ReLU6())
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(64, 10))

    def forward(self, x):
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(x.reshape(x.shape[0], -1))


class DenseCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(4 + 4 * i), nn.ReLU(), nn.Conv2d(4 + 4 * i, 4, 3, padding=1)
            )
            for i in range(3)
        )
        self.transition = nn.Sequential(nn.Conv2d(16, 8, 1), nn.AvgPool2d(2))
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.fc(self.transition(torch.cat(features, 1)).mean([2, 3]))


class SqueezeExciteCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 8, 3), nn.Hardswish())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU())
        self.excite = nn.Conv2d(4, 8, 1)
        self.gate = nn.Hardsigmoid()
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        x = x * self.gate(self.excite(self.squeeze(self.pool(x))))
        x = self.fc(torch.flatten(self.pool(x), 1))
        return torch.tanh(x), torch.sigmoid(x).unsqueeze(1)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)
        )

    def forward(self, x):
        return F.softmax(self.layers(x), dim=-1)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(8, 3, 3, 3))
        self.shift = nn.Parameter(torch.randn(8))
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.bias = nn.Parameter(torch.randn(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = F.max_pool2d(F.relu(F.conv2d(x, self.kernel, self.shift, padding=1)), 2)
        x = F.adaptive_avg_pool2d(x, (1, 1))
        x = F.hardtanh(F.linear(x.view(x.shape[0], -1), self.weight, self.bias))
        return F.layer_norm(torch.add(x, x * 2), (4,), self.scale).unsqueeze(1)


class SharedModules(nn.Module):
    """One convolution, one linear and one pool in several places, and a module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.alias = self.conv
        self.pool = nn.MaxPool2d(1)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x = self.pool(self.alias(self.pool(self.conv(x))))
        return self.fc(self.fc(x.mean([2, 3])))


SMALL = ((1, 8, 1, 1), (2, 12, 2, 2))
LARGE = (
    (1, 8, 1, 1),
    (6, 8, 2, 2),
    (6, 12, 3, 2),
    (6, 16, 4, 2),
    (6, 24, 3, 1),
    (6, 40, 3, 2),
    (6, 80, 1, 1),
)
ZOO: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (ResidualCNN, (2, 3, 16, 16)),
    "inverted_residual": (lambda: InvertedResidualCNN(SMALL), (2, 3, 16, 16)),
    "dense": (DenseCNN, (2, 3, 8, 8)),
    "squeeze_excite": (SqueezeExciteCNN, (2, 3, 8, 8)),
    "mlp": (MLP, (4, 6)),
    "functional": (Functional, (2, 3, 8, 8)),
    "shared_modules": (SharedModules, (2, 4, 8, 8)),
    "over_50_operators_at_224": (lambda: InvertedResidualCNN(LARGE), (1, 3, 224, 224)),
}


@dataclass(frozen=True)
class Flow:
    """Our steps and PyTorch's, both for x86."""

    def model(self, name: str) -> tuple[nn.Module, list[torch.Tensor]]:
        """A model in eval mode with batch norms that do something, and four batches."""
        make, shape = ZOO[name]
        return self.settled(make()), [torch.randn(*shape) for _ in range(4)]

    def settled(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias)
        return model.eval()

    def mapping(self) -> bq.QConfigMapping:
        mapping = bq.get_default_qconfig_mapping("x86")
        return min_max(mapping, bq.QConfig, bo.MinMaxObserver)

    def prepare(
        self,
        model: nn.Module,
        mapping: bq.QConfigMapping | None = None,
        *,
        backend: BackendConfig | None = None,
        custom: bq.PrepareCustomConfig | None = None,
    ) -> PreparedModule:
        backend = backend or get_x86_backend_config()
        mapping = mapping or self.mapping()
        captured = capture(model)
        fusions = plan_fusion(captured.module, backend)
        fused = apply_fusion(captured.module, captured.scopes, fusions, backend, False)
        planned = make_plan(fused.module, fused.scopes, backend, mapping, fusions=fusions)
        return insert_observers(
            fused.module,
            Record(
                planned, backend, mapping, custom, scopes=fused.scopes, provenance=fused.provenance
            ),
        )

    def torch_mapping(self) -> Any:
        return min_max(tq.get_default_qconfig_mapping("x86"), tq.QConfig, TorchMinMax)

    def torch_prepare(self, model: nn.Module, example: Any, mapping: Any = None) -> fx.GraphModule:
        examples = example if isinstance(example, tuple) else (example,)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return prepare_fx(
                model,
                mapping or self.torch_mapping(),
                examples,
                backend_config=beside_numbers(torch_x86()),
            )

    @staticmethod
    def torch_backend() -> Any:
        return beside_numbers(torch_x86())


@pytest.fixture
def flow() -> Flow:
    return Flow()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "zoo_name" in metafunc.fixturenames:
        metafunc.parametrize("zoo_name", list(ZOO))
