from __future__ import annotations

import copy
import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.resident import resident
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import backquant
from backquant.errors import InputError
from backquant.runtime.replay import Replays


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x) + x)
        return self.fc(x.mean((2, 3)))


@pytest.fixture
def quantized() -> Any:
    torch.manual_seed(0)
    model = Net().eval()
    batches = [torch.randn(2, 3, 8, 8) for _ in range(2)]
    return backquant.quantize(model, batches[0], backend="x86", calibration=batches)


def warmed(model: Any, x: torch.Tensor) -> Any:
    for _ in range(2):
        model(x)
    assert model.replays.programs >= 1, model.replays.refused
    return model


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (3, 3, 8, 8), (2, 3, 13, 9), (0, 3, 8, 8)])
def test_it_equals_the_graph_for_every_batch_and_size(
    quantized: Any, shape: tuple[int, ...]
) -> None:
    warmed(quantized, torch.randn(shape))
    x = torch.randn(shape)
    assert torch.equal(quantized(x), quantized.graph_module(x))


def test_each_kind_of_input_has_its_recording_and_few_are_kept(quantized: Any) -> None:
    for batch in range(1, 12):
        warmed(quantized, torch.randn(batch, 3, 8, 8))
    assert quantized.replays.programs == 8
    channels_last = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    warmed(quantized, channels_last)
    assert torch.equal(quantized(channels_last), quantized.graph_module(channels_last))


def test_a_kind_that_comes_again_and_again_keeps_its_recording() -> None:
    replays, often = Replays(nn.ReLU()), torch.ones(1)
    for _ in range(3):
        replays(often)
    [recorded] = replays._found.values()
    for size in range(2, 30):
        replays(often)
        replays(torch.ones(size))
    assert any(found is recorded for found in replays._found.values())


def test_which_arguments_are_one_tensor_is_part_of_the_kind() -> None:
    """As in self-attention, where query, key and value are one tensor."""
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    replays = Replays(torch.fx.symbolic_trace(lambda a, b, c=None: a - 2 * b))
    for args, kwargs in [((x, x), {}), ((x, y), {}), ((x,), {"b": x}), ((x,), {"b": y, "c": None})]:
        for _ in range(3):
            assert torch.equal(replays(*args, **kwargs), args[0] - 2 * (*args, kwargs.get("b"))[1])
    assert replays.programs == 4, replays.refused


def test_a_new_state_is_seen(quantized: Any) -> None:
    x = torch.randn(2, 3, 8, 8)
    before = warmed(quantized, x)(x)
    state = quantized.state_dict()
    changed = {key: -value for key, value in state.items() if key.endswith("weight")}
    quantized.load_state_dict({**state, **changed})
    after = quantized(x)
    assert not torch.equal(after, before)
    assert torch.equal(after, quantized.graph_module(x))
    assert torch.equal(warmed(quantized, x)(x), after)


def _set(module: nn.Module) -> None:
    module.weight = nn.Parameter(module.weight.detach() + 1)


def _set_data(module: nn.Module) -> None:
    module.weight.data = module.weight.detach() + 1


def _assign(module: nn.Module) -> None:
    state = {key: value + 1 for key, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


@pytest.mark.parametrize("change", [_set, _set_data, _assign])
def test_a_replaced_parameter_is_seen(change: Any) -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.LayerNorm(4), nn.ReLU()))
    replays, x = Replays(graph), torch.randn(3, 4)
    for _ in range(3):
        before = replays(x)
    assert replays.programs == 1
    change(graph.get_submodule("0"))
    for _ in range(3):
        assert not torch.equal(replays(x), before)
        assert torch.equal(replays(x), graph(x))
    assert replays.programs == 1


def test_a_state_of_one_kernel_is_seen(quantized: Any) -> None:
    x = torch.randn(2, 3, 8, 8)
    before = warmed(quantized, x)(x)
    conv = quantized.graph_module.conv1
    conv.load_state_dict({**conv.state_dict(), "weight": -conv.weight})
    assert not torch.equal(quantized(x), before)


