"""Eager mode beside ``torch.ao``'s: the same model, the same data, PyTorch's numbers."""

from __future__ import annotations

import copy
import importlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from backquant.errors import UsageError

torch.backends.quantized.engine = "fbgemm"


def flow(prefix: str) -> Any:
    """Eager mode of one of the two libraries, with the modules that it is made for."""
    quantization: Any = importlib.import_module(f"{prefix}.quantization")
    return SimpleNamespace(
        **{name: getattr(quantization, name) for name in dir(quantization) if name[0] != "_"},
        nnq=importlib.import_module(f"{prefix}.nn.quantized"),
        qconfigs=importlib.import_module(f"{prefix}.quantization.qconfig"),
    )


OURS, THEIRS = flow("backquant.ao"), flow("torch.ao")


class Net(nn.Module):
    def __init__(self, q: Any) -> None:
        super().__init__()
        self.quant, self.dequant = q.QuantStub(), q.DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.up, self.drop = nn.ConvTranspose2d(4, 4, 2), nn.Dropout()
        self.hard, self.gate = nn.Hardswish(), nn.Sigmoid()
        self.plus, self.times = q.nnq.FloatFunctional(), q.nnq.FloatFunctional()
        self.fc, self.act = nn.Linear(4, 5), nn.ReLU()
        self.norm = nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn(self.conv(self.quant(x))))
        y = self.hard(self.drop(self.up(y)))
        y = self.times.mul(y, self.gate(self.plus.add(y, y)))
        y = self.plus.add_scalar(y.mean((2, 3)), 0.5)
        y = self.norm(self.act(self.fc(y)))
        return self.dequant(y)


def converted(q: Any, *, is_qat: bool, **options: Any) -> Any:
    torch.manual_seed(1)
    model = Net(q).train(is_qat)
    x = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    names = [["conv", "bn", "relu"], ["fc", "act"]]
    fuse = q.fuse_modules_qat if is_qat else q.fuse_modules
    fused = fuse(model, names)
    plain = q.qconfigs.default_qconfig  # histograms have other ranges here
    fused.qconfig = q.get_default_qat_qconfig("qnnpack") if is_qat else plain
    fused.up.qconfig = plain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's: eager mode, quantized tensors
        prepared = (q.prepare_qat if is_qat else q.prepare)(fused)
        torch.manual_seed(3)  # of the dropout
        prepared(x)
        return q.convert(prepared.eval(), **options), x


@pytest.mark.parametrize("is_qat", [False, True])
def test_scales_and_results_are_pytorchs(is_qat: bool) -> None:
    ours, x = converted(OURS, is_qat=is_qat)
    theirs, _ = converted(THEIRS, is_qat=is_qat)
    kinds = {name: type(module).__name__ for name, module in ours.named_children()}
    assert kinds == {name: type(module).__name__ for name, module in theirs.named_children()}
    for name, module in theirs.named_modules():
        if hasattr(module, "scale"):
            mine = ours.get_submodule(name)
            assert float(mine.scale) == pytest.approx(float(module.scale), rel=1e-3), name
            assert int(mine.zero_point) == int(module.zero_point), name
    step = float(theirs.norm.scale)
    assert (ours(x) - theirs(x)).abs().max() <= 2 * step
    weight, other = ours.conv.weight(), theirs.conv.weight()
    assert torch.equal(weight.int_repr(), other.int_repr())


def test_results_stay_within_the_range_that_was_observed() -> None:
    ours, x = converted(OURS, is_qat=False)
    seen: dict[str, int] = {}
    for name in ("quant", "conv"):
        ours.get_submodule(name).register_forward_hook(
            lambda _m, _i, out, name=name: seen.__setitem__(name, int(out.int_repr().max()))
        )
    ours(100 * x)
    assert seen.pop("quant") == 127 and 0 < seen.pop("conv") <= 127


