"""What ``prepare_qat_fx`` gives, refuses, warns of, and leaves alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.ao.quantization as tq
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

import backquant
from backquant.errors import CaptureError, ConfigError
from backquant.match import Outcome
from backquant.nn import qat as nnqat
from backquant.nn.intrinsic import qat as nniqat
from backquant.prepare import prepared_state

pytestmark = pytest.mark.filterwarnings("error")


def _kinds(prepared):
    return {name: type(module) for name, module in prepared.named_children()}


def test_the_model_is_not_changed(qat, model_name, unchanged):
    model, shape = qat.model(model_name)
    with unchanged(model):
        prepared = qat.ours(model, torch.randn(shape))
        qat.train(prepared, shape, range(3))
        backquant.convert_fx(prepared)(torch.randn(shape))


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_shared_with_the_model(qat, training):
    model, shape = qat.model("residual")
    prepared = qat.ours(model.train(training), torch.randn(shape))
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    copies = {t.untyped_storage().data_ptr() for t in (*prepared.parameters(), *prepared.buffers())}
    assert own.isdisjoint(copies)


def test_tied_weights_stay_tied(qat):
    model, shape = qat.model("tied")
    prepared = qat.ours(model, torch.randn(shape))
    assert prepared.get_submodule("first").weight is prepared.get_submodule("second").weight
    qat.train(prepared, shape, range(2))
    assert prepared.get_submodule("first").weight is prepared.get_submodule("second").weight
    reference = backquant.convert_to_reference_fx(prepared)
    one, two = (reference.get_submodule(name).weight for name in ("first", "second"))
    assert torch.equal(one, two)
    assert isinstance(prepared.get_submodule("conv"), nnqat.Conv2d)  # called twice, swapped once


def test_attributes_of_parameters_are_kept(qat):
    """Optimizers are often set up by them."""
    model, shape = qat.model("perceptron")
    model.layers[0].weight.no_decay = True
    model.layers[3].bias.requires_grad_(False)
    prepared = qat.ours(model, torch.randn(shape))
    assert prepared.get_submodule("layers.0").weight.no_decay
    assert not prepared.get_submodule("layers.3").bias.requires_grad


def test_modules_for_training(qat):
    model, shape = qat.model("residual")
    prepared = qat.ours(model, torch.randn(shape))
    assert type(prepared.get_submodule("stem.0")) is nniqat.ConvBnReLU2d
    assert type(prepared.get_submodule("second.0")) is nniqat.ConvBn2d
    assert type(prepared.get_submodule("fc")) is nnqat.Linear


def test_an_evaluation_mode_model_is_accepted_as_by_torch(qat):
    """PyTorch's QAT modules then are in training mode in a model in evaluation mode; ours are not."""
    model, shape = qat.model("residual")
    x = torch.randn(shape)
    ours, theirs = qat.ours(model.eval(), x), qat.theirs(model, x)
    assert ours.code == theirs.code
    assert not any(module.training for module in ours.modules())
    assert theirs.get_submodule("stem.0").training
    qat.train_both(ours.train(), theirs.train(), shape, steps=5)


def test_a_batch_of_one_is_no_error_in_training_mode(qat):
    model, _ = qat.model("perceptron")
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.randn(1, 6))
    qat.ours(model, torch.randn(1, 6))


def test_hyper_parameters_survive_training_and_evaluation(qat):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.bn = nn.BatchNorm2d(4, eps=0.25, momentum=0.75)
            self.drop = nn.Dropout(0.125, inplace=True)
            self.alone = nn.BatchNorm2d(4, eps=0.5, momentum=None)

        def forward(self, x):
            return self.alone(torch.sin(self.drop(self.bn(self.conv(x)))))

    prepared = qat.ours(Net(), torch.randn(2, 3, 4, 4))
    for mode in (False, True, False):
        prepared.train(mode)
        prepared(torch.randn(2, 3, 4, 4))
        fused = prepared.get_submodule("conv").bn
        assert (fused.eps, fused.momentum, fused.training) == (0.25, 0.75, mode)
        drop, alone = prepared.get_submodule("drop"), prepared.get_submodule("alone")
        assert (drop.p, drop.inplace, drop.training) == (0.125, True, mode)
        assert (alone.eps, alone.momentum, alone.training) == (0.5, None, mode)


def test_no_warning_where_all_is_quantized(qat, model_name):
    model, shape = qat.model(model_name)
    qat.ours(model, torch.randn(shape))


def test_one_warning_lists_what_stays_float_and_why():
    narrow = backquant.FakeQuantize.with_args(
        observer=backquant.MovingAverageMinMaxObserver, dtype=torch.qint8
    )
    mapping = backquant.QConfigMapping().set_global(backquant.QConfig(narrow, narrow))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.warns(UserWarning) as caught:
        backquant.prepare_qat_fx(
            model,
            mapping,
            torch.zeros(2, 4),
            backend_config=backquant.backend_config.get_x86_backend_config(),
        )
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "2 operators stay float on x86" in text
    assert "qint8" in text and "quint8" in text
    assert caught[0].filename == __file__


