"""Models to train, our prepared model and PyTorch's, and training both side by side."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic.qat as torch_qat
import torch.ao.quantization as tq
import torch.nn.functional as F
from torch import fx, nn
from torch.ao.quantization import quantize_fx

import backquant
from backquant.nn.intrinsic.qat import freeze_bn_stats
from unkept import beside_numbers

_BLOCKS = {
    1: (nn.Conv1d, nn.BatchNorm1d),
    2: (nn.Conv2d, nn.BatchNorm2d),
    3: (nn.Conv3d, nn.BatchNorm3d),
}


def block(dims: int, inputs: int, outputs: int, size: int, **options: Any) -> list[nn.Module]:
    conv, batch_norm = _BLOCKS[dims]
    return [conv(inputs, outputs, size, padding=size // 2, **options), batch_norm(outputs)]


class Residual(nn.Module):
    """Two dimensions; batch norm with and without ReLU; addition; dropout as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*block(2, 3, 8, 3, bias=False), nn.ReLU())
        self.first = nn.Sequential(*block(2, 8, 8, 3, bias=False), nn.ReLU(inplace=True))
        self.second = nn.Sequential(*block(2, 8, 8, 3))
        self.relu = nn.ReLU()
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        x = self.relu(self.second(self.first(x)) + x)
        return self.fc(self.drop(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)))


class Inverted(nn.Module):
    """Depthwise convolution, ReLU6."""

    def __init__(self) -> None:
        super().__init__()
        wide = [*block(2, 3, 8, 1), nn.ReLU6(), *block(2, 8, 8, 3, groups=8), nn.ReLU6()]
        self.layers = nn.Sequential(*wide, *block(2, 8, 3, 1))
        self.fc = nn.Linear(3, 4)

    def forward(self, x):
        return self.fc((x + self.layers(x)).mean([2, 3]))


class Signal(nn.Module):
    """One dimension; convolution and ReLU without batch norm; fixed qparams."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *block(1, 2, 6, 3), nn.ReLU(), *block(1, 6, 6, 5), nn.Conv1d(6, 4, 1), nn.ReLU()
        )
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return torch.sigmoid(self.fc(self.layers(x).mean(2)))


class Volume(nn.Module):
    """Three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *block(3, 1, 4, 3), nn.ReLU(), *block(3, 4, 4, 1), nn.Conv3d(4, 2, 1), nn.ReLU()
        )

    def forward(self, x):
        return self.layers(x)


class Perceptron(nn.Module):
    """Linear layers with batch norm, with ReLU, with a fixed-range activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()),
            *(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3), nn.Tanh()),
        )

    def forward(self, x):
        return self.layers(x)


class Decoder(nn.Module):
    """Transposed convolutions of any dimension; their weight is quantized at conversion."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        transposed = getattr(nn, f"ConvTranspose{dims}d")
        self.layers = nn.Sequential(
            *(*block(dims, 2, 4, 3), nn.ReLU(), transposed(4, 4, 3, 2), nn.ReLU()),
            transposed(4, 1, 3, 2),
        )

    def forward(self, x):
        return self.layers(x)


class Tied(nn.Module):
    """A convolution that is called twice, two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        x = self.conv(torch.relu(self.conv(x)))
        return self.second(self.first(x.mean([2, 3])))


class Functional(nn.Module):
    """Operators that are no modules; a weight that is a parameter of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2).mean([2, 3])
        return F.hardtanh(F.linear(x, self.weight, self.bias))


class Gated(nn.Module):
    """Squeeze and excitation; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*block(2, 3, 8, 3), nn.Hardswish())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1))
        self.gate = nn.Hardsigmoid()
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        x = x * self.gate(self.squeeze(x))
        return self.fc(x.mean([2, 3])), F.max_pool2d(x, 2)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (4, 3, 8, 8)),
    "inverted": (Inverted, (4, 3, 8, 8)),
    "signal": (Signal, (4, 2, 16)),
    "volume": (Volume, (2, 1, 4, 4, 4)),
    "perceptron": (Perceptron, (8, 6)),
    "decoder1d": (lambda: Decoder(1), (2, 2, 6)),
    "decoder2d": (lambda: Decoder(2), (2, 2, 4, 4)),
    "decoder3d": (lambda: Decoder(3), (2, 2, 3, 3, 3)),
    "tied": (Tied, (4, 3, 6, 6)),
    "functional": (Functional, (4, 3, 8, 8)),
    "gated": (Gated, (4, 3, 8, 8)),
}

#: Where rules of x86 leave a result in float that PyTorch rounds: a ReLU reads it that stays float.
LEFT_IN_FLOAT = ("tied",)


def outputs(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    """One step on a loss that depends on every output differently; the output before it."""
    optimizer.zero_grad()
    made = outputs(model(x))
    losses = [(y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).mean() for y in made]
    torch.stack(losses).sum().backward()
    optimizer.step()
    return tuple(y.detach() for y in made)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def torch_freezes(module: nn.Module) -> None:
    """PyTorch's ``freeze_bn_stats`` passes over ``LinearBn1d``."""
    torch_qat.freeze_bn_stats(module)
    if type(module) is torch_qat.LinearBn1d:
        module.freeze_bn_stats()