def test_a_reference_model_has_integer_weights_and_runs_in_float() -> None:
    ours, _ = converted(OURS, is_qat=False, is_reference=True)
    theirs, _ = converted(THEIRS, is_qat=False, is_reference=True)
    assert type(ours.up).__name__ == type(theirs.up).__name__ == "ConvTranspose2d"
    assert torch.equal(ours.up.get_quantized_weight(), theirs.up.get_quantized_weight().int_repr())


@pytest.mark.parametrize("bits", ["", "_4bit"])
@pytest.mark.parametrize("trained", [False, True])
def test_embeddings(bits: str, trained: bool) -> None:
    def run(q: Any) -> Any:
        torch.manual_seed(4)
        model = nn.Sequential(nn.EmbeddingBag(10, 12, mode="sum", include_last_offset=True))
        if trained:
            model.qconfig = getattr(q.qconfigs, f"default_embedding_qat_qconfig{bits}")
        else:
            model.qconfig = getattr(q.qconfigs, f"float_qparams_weight_only_qconfig{bits}")
        indices = torch.tensor([1, 3, 9, 3, 0]), torch.tensor([0, 2, 5])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if trained:
                mapping = q.get_embedding_qat_module_mappings()
                model = q.prepare_qat(model.train(), mapping=mapping)
            else:
                model = q.prepare(model)
            model[0](*indices)
            model = q.convert(model, mapping=q.get_embedding_static_quant_module_mappings())
        return model[0], model[0](*indices)

    (ours, result), (theirs, expected) = run(OURS), run(THEIRS)
    assert type(ours).__name__ == type(theirs).__name__ == "EmbeddingBag"
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(result, expected)


def test_an_lstm_is_observed_inside() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.lstm(x)[0]
            return result

    model, x = Model().eval(), torch.randn(5, 2, 4)
    model.qconfig = OURS.get_default_qconfig("qnnpack")
    prepared = OURS.prepare(model)
    prepared(x)
    quantized = OURS.convert(prepared)
    assert type(quantized.lstm) is OURS.nnq.LSTM
    assert (quantized(x) - model(x)).abs().max() < 0.05


def test_the_model_is_not_changed_and_hooks_stay() -> None:
    model = OURS.QuantWrapper(nn.Linear(3, 2)).eval()
    calls: list[str] = []
    model.module.register_forward_hook(lambda *_: calls.append("hook"))
    model.qconfig = OURS.get_default_qconfig("qnnpack")
    before = copy.deepcopy(model.state_dict())
    prepared = OURS.prepare(model)
    prepared(torch.rand(4, 3))
    quantized = OURS.convert(prepared)
    calls.clear()
    quantized(torch.rand(4, 3))
    assert calls == ["hook"] and not hasattr(quantized.module, "activation_post_process")
    assert type(model.module) is nn.Linear and model.state_dict().keys() == before.keys()
    assert type(prepared.module) is nn.Linear


def test_one_call() -> None:
    torch.manual_seed(0)
    model = OURS.QuantWrapper(nn.Linear(3, 2))
    model.qconfig = OURS.get_default_qconfig("qnnpack")
    data = [(torch.rand(4, 3), None)]
    quantized = OURS.quantize(model, OURS.default_eval_fn, (data,))
    assert (quantized(data[0][0]) - model(data[0][0])).abs().max() < 0.02
    model.qconfig = OURS.get_default_qat_qconfig("qnnpack")
    trained = OURS.quantize_qat(model, OURS.default_eval_fn, (data,))
    assert type(trained.module) is OURS.nnq.Linear


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="evaluation mode"):
        OURS.prepare_qat(nn.Linear(1, 1).eval())
    with pytest.warns(UserWarning, match="nothing is observed"):
        OURS.prepare(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="no forward"):
        OURS.nnq.QFunctional()(1)
    model = nn.Sequential(nn.EmbeddingBag(10, 12, mode="mean"))
    model.qconfig = OURS.qconfigs.float_qparams_weight_only_qconfig
    with pytest.raises(UsageError, match="mode='mean'"):
        OURS.convert(OURS.prepare(model))[0](torch.tensor([[1]]))
