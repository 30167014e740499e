from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization as tq
from torch.ao.quantization import quantize_fx

import backquant
from backquant import QConfig, QConfigMapping
from backquant.errors import CaptureError, InputError, UsageError
from backquant.observe import MinMaxObserver

MAPPING = backquant.get_default_qconfig_mapping("x86")
X86 = backquant.backend_config.get_x86_backend_config()
# what PyTorch has not: operators that ``quantize`` leaves in float by default
assert X86.defaults is not None
X86.set_defaults(replace(X86.defaults, leave_float=()))


def prepared(net: nn.Module, image: torch.Tensor, **changes: Any) -> Any:
    return backquant.prepare_fx(net.eval(), MAPPING, image, backend_config=X86, **changes)


def test_the_steps_give_what_the_one_call_gives(
    net: nn.Module, image: torch.Tensor, unchanged: Any
) -> None:
    net.eval()
    with unchanged(net):
        steps = prepared(net, image)
        steps(image)
        converted = backquant.convert_fx(steps)
    whole = backquant.quantize(net, calibration=[image], backend=X86, qconfig_mapping=MAPPING)
    assert torch.equal(converted(image), whole(image))
    assert converted.plan.decisions == whole.plan.decisions and converted.kernels == whole.kernels


def test_converting_leaves_the_prepared_model_as_it_is(net: nn.Module, image: torch.Tensor) -> None:
    steps = prepared(net, image)
    steps(image)
    before = copy.deepcopy(steps.state_dict())
    first, reference = backquant.convert_fx(steps), backquant.convert_to_reference_fx(steps)
    first.half()
    assert all(torch.equal(value, before[name]) for name, value in steps.state_dict().items())
    assert torch.equal(backquant.convert_fx(steps)(image), backquant.convert_fx(steps)(image))
    assert "quantize_per_tensor" in reference.code


def test_a_backend_without_an_engine_gives_the_reference_model(
    net: nn.Module, image: torch.Tensor
) -> None:
    config = backquant.backend_config.get_tensorrt_backend_config()
    mapping = backquant.get_default_qconfig_mapping("tensorrt")
    steps = backquant.prepare_fx(net.eval(), mapping, image, backend_config=config)
    steps(image)
    assert backquant.convert_fx(steps).engine is None


def test_dict_forms(net: nn.Module, image: torch.Tensor) -> None:
    mapping = {"": None, "object_type": [(nn.Linear, backquant.get_default_qconfig("x86"))]}
    steps = backquant.prepare_fx(
        net.eval(), mapping, image, {"preserved_attributes": ["note"]}, backend_config=X86.to_dict()
    )
    assert steps.note == net.note
    plan = backquant.prepare.prepared_state(steps).plan  # type: ignore[attr-defined]
    assert {d.operator for d in plan.decisions.values() if d.quantized} == {"Linear"}


def test_one_warning_lists_what_is_skipped(
    net: nn.Module, image: torch.Tensor, snapshot: Callable[..., None]
) -> None:
    int16 = MinMaxObserver.with_args(dtype=torch.int16)
    mapping = QConfigMapping().set_global(QConfig(int16, int16))
    with pytest.warns(UserWarning, match="operators stay float on x86") as caught:
        backquant.prepare_fx(net.eval(), mapping, image, backend_config=X86)
    assert len(caught) == 1 and caught[0].filename == __file__
    lines = str(caught[0].message).splitlines()
    snapshot("prepare-skipped", "\n".join([*lines[:4], lines[-1]]))  # the rest is said by ``match``


