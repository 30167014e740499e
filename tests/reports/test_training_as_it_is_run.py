"""Quantization-aware training as it is run: compiled, under autocast, averaged, with norms of weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import backquant
from backquant.errors import ConfigError, UsageError

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 3])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


def prepared(model: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    model = Net() if model is None else model
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    return backquant.prepare_qat_fx(model.train(), mapping, (X,))


def trained(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(call(X).float(), Y).backward()
        optimizer.step()


def converted(model: nn.Module) -> torch.Tensor:
    return backquant.convert_fx(model.eval())(X)


def plain(steps: int = 3) -> torch.Tensor:
    model = prepared()
    trained(model, model, steps)
    return converted(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it where a graph goes on
def test_compiled() -> None:
    """PyTorch's fake-quantizers break the graph, too; here it is one operation before each batch norm."""
    model = prepared()
    trained(model, torch.compile(model, backend="aot_eager"))
    torch.testing.assert_close(converted(model), plain(), atol=0.05, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    model = prepared()

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(x)

    trained(model, call)
    torch.testing.assert_close(converted(model), plain(), atol=0.05, rtol=0)


@pytest.mark.parametrize("with_buffers", [False, True])
def test_averages_begin_before_the_first_step(with_buffers: bool) -> None:
    model = prepared()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.0), use_buffers=with_buffers)
    trained(model, model, 1)
    average.update_parameters(model)
    trained(model, model, 1)
    average.update_parameters(model)
    wanted = dict(model.named_parameters())
    for name, value in average.module.named_parameters():
        torch.testing.assert_close(value, wanted[name])
    assert converted(average.module).isfinite().all()


@pytest.mark.parametrize("wrap", [AveragedModel, nn.DataParallel, nn.Sequential])
def test_what_holds_a_prepared_model_is_named(wrap: Callable[[nn.Module], nn.Module]) -> None:
    inside = prepared()
    trained(inside, inside, 1)
    model = wrap(inside)
    with pytest.raises(UsageError, match="wrapped in") as caught:
        backquant.convert_fx(model.eval())
    assert backquant.convert_fx(eval(caught.value.fix or "", {"model": model}))(X).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trained_in_half_precision(dtype: torch.dtype) -> None:
    """Ranges and scales stay in float32; the weights are brought back before the model is converted."""
    model = prepared().to(dtype)
    trained(model, lambda x: model(x.to(dtype)))
    assert {b.dtype for name, b in model.named_buffers() if name.endswith("scale")} == {
        torch.float32
    }
    torch.testing.assert_close(converted(model.float()), plain(), atol=0.1, rtol=0)


def test_checkpointed() -> None:
    model = prepared()
    trained(model, lambda x: checkpoint(model, x, use_reentrant=False))
    assert converted(model).isfinite().all()


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_before_a_batch_norm(norm: Callable[[nn.Module], nn.Module]) -> None:
    net = Net()
    norm(net.conv)
    model = prepared(net)
    before = {name: value.clone() for name, value in model.named_parameters()}
    trained(model, model)
    after = dict(model.named_parameters())
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert any("parametrizations" in name for name in changed)
    assert converted(model).isfinite().all()


def pruned(module: nn.Module) -> None:
    prune.l1_unstructured(module, "weight", 0.3)


def pruned_twice(module: nn.Module) -> None:
    pruned(module)
    prune.random_unstructured(module, "bias", 0.3)


@pytest.mark.parametrize(
    "hook", [nn.utils.weight_norm, nn.utils.spectral_norm, pruned, pruned_twice]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_hooks_that_compute_weights_are_removed_as_the_fix_says(
    hook: Callable[[nn.Module], Any],
) -> None:
    net = Net()
    hook(net.conv)
    with pytest.raises(ConfigError) as caught:
        prepared(net)
    calls = re.findall(r"torch\.nn\.utils\.\S+\(module, '\w+'\)", str(caught.value))
    assert calls
    for call in calls:
        eval(call, {"torch": torch, "module": net.conv})
    model = prepared(net)
    trained(model, model)
    assert converted(model).isfinite().all()