def test_observers_in_place_of_fake_quantize_are_pointed_out(qat):
    model, shape = qat.model("perceptron")
    mapping = backquant.get_default_qconfig_mapping("x86")  # for calibration
    with pytest.warns(UserWarning, match="train without rounding") as caught:
        prepared = qat.ours(model, torch.randn(shape), mapping=mapping)
    [warning] = caught
    text = str(warning.message)
    assert "layers.0, layers.3, layers.5" in text
    assert "get_default_qat_qconfig_mapping('x86')" in text
    qat.train(prepared, shape, range(2))


def test_skipped_modules_stay_float_modules(qat):
    model, shape = qat.model("residual")
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    mapping.set_module_name("fc", None).set_module_name("second", None)
    prepared = qat.ours(model, torch.randn(shape), mapping=mapping)
    decisions = prepared_state(prepared).plan.decisions
    assert decisions["fc"].outcome is Outcome.FLOAT
    assert type(prepared.get_submodule("fc")) is nn.Linear
    assert [type(m) for m in prepared.get_submodule("second.0")] == [nn.Conv2d, nn.BatchNorm2d]
    qat.train(prepared, shape, range(2))
    assert torch.isfinite(backquant.convert_fx(prepared)(torch.randn(shape))).all()


def test_rules_for_float_classes_apply_to_their_qat_modules(qat):
    coarse = backquant.QConfig(
        backquant.observe.default_fake_quant,
        backquant.FakeQuantize.with_args(
            observer=backquant.MovingAverageMinMaxObserver,
            quant_min=-8,
            quant_max=7,
            dtype=torch.qint8,
            qscheme=torch.per_tensor_symmetric,
        ),
    )
    mapping = backquant.get_default_qat_qconfig_mapping("x86").set_object_type(nn.Linear, coarse)
    model, shape = qat.model("perceptron")
    prepared = qat.ours(model, torch.randn(shape), mapping=mapping)
    for path in ("layers.0", "layers.3", "layers.5"):  # with batch norm, with ReLU, with neither
        assert prepared.get_submodule(path).weight_fake_quant.quant_max == 7


def test_preserved_attributes_and_untraced_modules(qat):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x) if x.sum() > 0 else x

    model = nn.Sequential(nn.Linear(4, 4), Branching())
    model.classes = ["cat", "dog"]
    custom = backquant.PrepareCustomConfig().set_preserved_attributes(["classes"])
    custom.set_non_traceable_module_names(["1"])
    prepared = backquant.prepare_qat_fx(
        model, backquant.get_default_qat_qconfig_mapping("x86"), torch.zeros(2, 4), custom
    )
    assert prepared.classes == ["cat", "dog"]
    assert type(prepared.get_submodule("1").fc) is nn.Linear
    qat.train(prepared, (2, 4), range(2))
    assert torch.equal(model[1].fc.weight, copy.deepcopy(model)[1].fc.weight)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.bn = nn.BatchNorm2d(3)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)))


def test_standalone_modules_train_fused_too(qat, unchanged):
    """PyTorch swaps modules before it comes to fuse a standalone one, and leaves its batch norm out."""
    model, shape = nn.Sequential(nn.Conv2d(3, 3, 1), Inner(), nn.Conv2d(3, 2, 1)), (4, 3, 6, 6)
    custom = backquant.PrepareCustomConfig().set_standalone_module_name("1", None, (), None, None)
    with unchanged(model):
        prepared = backquant.prepare_qat_fx(
            model,
            backquant.get_default_qat_qconfig_mapping("x86"),
            torch.randn(shape),
            custom,
            backend_config=backquant.backend_config.get_x86_backend_config(),
        )
        assert type(prepared.get_submodule("1.conv")) is nniqat.ConvBnReLU2d
        qat.train(prepared, shape, range(20))
        prepared.apply(backquant.disable_observer).eval()
        x = torch.randn(shape)
        reference = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
        with torch.no_grad():
            expected, lowered = reference(x), backquant.convert_fx(prepared)(x)
    assert type(reference.get_submodule("1.conv")[0]).__name__ == "Conv2d"
    scale = reference.graph.output_node().args[0].args[1]
    assert (lowered - expected).abs().max() <= 1.001 * scale


def test_dict_forms_are_accepted():
    mapping = {"": backquant.get_default_qat_qconfig("x86")}
    backend = backquant.backend_config.get_x86_backend_config().to_dict()
    prepared = backquant.prepare_qat_fx(
        nn.Sequential(nn.Linear(4, 4)), mapping, (torch.zeros(2, 4),), {}, backend
    )
    assert type(prepared.get_submodule("0")) is nnqat.Linear