def test_no_warning_when_nothing_is_refused(net: nn.Module, image: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(net, image)


def test_models_that_are_not_prepared_are_refused(
    net: nn.Module, snapshot: Callable[..., None]
) -> None:
    for convert in (backquant.convert_fx, backquant.convert_to_reference_fx):
        with pytest.raises(UsageError) as caught:
            convert(net)  # type: ignore[arg-type]
    snapshot("convert-float", caught.value)


def test_fusing(net: nn.Module, image: torch.Tensor, unchanged: Any) -> None:
    net.eval()
    with unchanged(net):
        fused = backquant.fuse_fx(net, backend_config=X86)
    assert type(fused.stem).__name__ == "ConvReLU2d"
    assert torch.allclose(fused(image), net(image), atol=1e-5)


class Scored(nn.Module):
    """A convolution that is quantized, and layers that stay float."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.table, self.softplus = nn.Embedding(4, 4), nn.Softplus()

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.softplus(self.conv(x)).mean((2, 3)) + self.table(i)
        return y


def test_children_that_stay_float_are_found_by_their_names() -> None:
    model, inputs = Scored().eval(), (torch.randn(2, 3, 8, 8), torch.tensor([1, 3]))
    mapping = QConfigMapping().set_object_type(nn.Conv2d, backquant.get_default_qconfig("x86"))
    steps = backquant.prepare_fx(model, mapping, inputs, backend_config=X86)
    steps(*inputs)
    converted = backquant.convert_fx(steps)
    assert type(converted.table) is nn.Embedding
    assert torch.equal(converted.table.weight, model.table.weight)
    assert type(converted.softplus) is nn.Softplus
    assert type(converted.conv) is not nn.Conv2d
    assert converted.qparams["conv"].output is None or converted.qparams["conv"].inputs


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_know_their_qconfig_as_in_torch() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()), nn.Conv2d(3, 3, 1), nn.Sigmoid(), nn.Flatten()
    ).eval()
    x = torch.randn(1, 3, 2, 2)
    rules = {
        "": tq.default_qconfig,
        "object_type": [(nn.Sigmoid, None)],
        "module_name": [("1", tq.default_per_channel_qconfig)],
    }
    mapping = tq.QConfigMapping.from_dict(rules)
    theirs = quantize_fx.prepare_fx(copy.deepcopy(model), mapping, (x,))
    ours = backquant.prepare_fx(model, backquant.from_torch_ao(mapping), (x,))
    for path in ("0.0", "1", "2", "3"):
        asked, expected = ours.get_submodule(path).qconfig, theirs.get_submodule(path).qconfig
        assert (asked is None) == (expected is None) == (path == "2")
        if asked is not None:
            assert type(asked.weight()).__name__ == type(expected.weight()).__name__
    assert not any(hasattr(module, "qconfig") for module in model.modules())
    ours(x)
    assert not hasattr(backquant.convert_fx(ours).get_submodule("2"), "qconfig")
    kept = backquant.convert_fx(ours, _remove_qconfig=False).get_submodule("2")
    assert kept.qconfig is None


def test_stack_traces_survive_every_step() -> None:
    model, inputs = Scored().eval(), (torch.randn(2, 3, 8, 8), torch.tensor([1, 3]))
    mapping = copy.deepcopy(MAPPING).set_object_type(nn.Embedding, None)
    steps = backquant.prepare_fx(model, mapping, inputs, backend_config=X86)
    steps(*inputs)
    models = [
        steps,
        backquant.convert_to_reference_fx(steps),
        backquant.convert_to_reference_fx(steps, dialect="decomposed"),
        backquant.convert_fx(steps),
    ]
    for made in models:
        (call,) = (node for node in made.graph.nodes if node.target == "conv")
        assert "self.softplus(self.conv(x))" in call.stack_trace
        assert __file__ in call.stack_trace


def test_example_inputs_that_do_not_run_are_noted() -> None:
    """PyTorch never runs them; what is then unknown is said in the one warning."""
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    with pytest.warns(UserWarning, match=r"shapes are unknown.*\(float32\[1, 3\]\)"):
        steps = backquant.prepare_fx(model, MAPPING, torch.zeros(1, 3))
    x = torch.randn(8, 4)
    steps(x)
    again = backquant.prepare_fx(model, MAPPING, x)
    again(x)
    assert torch.equal(backquant.convert_fx(steps)(x), backquant.convert_fx(again)(x))
    with pytest.raises(InputError):
        backquant.quantize(model, torch.zeros(1, 3), calibration=[x])


def test_a_model_that_only_exports_needs_examples_that_run() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.fc(x)
            return y if y.shape[0] > 1 and len(y) else -y

    with pytest.raises(CaptureError):
        backquant.prepare_fx(Branching().eval(), MAPPING, torch.zeros(1, 3))
    assert backquant.prepare_fx(Branching().eval(), MAPPING, torch.zeros(2, 4))


def test_stubs_pass_through_a_trace() -> None:
    x = torch.randn(4, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    results = []
    for model in (net, backquant.nn.QuantWrapper(net)):
        steps = backquant.prepare_fx(model, MAPPING, x)
        steps(x)
        results.append(backquant.convert_fx(steps)(x))
    assert torch.equal(*results)
