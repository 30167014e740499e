"""What people do with the results of ``prepare_fx`` and ``convert_fx``: on ``torch.ao``, and by prefix.

Each idiom is a function of ``ao``, which is ``torch.ao`` or ``backquant.ao``; both see the same.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic.quantized
import torch.ao.nn.quantized
import torch.ao.quantization.fx.custom_config
import torch.ao.quantization.quantize_fx
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

import backquant
import backquant.ao
from backquant.errors import BackquantError

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
IDIOMS: dict[str, Callable[[Any], Any]] = {}


class Net(nn.Module):
    """Fused layers, a plain one, a sum, a pool, a linear layer, and an attribute of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.side, self.fc = nn.Conv2d(8, 8, 1), nn.Linear(8, 4)
        self.classes = ["a", "b", "c", "d"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn(self.conv(x)))
        x = x + self.side(x)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.fc = nn.EmbeddingBag(10, 8, mode="sum"), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.fc(self.emb(ids, offsets))


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) if x.sum() > -1e9 else x


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 8), Untraceable()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x))


def idiom(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    IDIOMS[function.__name__] = function
    return function


def net() -> Net:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.bn.running_mean.uniform_(-0.5, 0.5)
        model.bn.running_var.uniform_(0.5, 2)
    return model.eval()


def prepared(ao: Any, mapping: Any = None, model: nn.Module | None = None, **options: Any) -> Any:
    mapping = requested(ao) if mapping is None else mapping
    model = net() if model is None else model
    made = ao.quantization.quantize_fx.prepare_fx(model, mapping, (X,), **options)
    for factor in (1, 3, 9, -9):
        made(factor * X)
    return made


def requested(ao: Any) -> Any:
    """For fbgemm, by extremes: of histograms, the two take other ranges."""
    mapping = ao.quantization.get_default_qconfig_mapping("fbgemm").set_global(by_extremes(ao))
    for kind in (nn.Conv2d, nn.Linear, nn.ReLU, nn.BatchNorm2d, F.relu):
        mapping.set_object_type(kind, by_extremes(ao))
    return mapping


def by_extremes(ao: Any) -> Any:
    of = ao.quantization
    activation = of.MinMaxObserver.with_args(dtype=torch.quint8, reduce_range=True)
    return of.QConfig(activation, of.default_per_channel_weight_observer)


def converted(ao: Any, mapping: Any = None, model: nn.Module | None = None, **options: Any) -> Any:
    return ao.quantization.quantize_fx.convert_fx(prepared(ao, mapping, model, **options))


def trained(ao: Any) -> Any:
    mapping = ao.quantization.get_default_qat_qconfig_mapping("fbgemm")
    made = ao.quantization.quantize_fx.prepare_qat_fx(net().train(), mapping, (X,))
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        made(X).square().mean().backward()
        optimizer.step()
    return made


def targets(model: Any) -> list[str]:
    """The operators, by their names."""
    return [
        type(model.get_submodule(str(n.target))).__name__
        if n.op == "call_module"
        else getattr(n.target, "__name__", str(n.target))
        for n in model.graph.nodes
        if n.op.startswith("call_") and getattr(n.target, "__name__", "") != "limited"
    ]


# what layers are


@idiom
def module_of_a_node(ao: Any) -> Any:
    q = converted(ao)
    modules = dict(q.named_modules())
    calls = [n for n in q.graph.nodes if n.op == "call_module"]
    return [(n.target, type(modules[n.target]).__name__) for n in calls]


@idiom
def scale_and_zero_point(ao: Any) -> Any:
    q = converted(ao)
    return [(m.scale, m.zero_point) for m in (q.conv, q.side, q.fc)]


@idiom
def weight_and_bias(ao: Any) -> Any:
    q = converted(ao)
    return [y for m in (q.conv, q.fc) for y in (m.weight().dequantize(), m.bias())]


@idiom
def integers_of_a_weight(ao: Any) -> Any:
    q = converted(ao)
    return [m.weight().int_repr() for m in (q.conv, q.fc)]


@idiom
def scales_by_channel(ao: Any) -> Any:
    w = converted(ao).conv.weight()
    return (
        *(w.qscheme(), w.q_per_channel_scales(), w.q_per_channel_zero_points()),
        w.q_per_channel_axis(),
    )


@idiom
def scale_of_a_weight(ao: Any) -> Any:
    mapping = ao.quantization.get_default_qconfig_mapping("qnnpack")
    backend = ao.quantization.backend_config.get_qnnpack_backend_config()
    w = converted(ao, mapping, backend_config=backend).fc.weight()
    return w.qscheme(), w.q_scale(), w.q_zero_point()


@idiom
def names_of_layers(ao: Any) -> Any:
    q = converted(ao)
    return [m._get_name() for m in (q.conv, q.side, q.fc)]


@idiom
def repr_of_layers(ao: Any) -> Any:
    q = converted(ao)
    return [repr(m) for m in (q.conv, q.side, q.fc)]


@idiom
def class_of_a_fused_layer(ao: Any) -> Any:
    q = converted(ao)
    return (
        type(q.conv) is ao.nn.intrinsic.quantized.ConvReLU2d,
        isinstance(q.conv, ao.nn.quantized.Conv2d),
        type(q.side) is ao.nn.quantized.Conv2d,
        type(q.fc) is ao.nn.quantized.Linear,
    )


@idiom
def sizes_of_a_layer(ao: Any) -> Any:
    q = converted(ao)
    return (
        *(q.conv.in_channels, q.conv.kernel_size, q.conv.stride, q.conv.padding, q.conv.groups),
        *(q.fc.in_features, q.fc.out_features),
    )


@idiom
def scale_of_a_sum(ao: Any) -> Any:
    q = converted(ao)
    [add] = [n for n in q.graph.nodes if n.target is torch.ops.quantized.add]
    return [getattr(q, a.target) for a in add.args[2:]]


@idiom
def scale_of_the_input(ao: Any) -> Any:
    q = converted(ao)
    return q.conv_input_scale_0, q.conv_input_zero_point_0


@idiom
def set_weight_and_scale_of_a_layer(ao: Any) -> Any:
    q = converted(ao)
    q.fc.set_weight_bias(q.fc.weight(), torch.zeros(4))
    q.fc.scale = q.fc.scale * 2
    return q(X)


# graphs


@idiom
def a_graph_module(ao: Any) -> Any:
    return isinstance(prepared(ao), fx.GraphModule), isinstance(converted(ao), fx.GraphModule)


@idiom
def operators_of_the_graph(ao: Any) -> Any:
    return targets(converted(ao))


@idiom
def print_the_graph(ao: Any) -> Any:
    q = converted(ao)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        q.print_readable()
        q.graph.print_tabular()
        print(q)
    return [word in out.getvalue() for word in ("torch.ops.quantized.add", "self.conv(", "opcode")]


@idiom
def run_the_code(ao: Any) -> Any:
    q = converted(ao)
    names = {"torch": torch, "device": torch.device, "backquant": backquant}
    for name, value in q.graph.python_code("self").globals.items():
        names[name] = value
    exec(q.code, names)
    run: Any = names["forward"]
    return run(q, X)


@idiom
def interpret(ao: Any) -> Any:
    q = converted(ao)
    return fx.Interpreter(q).run(X)


@idiom
def propagate_shapes(ao: Any) -> Any:
    q = converted(ao)
    ShapeProp(q).propagate(X)
    calls = [n for n in q.graph.nodes if n.op == "call_module"]
    return [(n.target, n.meta["tensor_meta"].shape) for n in calls]


@idiom
def insert_a_relu(ao: Any) -> Any:
    q = converted(ao)
    [node] = [n for n in q.graph.nodes if n.target == "side"]
    with q.graph.inserting_after(node):
        relu = q.graph.call_function(torch.relu, (node,))
    node.replace_all_uses_with(relu, delete_user_cb=lambda user: user is not relu)
    q.graph.lint()
    q.recompile()
    return q(X)


@idiom
def erase_a_node(ao: Any) -> Any:
    q = converted(ao)
    [add] = [n for n in q.graph.nodes if n.target is torch.ops.quantized.add]
    add.replace_all_uses_with(add.args[0])
    q.graph.erase_node(add)
    q.graph.lint()
    q.recompile()
    return q(X)


@idiom
def replace_a_child(ao: Any) -> Any:
    q = converted(ao)
    q.side = nn.Identity()
    return q(X)


@idiom
def add_a_child_and_call_it(ao: Any) -> Any:
    q = converted(ao)
    q.add_submodule("last", nn.Softmax(1))
    [output] = [n for n in q.graph.nodes if n.op == "output"]
    with q.graph.inserting_before(output):
        output.args = (q.graph.call_module("last", output.args),)
    q.recompile()
    return q(X)


@idiom
def delete_unused_children(ao: Any) -> Any:
    q = converted(ao)
    q.add_submodule("nobody", nn.ReLU())
    q.delete_all_unused_submodules()
    return hasattr(q, "nobody"), hasattr(q, "conv"), q(X)


@idiom
def edit_what_is_prepared(ao: Any) -> Any:
    made = prepared(ao)
    names = [n.target for n in made.graph.nodes if "activation_post_process" in str(n.target)]
    return names, [type(made.get_submodule(n)).__name__ for n in names]


@idiom
def a_part_of_a_model(ao: Any) -> Any:
    q = nn.Sequential(converted(ao), nn.Softmax(1))
    return q(X), [k for k, _ in q.named_modules() if "_packed_params" not in k]


@idiom
def trace_of_the_source(ao: Any) -> Any:
    q = converted(ao)
    return [
        n.target for n in q.graph.nodes if n.op == "call_module" and "nn_module_stack" in n.meta
    ]


# hooks


@idiom
def hook_of_a_child(ao: Any) -> Any:
    q, seen = converted(ao), []
    handle = q.conv.register_forward_hook(lambda m, a, y: seen.append((y.q_scale(), y.shape)))
    first = q(X)
    handle.remove()
    return first, q(X), seen


@idiom
def hook_that_replaces_a_result(ao: Any) -> Any:
    q = converted(ao)
    ones = torch.quantize_per_tensor(torch.ones(2, 4), 0.5, 0, torch.quint8)
    q.fc.register_forward_hook(lambda m, a, y: ones)
    return q(X)


@idiom
def hook_before_a_child(ao: Any) -> Any:
    q, seen = converted(ao), []
    q.fc.register_forward_pre_hook(lambda m, args: seen.append(args[0].int_repr()))
    return q(X), seen


@idiom
def hook_of_the_model(ao: Any) -> Any:
    q, seen = converted(ao), []
    q.register_forward_hook(lambda m, args, y: seen.append(y.shape))
    return q(X), seen


# copies and checkpoints


@idiom
def deep_copy(ao: Any) -> Any:
    q = converted(ao)
    return copy.deepcopy(q)(X), torch.equal(copy.deepcopy(q)(X), q(X))


@idiom
def pickled(ao: Any) -> Any:
    q = converted(ao)
    again = pickle.loads(pickle.dumps(q))
    return again(X)


@idiom
def save_the_whole_model(ao: Any) -> Any:
    file = io.BytesIO()
    torch.save(converted(ao), file)
    file.seek(0)
    return torch.load(file, weights_only=False)(X)


@idiom
def keys_of_the_state(ao: Any) -> Any:
    q = converted(ao)
    keys = [k for k in q.state_dict() if not k.endswith(("weight_scale", "weight_zero_point"))]
    packed = {"fc._packed_params._packed_params": ("fc.weight", "fc.bias")}
    spread = [name for k in keys for name in packed.get(k, (k,))]
    return sorted(k for k in spread if k != "fc._packed_params.dtype")


@idiom
def state_through_a_file(ao: Any) -> Any:
    q, file = converted(ao), io.BytesIO()
    torch.save(q.state_dict(), file)
    file.seek(0)
    again = converted(ao)
    again.load_state_dict(torch.load(file, weights_only=False))
    return torch.equal(again(X), q(X))


@idiom
def state_into_an_uncalibrated_model(ao: Any) -> Any:
    q = converted(ao)
    mapping = requested(ao)
    other = net()
    nn.init.ones_(other.fc.weight)
    made = ao.quantization.quantize_fx.prepare_fx(other, mapping, (X,))
    fresh = ao.quantization.quantize_fx.convert_fx(made)
    fresh.load_state_dict(q.state_dict())
    return torch.equal(fresh(X), q(X)), fresh.fc.scale, fresh.conv.weight().int_repr()


@idiom
def state_of_what_is_prepared(ao: Any) -> Any:
    made = prepared(ao)
    mapping = requested(ao)
    fresh = ao.quantization.quantize_fx.prepare_fx(net(), mapping, (X,))
    fresh.load_state_dict(made.state_dict())
    return ao.quantization.quantize_fx.convert_fx(fresh)(X), [
        key for key in sorted(made.state_dict()) if key.endswith(("_val", "eps", "weight", "bias"))
    ]


@idiom
def parameters_and_buffers(ao: Any) -> Any:
    q = converted(ao)
    return [k for k, _ in q.named_parameters()], "conv_input_scale_0" in dict(q.named_buffers())


# observers


@idiom
def qparams_of_an_observer(ao: Any) -> Any:
    return prepared(ao).activation_post_process_0.calculate_qparams()


@idiom
def extremes_of_an_observer(ao: Any) -> Any:
    observer = prepared(ao).activation_post_process_0
    return observer.min_val, observer.max_val


@idiom
def histogram_of_an_observer(ao: Any) -> Any:
    mapping = ao.quantization.get_default_qconfig_mapping("fbgemm")
    observer = prepared(ao, mapping).activation_post_process_0
    return observer.histogram.sum(), observer.histogram.shape, observer.bins


@idiom
def observers_off_and_on(ao: Any) -> Any:
    made = trained(ao)
    made.apply(ao.quantization.disable_observer)
    before = made.activation_post_process_0.scale.clone()
    made.eval()(5 * X)
    same = torch.equal(before, made.activation_post_process_0.scale)
    made.apply(ao.quantization.enable_observer)
    made(5 * X)
    return same, torch.equal(before, made.activation_post_process_0.scale)


@idiom
def fake_quantization_off_and_on(ao: Any) -> Any:
    made = trained(ao).eval()
    made.apply(ao.quantization.disable_observer)
    quantized = made(X)
    made.apply(ao.quantization.disable_fake_quant)
    plain = made(X)
    made.apply(ao.quantization.enable_fake_quant)
    return torch.equal(quantized, plain), torch.equal(quantized, made(X))


@idiom
def freeze_batch_norm(ao: Any) -> Any:
    made = trained(ao).train()
    made.apply(ao.nn.intrinsic.qat.freeze_bn_stats)
    before = made.conv.bn.running_mean.clone()
    made(X + 3)
    return torch.equal(before, made.conv.bn.running_mean)


@idiom
def train_then_convert(ao: Any) -> Any:
    made = trained(ao)
    return targets(ao.quantization.quantize_fx.convert_fx(made.eval()))


@idiom
def weight_fake_quantizer(ao: Any) -> Any:
    made = trained(ao)
    return made.conv.weight_fake_quant.scale.shape, type(made.conv).__name__, type(made.fc).__name__


@idiom
def an_observer_of_the_user(ao: Any) -> Any:
    class Widest(ao.quantization.MinMaxObserver):  # type: ignore[misc, name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(torch.tensor([-9.0, 9.0]))
            return super().forward(x)

    widest = Widest.with_args(dtype=torch.quint8, quant_min=0, quant_max=127)
    qconfig = ao.quantization.QConfig(widest, ao.quantization.default_per_channel_weight_observer)
    return converted(ao, ao.quantization.QConfigMapping().set_global(qconfig)).conv_input_scale_0


# what is asked for


@idiom
def request_by_name(ao: Any) -> Any:
    mapping = requested(ao).set_module_name("fc", None)
    q = converted(ao, mapping)
    return type(q.fc).__name__, type(q.fc) is nn.Linear, q(X)


@idiom
def request_by_regex(ao: Any) -> Any:
    mapping = requested(ao).set_module_name_regex("s.*", None)  # fmt: skip
    q = converted(ao, mapping)
    return type(q.side) is nn.Conv2d, type(q.conv).__name__, q(X)


@idiom
def request_by_type(ao: Any) -> Any:
    q = converted(ao, ao.quantization.QConfigMapping().set_object_type(nn.Linear, by_extremes(ao)))
    return targets(q), q(X)


@idiom
def attributes_kept(ao: Any) -> Any:
    config = ao.quantization.fx.custom_config
    prepare = config.PrepareCustomConfig().set_preserved_attributes(["classes"])
    made = prepared(ao, prepare_custom_config=prepare)
    convert = config.ConvertCustomConfig().set_preserved_attributes(["classes"])
    q = ao.quantization.quantize_fx.convert_fx(made, convert_custom_config=convert)
    return made.classes, q.classes, copy.deepcopy(q).classes


@idiom
def modules_not_traced(ao: Any) -> Any:
    config = ao.quantization.fx.custom_config.PrepareCustomConfig()
    config.set_non_traceable_module_names(["inner"])
    torch.manual_seed(0)
    model, x = Holding().eval(), torch.randn(2, 4)
    mapping = requested(ao)
    made = ao.quantization.quantize_fx.prepare_fx(
        model, mapping, (x,), prepare_custom_config=config
    )
    made(x)
    q = ao.quantization.quantize_fx.convert_fx(made)
    return type(q.first).__name__, type(q.inner).__name__, type(q.inner.fc) is nn.Linear, q(x)


@idiom
def fuse_only(ao: Any) -> Any:
    fused = ao.quantization.quantize_fx.fuse_fx(net())
    return type(fused.conv) is ao.nn.intrinsic.ConvReLU2d, fused(X)


@idiom
def reference_model(ao: Any) -> Any:
    reference = ao.quantization.quantize_fx.convert_to_reference_fx(prepared(ao))
    return targets(reference), reference(X), reference.fc.weight.shape


# modules


@idiom
def modes(ao: Any) -> Any:
    q = converted(ao)
    return q.train()(X), q.eval()(X), q.eval().training


@idiom
def to_the_cpu(ao: Any) -> Any:
    return converted(ao).to("cpu")(X), converted(ao).cpu()(X)


@idiom
def without_gradients(ao: Any) -> Any:
    q = converted(ao)
    for parameter in q.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        return q(X), q(X).requires_grad


@idiom
def channels_last(ao: Any) -> Any:
    q = converted(ao).to(memory_format=torch.channels_last)
    return q(X.to(memory_format=torch.channels_last))


@idiom
def apply_to_modules(ao: Any) -> Any:
    seen: list[str] = []
    converted(ao).apply(lambda m: seen.append(type(m).__name__))
    return [name for name in seen if name.startswith(("Conv", "Linear")) and "Packed" not in name]


@idiom
def other_batches(ao: Any) -> Any:
    q = converted(ao)
    return q(X[:1]), q(torch.cat([X, X]))


@idiom
def named_children(ao: Any) -> Any:
    return [name for name, _ in converted(ao).named_children()]


@idiom
def size_of_the_file(ao: Any) -> Any:
    file = io.BytesIO()
    torch.save(converted(ao).state_dict(), file)
    return file.tell() < 16_000


def _same(theirs: Any, ours: Any) -> None:
    if isinstance(theirs, torch.Tensor):
        assert (
            ours.shape == theirs.shape
            and ours.dtype.is_floating_point == theirs.dtype.is_floating_point
        )
        step = 0.02 if theirs.is_floating_point() else 1
        assert (theirs.double() - ours.double()).abs().max() <= step
    elif isinstance(theirs, (tuple, list)) and not isinstance(theirs, torch.Size):
        assert len(theirs) == len(ours)
        for one, other in zip(theirs, ours, strict=True):
            _same(one, other)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-6)
    else:
        assert ours == theirs


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    yield
    torch.backends.quantized.engine = before