def test_hooks_see_every_call(quantized: Any) -> None:
    x = torch.randn(2, 3, 8, 8)
    warmed(quantized, x)
    seen: list[str] = []
    handle = quantized.graph_module.conv1.register_forward_hook(lambda *_: seen.append("conv1"))
    quantized(x)
    handle.remove()
    quantized(x)
    assert seen == ["conv1"]


def test_copies_replay_by_themselves(quantized: Any) -> None:
    x = torch.randn(2, 3, 8, 8)
    expected = warmed(quantized, x)(x)
    other = copy.deepcopy(quantized)
    assert other.replays is not quantized.replays
    assert torch.equal(warmed(other, x)(x), expected)


def test_it_can_be_switched_off_and_stays_off(quantized: Any) -> None:
    quantized.replays = None
    x = torch.randn(2, 3, 8, 8)
    assert quantized(x).shape == (2, 5)
    assert copy.deepcopy(quantized).replays is None


def test_threads_share_a_model(quantized: Any) -> None:
    x = torch.randn(2, 3, 8, 8)
    expected = quantized.graph_module(x)
    results: list[bool] = []

    def work() -> None:
        results.extend(torch.equal(quantized(x), expected) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80 and all(results)


def test_code_of_others_is_not_replayed() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    replays = Replays(nn.Sequential(nn.ReLU(), Counting()))
    assert [replays(torch.ones(1)).item() for _ in range(4)] == [1, 2, 3, 4]
    assert "Counting" in replays.refused


class Seeing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operators(quantized: Any) -> None:
    x = torch.randn(2, 3, 8, 8)
    warmed(quantized, x)
    with Seeing() as mode:
        quantized(x)
    assert "onednn.qconv_pointwise.default" in mode.seen


def test_keywords_and_literals_are_part_of_the_kind() -> None:
    graph = torch.fx.Graph()
    x, factor = graph.placeholder("x"), graph.placeholder("factor", default_value=1.0)
    graph.output(graph.call_function(torch.mul, (x, factor)))
    replays = Replays(torch.fx.GraphModule(nn.Module(), graph))
    for number in (2.0, 3.0):
        found = [replays(torch.ones(1), factor=number).item() for _ in range(3)]
        assert found == [number] * 3
    assert replays.programs == 2


class Cache:
    """As of a decoder: objects within an object, and a size that nothing reads."""

    def __init__(self, *keys: torch.Tensor, seen: int = 0) -> None:
        self.layers, self.seen = [SimpleNamespace(keys=key) for key in keys], seen


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, Cache]:
        keys = [torch.cat((layer.keys, self.fc(x))) for layer in cache.layers]
        return sum(key.sum(0) for key in keys), Cache(*keys)


def test_objects_of_an_exported_model_are_part_of_the_kind() -> None:
    model, x = Decoder().eval(), torch.randn(1, 4)
    y, z = torch.randn(2, 4), torch.randn(3, 4)
    made = backquant.quantize(model, (x, Cache(y, y)), calibration=[(x, Cache(y, z))])
    for cache in (Cache(y, z), Cache(z, y), Cache(y, z, seen=1), Cache(y, y)):
        found = [made(x, cache) for _ in range(3)]
        assert len({tuple(result.tolist()) for result, _ in found}) == 1
        wanted, grown = model(x, cache)
        assert torch.allclose(found[2][0], wanted, atol=0.2)
        for got, layer in zip(found[2][1].layers, grown.layers, strict=True):
            assert got.keys.shape == layer.keys.shape
    assert made.replays.programs == 4, made.replays.refused
    with pytest.raises(InputError, match="'cache' was 2 tensors"):
        made(x, Cache(y, y, y))


def test_memory_over_hundreds_of_shapes_has_a_bound(quantized: Any) -> None:
    """Three calls of each, so that all are recorded; what is kept of a shape goes with newer ones."""
    shapes = [(8 + i % 20, 8 + i // 20) for i in range(320)]
    first: float | None = None
    for count, (height, width) in enumerate(shapes):
        x = torch.randn(1, 3, height, width)
        for _ in range(3):
            quantized(x)
        if count == 100:
            gc.collect()
            first = resident()
    assert first is not None
    gc.collect()
    assert quantized.replays.programs <= 8
    # MiB; oneDNN keeps up to 1024 primitives: 42 here, 109 after 1,200 shapes
    assert resident() - first < 80
