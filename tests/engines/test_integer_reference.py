"""The integer reference on stock models: each kernel beside the float reference, on the same integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import benchmarks.stock  # noqa: F401 - torchvision's operators
import pytest
import torch
import transformers
from torch import fx, nn

import backquant
from backquant.backend_config import BackendConfig, get_backend_config
from backquant.errors import EngineError
from backquant.lower.kernels.integer.lookup_tables import rescale
from backquant.operators import all_operators
from backquant.runtime import QuantizedModel

# What a backend does not take stays float: prepare_fx says so.
pytestmark = pytest.mark.filterwarnings(r"ignore:\d+ op")


def prepared(model: nn.Module, x: Any, backend: str | BackendConfig) -> fx.GraphModule:
    config = get_backend_config(backend) if isinstance(backend, str) else backend
    mapping = backquant.get_default_qconfig_mapping(config)
    made = backquant.prepare_fx(model.eval(), mapping, x, backend_config=config)
    with torch.no_grad():
        made(**x) if isinstance(x, dict) else made(*x)
    return made


class Recorder(fx.Interpreter):
    """Keeps the value of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n.name] = super().run_node(n)
        return self.values[n.name]


class Beside(fx.Interpreter):
    """Compares what kernels give with what the reference has there, and goes on with the latter."""

    def __init__(self, model: QuantizedModel, wanted: dict[str, torch.Tensor]) -> None:
        super().__init__(model.graph_module)
        self.wanted = wanted
        self.off: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        wanted = self.wanted.get(n.name)
        moved = any(
            user.target is rescale for user in n.users
        )  # still under the qparams of its input
        if (
            wanted is None
            or moved
            or not isinstance(made, torch.Tensor)
            or made.dtype != wanted.dtype
        ):
            return made
        self.off[n.name] = (made.int() - wanted.int()).abs()
        return wanted


def beside(made: fx.GraphModule, *args: Any) -> tuple[QuantizedModel, dict[str, torch.Tensor]]:
    """By kernel: how many steps each of its integers is away from the reference model's."""
    reference = backquant.convert_to_reference_fx(made, dialect="decomposed")
    recorder = Recorder(reference)
    with torch.no_grad():
        recorder.run(*args)
    model = backquant.convert_to_integer_reference(made)
    last = {use.nodes[-1]: use.kernel for use in model.kernels}
    wanted, kernels = {}, {}
    for node in reference.graph.nodes:
        quantize = next((u for u in node.users if "quantize_per_tensor" in str(u.target)), None)
        if node.name in last and quantize is not None:
            wanted[f"{node.name}_lowered"] = recorder.values[quantize.name]
            kernels[f"{node.name}_lowered"] = last[node.name]
    compared = Beside(model, wanted)
    with torch.no_grad():
        compared.run(*args)
    found: dict[str, list[torch.Tensor]] = {}
    for name, off in compared.off.items():
        found.setdefault(kernels[name], []).append(off.flatten())
    return model, {kernel: torch.cat(each) for kernel, each in found.items()}


def check_close(off: dict[str, torch.Tensor], rough: tuple[str, ...] = ()) -> None:
    """One step at most: where a float is next to a tie, or a table of the reference is rounded otherwise."""
    for kernel, steps in off.items():
        assert steps.max() <= 1, kernel
        assert (steps > 0).double().mean() < (0.1 if kernel in rough else 0.002), kernel


@pytest.mark.parametrize("backend", ["x86", "onednn"])
def test_resnet18(backend: str) -> None:
    import torchvision

    torch.manual_seed(0)
    x = torch.randn(1, 3, 64, 64)
    model, off = beside(prepared(torchvision.models.resnet18(), (x,), backend), x)
    assert model.left_in_float == () and off["integer.conv2d"].numel() > 50_000
    check_close(off, rough=("integer.adaptive_avg_pool",))  # whose ties are floats there


def test_mobilenet_is_saved(tmp_path: Path) -> None:
    import torchvision

    torch.manual_seed(0)
    x = torch.randn(1, 3, 64, 64)
    model, off = beside(prepared(torchvision.models.mobilenet_v3_small(), (x,), "x86"), x)
    assert {"integer.table(hardswish)", "integer.mul", "integer.adaptive_avg_pool"} <= set(off)
    assert model.left_in_float == ()
    check_close(off, rough=("integer.adaptive_avg_pool",))
    backquant.save(model, tmp_path / "model.bq")
    loaded = backquant.load(tmp_path / "model.bq")
    assert torch.equal(loaded(x), model(x)) and loaded.engine == model.engine


def test_bert() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        vocab_size=100, attn_implementation="eager",
    )  # fmt: skip
    ids = torch.randint(0, 100, (2, 16))
    made = prepared(transformers.BertModel(config), {"input_ids": ids}, "onednn")
    _, off = beside(made, ids)
    kernels = {"integer.linear", "integer.matmul", "integer.softmax", "integer.layer_norm"}
    assert {*kernels, "integer.table(gelu)"} <= set(off)
    check_close(off, rough=("integer.softmax", "integer.layer_norm"))


def test_a_bias_that_has_no_integer_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3)).eval()
    model[0].bias.data.fill_(1e30)
    with pytest.raises(EngineError, match="a bias beyond 2"):
        backquant.convert_to_integer_reference(prepared(model, (torch.randn(1, 3, 4, 4),), "x86"))


@pytest.mark.parametrize("size", [1e-4, 3e-5])
def test_norms_of_values_far_below_eps(size: float) -> None:
    x = torch.randn(4, 6, 8) * size
    _, off = beside(prepared(nn.LayerNorm(8), (x,), "x86"), x)
    check_close(off, rough=("integer.layer_norm",))


def test_every_operator_of_the_backends() -> None:
    """What a backend quantizes is computed in integers, or refused by name."""
    refused: dict[str, str] = {}
    computed = 0
    backend = get_backend_config("onednn")
    entries = {entry.normal_pattern.anchor.op for entry in backend.configs}
    for operator in all_operators():
        spelling = next((each for each in operator.calls if each in entries), None)
        if spelling is None:
            continue
        model, inputs = operator.example_of(spelling)
        made = prepared(model, inputs, backend)
        try:
            integer, off = beside(made, *inputs)
        except EngineError as error:
            refused[operator.name] = str(error)
            continue
        assert all(steps.max() <= 1 for steps in off.values()), (operator.name, off)
        computed += bool(integer.kernels)
    assert computed > 40
    # Functions get scales along the first axis, which of transposed weights is that of the inputs.
    transposed = {f"conv_transpose{n}d" for n in (1, 2, 3)}
    assert set(refused) <= {"resize_", "floordiv", "grouped_linear", *transposed}, refused
    assert all(name in text for name, text in refused.items())