# torch 2.13 fails at these itself
ALONE = ("pickled", "save_the_whole_model")


@pytest.mark.parametrize("name", [name for name in IDIOMS if name not in ALONE])
def test_the_prefix_is_all_that_changes(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _same(IDIOMS[name](torch.ao), IDIOMS[name](backquant.ao))


@pytest.mark.parametrize("name", ALONE)
def test_what_torch_fails_at(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(AttributeError, match="no attribute '__name__'"):
            IDIOMS[name](torch.ao)
        _same(converted(torch.ao)(X), IDIOMS[name](backquant.ao))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (torch.jit.script, "a quantized model has no TorchScript"),
        (lambda q: torch.jit.trace(q, X), "runs on data, and is not traced"),
        (fx.symbolic_trace, "runs on data, and is not traced"),
        (lambda q: torch.export.export(q, (X,)), "kernels are not exported"),
        (lambda q: q(X.double()), "float64 values where the model quantizes float32"),
        (lambda q: q(X.to("meta")), "an input is on meta"),
    ],
)
def test_what_is_refused_says_what_to_do(call: Callable[[Any], Any], message: str) -> None:
    q = converted(backquant.ao)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        with pytest.raises(BackquantError, match=message) as caught:
            call(q)
    assert "fix" in str(caught.value)


def test_compiled() -> None:
    """``torch.compile`` runs the kernels as they are."""
    q = converted(backquant.ao)
    assert torch.equal(torch.compile(q, backend="eager")(X), q(X))


def test_the_table_is_long() -> None:
    assert len(IDIOMS) >= 26