def test_the_default_backend_is_native():
    prepared = backquant.prepare_qat_fx(
        nn.Sequential(nn.Linear(4, 4)),
        backquant.get_default_qat_qconfig_mapping("fbgemm"),
        {"input": torch.zeros(2, 4)},
    )
    assert prepared_state(prepared).backend_config.name == "native"


class TestRefusals:
    def prepare(self, model, x, backend="x86"):
        return backquant.prepare_qat_fx(
            model,
            backquant.get_default_qat_qconfig_mapping(backend),
            x,
            backend_config=backquant.get_backend_config(backend),
        )

    def test_what_cannot_be_traced(self):
        class Branching(nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x

        with pytest.raises(CaptureError, match="cannot be traced"):
            self.prepare(Branching(), torch.zeros(1))

    def test_inputs_that_do_not_fit_are_noted_as_pytorch_never_runs_them(self):
        with pytest.warns(UserWarning, match="shapes are unknown: the example inputs do not fit"):
            prepared = self.prepare(nn.Sequential(nn.Linear(4, 4)), torch.zeros(1, 3))
        assert prepared(torch.zeros(1, 4)).shape == (1, 4)

    def test_batch_norms_in_another_mode_than_their_convolution(self):
        model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3).eval())
        with pytest.raises(
            ConfigError, match=r"(?s)some are in training mode.*node '_0'"
        ) as caught:
            self.prepare(model, torch.zeros(2, 3, 4, 4))
        assert "model.train()" in caught.value.fix

    def test_a_qat_class_without_from_float(self):
        class Bare(nn.Linear):
            pass

        backend = backquant.backend_config.get_x86_backend_config()
        for config in backend.configs:
            if config.pattern is nn.Linear:
                config.set_qat_module(Bare)
        with pytest.raises(ConfigError, match=r"(?s)Bare has no from_float.*module '0'"):
            backquant.prepare_qat_fx(
                nn.Sequential(nn.Linear(4, 4)),
                backquant.get_default_qat_qconfig_mapping("x86"),
                torch.zeros(2, 4),
                backend_config=backend,
            )


class TestParametrizations:
    """Weights that are computed from others: their parts train."""

    def trained(self, qat, linear):
        model = nn.Sequential(linear, nn.ReLU(), nn.Linear(5, 2))
        prepared = qat.ours(model, torch.randn(4, 6))
        qat.train(prepared, (4, 6), range(10))
        return prepared.apply(backquant.disable_observer).eval()

    @pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
    def test_they_train_and_convert(self, qat, name):
        linear = getattr(parametrizations, name)(nn.Linear(6, 5))
        before = {key: value.clone() for key, value in linear.state_dict().items()}
        prepared = self.trained(qat, linear)
        assert any("parametrizations" in key for key, _ in prepared.named_parameters())
        assert all(torch.equal(linear.state_dict()[key], value) for key, value in before.items())
        reference = backquant.convert_to_reference_fx(prepared)
        weight = reference.get_submodule("0")[0].get_weight()
        trained = prepared.get_submodule("0")
        rounded = trained.weight_fake_quant(trained.weight)
        # As in PyTorch, the fused kernel trains with another scale: docs/qat.md.
        assert ((weight - rounded).abs() <= 1.01 * trained.weight_fake_quant.scale[:, None]).all()

    def test_weight_norm_trains_as_in_torch(self, qat):
        model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 5)), nn.ReLU())
        x = torch.randn(4, 6)
        qat.train_both(qat.ours(model, x), qat.theirs(model, x), (4, 6), steps=10)

    def test_with_batch_norm_where_torch_raises(self, qat):
        linear = parametrizations.weight_norm(nn.Linear(6, 5))
        model = nn.Sequential(linear, nn.BatchNorm1d(5))
        with pytest.raises(TypeError):
            qat.theirs(model, torch.randn(4, 6))
        prepared = qat.ours(model, torch.randn(4, 6))
        qat.train(prepared, (4, 6), range(3))
        assert type(backquant.convert_to_reference_fx(prepared).get_submodule("0")).__name__

    @pytest.mark.parametrize("how", ["prune", "weight_norm"])
    def test_a_weight_that_a_hook_computes_is_refused(self, qat, how):
        linear = nn.Linear(6, 5)
        if how == "prune":
            prune.l1_unstructured(linear, "weight", 0.5)
        else:
            with pytest.warns(FutureWarning, match="weight_norm` is deprecated"):
                weight_norm(linear)
        with pytest.raises(
            ConfigError, match=r"(?s)computed by a hook.*module '0'.*torch.nn.utils.*remove"
        ):
            qat.ours(nn.Sequential(linear), torch.randn(4, 6))