#: What is applied to the model before a step: to ours, to PyTorch's.
RECIPE: dict[int, tuple[Callable[..., None], Callable[..., None]]] = {
    20: (backquant.disable_fake_quant, tq.disable_fake_quant),
    24: (backquant.enable_fake_quant, tq.enable_fake_quant),
    30: (backquant.disable_observer, tq.disable_observer),
    36: (backquant.enable_observer, tq.enable_observer),
    40: (backquant.disable_observer, tq.disable_observer),
    44: (freeze_bn_stats, torch_freezes),
}


@dataclass(frozen=True)
class Qat:
    """Both prepared models of one float model."""

    def model(self, name: str) -> tuple[nn.Module, tuple[int, ...]]:
        make, shape = MODELS[name]
        return make().train(), shape

    def as_torch(self, model: nn.Module, name: str, x: Any, backend: str = "x86") -> Any:
        """Ours, to be compared with PyTorch's."""
        return self.ours(model, x, backend, rules=name not in LEFT_IN_FLOAT)

    def ours(
        self,
        model: nn.Module,
        x: Any,
        backend: str = "x86",
        mapping: Any = None,
        *,
        rules: bool = True,
    ) -> Any:
        """``rules=False``: without what the description leaves in float by default."""
        config = backquant.get_backend_config(backend)
        if not rules and config.defaults is not None:
            config = copy.copy(config).set_defaults(replace(config.defaults, leave_float=()))
        return backquant.prepare_qat_fx(
            model,
            mapping or backquant.get_default_qat_qconfig_mapping(backend),
            x,
            backend_config=config,
        )

    def torch_backend(self, backend: str) -> Any:
        module = importlib.import_module(f"torch.ao.quantization.backend_config.{backend}")
        return beside_numbers(getattr(module, f"get_{backend}_backend_config")())

    def theirs(
        self, model: nn.Module, x: Any, backend: str = "x86", mapping: Any = None
    ) -> fx.GraphModule:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return quantize_fx.prepare_qat_fx(
                copy.deepcopy(model),
                mapping or tq.get_default_qat_qconfig_mapping(backend),
                (x,),
                backend_config=self.torch_backend(backend),
            )

    def torch_converts(self, prepared: fx.GraphModule, how: str, backend: str = "x86") -> Any:
        """``how``: ``"decomposed"``, ``"quantized_tensor"`` or ``"lowered"``."""
        convert = {
            "decomposed": quantize_fx._convert_to_reference_decomposed_fx,
            "quantized_tensor": quantize_fx.convert_to_reference_fx,
            "lowered": quantize_fx.convert_fx,
        }[how]
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = backend
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return convert(copy.deepcopy(prepared), backend_config=self.torch_backend(backend))
        finally:
            torch.backends.quantized.engine = before

    def train(
        self, model: nn.Module, shape: tuple[int, ...], steps: Iterable[int], optimizer: Any = None
    ) -> Any:
        """Train one model on data that depends on the step only; returns the optimizer."""
        optimizer = optimizer or sgd(model)
        for step in steps:
            torch.manual_seed(step)
            train_step(model, optimizer, torch.randn(shape))
        return optimizer

    def train_both(
        self, ours: nn.Module, theirs: nn.Module, shape: tuple[int, ...], steps: int = 50
    ) -> None:
        """Same data, same optimizer, the same recipe; everything is equal after every step."""
        optimizers = [sgd(ours), sgd(theirs)]
        for step in range(steps):
            if step in RECIPE:
                for model, change in zip((ours, theirs), RECIPE[step], strict=True):
                    model.apply(change)
            found = []
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                torch.manual_seed(step)
                found.append(train_step(model, optimizer, torch.randn(shape)))
            for one, two in zip(*found, strict=True):
                assert torch.isfinite(one).all()
                assert torch.equal(one, two), f"outputs differ at step {step}"
            self.equal_gradients(ours, theirs, step)
        self.equal_states(ours, theirs)

    def equal_gradients(self, ours: nn.Module, theirs: nn.Module, step: int) -> None:
        others = dict(theirs.named_parameters())
        named = dict(ours.named_parameters())
        assert list(named) == list(others)
        for name, parameter in named.items():
            one, two = parameter.grad, others[name].grad
            assert (one is None) == (two is None), f"{name} at step {step}"
            assert one is None or torch.equal(one, two), f"gradient of {name} at step {step}"

    def equal_states(self, ours: nn.Module, theirs: nn.Module) -> None:
        mine, others = ours.state_dict(), theirs.state_dict()
        assert mine.keys() == others.keys()
        for name, value in others.items():
            assert torch.equal(mine[name], value), name


@pytest.fixture
def qat() -> Qat:
    return Qat()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_name" in metafunc.fixturenames:
        metafunc.parametrize("model_name", list(MODELS))


@pytest.fixture
def three_steps() -> Callable[..., None]:
    """Trains a prepared model of transformers; its losses are numbers."""

    def train(prepared: nn.Module, inputs: dict[str, torch.Tensor], lr: float) -> None:
        optimizer = torch.optim.SGD(prepared.parameters(), lr=lr)
        for _ in range(3):
            optimizer.zero_grad()
            loss = prepared(**inputs)["last_hidden_state"].square().mean()
            loss.backward()
            optimizer.step()
            assert loss.isfinite()

    return train