class TestBatchNormsWithoutModuleForTraining:
    """Behind a transposed convolution: trained as they are, folded at conversion; PyTorch raises."""

    def prepared(self, qat, dims, backend):
        convt = getattr(nn, f"ConvTranspose{dims}d")(3, 4, 3, 2)  # a height of 2 has no kernel
        model = nn.Sequential(convt, getattr(nn, f"BatchNorm{dims}d")(4), nn.Identity())
        return qat.ours(model, torch.randn(2, 3, *[4] * dims), backend)

    @pytest.mark.parametrize("dims", [1, 2, 3])
    def test_folded_at_conversion(self, qat, dims):
        shape = (2, 3, *[4] * dims)
        prepared = self.prepared(qat, dims, "x86")
        qat.train(prepared, shape, range(30))
        prepared.apply(backquant.disable_observer).eval()
        reference = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
        kinds = [type(m).__name__ for m in reference.modules()]
        assert f"ConvTranspose{dims}d" in kinds and f"BatchNorm{dims}d" not in kinds
        assert reference.get_submodule("0").weight.dtype == torch.int8
        x = torch.randn(shape)
        scale = reference.graph.output_node().args[0].args[1]
        with torch.no_grad():
            difference = (prepared(x) - reference(x)).abs().max()
            lowered = backquant.convert_fx(prepared)
            assert (lowered(x) - reference(x)).abs().max() <= 1.001 * scale
        # The weight was not rounded in training: a few steps of the output, of 128.
        assert 0 < difference < 4 * scale
        assert any("conv" in use.kernel for use in lowered.kernels)

    def test_torch_raises(self, qat):
        model = nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.BatchNorm2d(4))
        with pytest.raises(Exception, match="not yet supported in QAT"):
            qat.theirs(model, torch.randn(2, 3, 4, 4))

    def test_the_weight_has_the_qconfig_of_the_transposed_convolution(self, qat):
        prepared = self.prepared(qat, 2, "x86")
        qat.train(prepared, (2, 3, 4, 4), range(1))
        reference = backquant.convert_to_reference_fx(prepared)
        assert reference.get_submodule("0").weight_scale.numel() == 1

    def test_residual_blocks_on_onednn(self, qat):
        """Convolution, batch norm and addition are one operator for inference only."""
        model, shape = qat.model("residual")
        with pytest.raises(NotImplementedError, match="Cannot fuse train modules"):
            qat.theirs(model, torch.randn(shape), "onednn")
        prepared = qat.ours(model, torch.randn(shape), "onednn")
        assert type(prepared.get_submodule("second.0")) is nniqat.ConvBn2d
        qat.train(prepared, shape, range(10))
        prepared.apply(backquant.disable_observer).eval()
        x = torch.randn(shape)
        reference = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
        scale = reference.graph.output_node().args[0].args[1]
        with torch.no_grad():
            lowered = backquant.convert_fx(prepared)
            assert (lowered(x) - reference(x)).abs().max() <= 1.001 * scale

    def test_called_twice(self, qat):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.convt = nn.ConvTranspose2d(3, 3, 1)
                self.bn = nn.BatchNorm2d(3)

            def forward(self, x):
                return self.convt(torch.sin(self.bn(self.convt(x))))

        prepared = qat.ours(Twice(), torch.randn(2, 3, 4, 4))
        qat.train(prepared, (2, 3, 4, 4), range(20))
        prepared.apply(backquant.disable_observer).eval()
        x = torch.randn(2, 3, 4, 4)
        with torch.no_grad():
            difference = (prepared(x) - backquant.convert_to_reference_fx(prepared)(x)).abs().max()
        assert difference < 0.2


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.fc = nn.Linear(4, 2)

    def forward(self, index):
        return self.fc(self.table(index))


def test_embeddings_train_with_their_own_qconfig(qat):
    mappings = []
    for package in (backquant.qconfig, tq):
        mapping = package.get_default_qat_qconfig_mapping("x86")
        mappings.append(
            mapping.set_object_type(nn.Embedding, package.default_embedding_qat_qconfig)
        )
    model, index = Embedded(), torch.tensor([1, 3])
    ours = qat.ours(model, index, mapping=mappings[0])
    theirs = qat.theirs(model, index, mapping=mappings[1])
    assert type(ours.get_submodule("table")) is nnqat.Embedding
    assert ours.code == theirs.code
    for step in range(10):
        for prepared in (ours, theirs):
            torch.manual_seed(step)
            prepared.zero_grad()
            prepared(torch.randint(0, 10, (5,))).sum().backward()
            with torch.no_grad():
                for parameter in prepared.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
    qat.equal_states(ours, theirs)
    expected = qat.torch_converts(theirs, "quantized_tensor")(index)
    assert torch.equal(backquant.convert_to_reference_fx(ours)(index), expected)
