from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as ao

from backquant import observe
from backquant.errors import CalibrationError, ConfigError
from backquant.observe import ObserverBase, UniformQuantizationObserverBase

MEASURING = [
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "PerChannelMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "HistogramObserver",
]
CLASSES = [
    *MEASURING,
    "ObserverBase",
    "UniformQuantizationObserverBase",
    "FixedQParamsObserver",
    "PlaceholderObserver",
    "RecordingObserver",
    "NoopObserver",
    "ReuseInputObserver",
    "FakeQuantizeBase",
    "FakeQuantize",
    "FixedQParamsFakeQuantize",
    "FusedMovingAvgObsFakeQuantize",
]


@pytest.mark.parametrize("name", CLASSES)
def test_constructor_signature_equals_the_oracle(name: str) -> None:
    theirs = inspect.signature(
        getattr(ao.fake_quantize if "FakeQuantize" in name else ao.observer, name).__init__
    )
    ours = inspect.signature(getattr(observe, name).__init__)
    shapes = [
        [(p.name, getattr(p.default, "__name__", p.default), p.kind) for p in s.parameters.values()]
        for s in (ours, theirs)
    ]
    more = {"PlaceholderObserver": 1}.get(name, 0)  # granularity, by keyword only
    assert shapes[0][: len(shapes[0]) - more] == shapes[1]
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, _, kind in shapes[0][-more:] if more)


@pytest.mark.parametrize("name", MEASURING)
def test_attributes_are_the_oracles(name: str, oracle: Callable[..., Any]) -> None:
    ours, theirs = getattr(observe, name)(), oracle(name)
    ignored = {"upsample_rate", "dst_nbins"}  # of the oracle's own histogram
    for key, value in vars(theirs).items():
        if not key.startswith("_") and key not in ignored:
            assert getattr(ours, key) == value, key
    buffers = dict(theirs.named_buffers())
    buffers.pop("histogram", None)
    for key, value in buffers.items():
        mine = getattr(ours, key)
        assert (mine.dtype, mine.shape) == (value.dtype, value.shape)
        assert torch.equal(mine, value)


@pytest.mark.parametrize("name", MEASURING)
def test_bad_settings_are_refused(name: str) -> None:
    cls = getattr(observe, name)
    with pytest.raises(ConfigError, match=r"cannot measure for torch\.float32"):
        cls(dtype=torch.float32)
    with pytest.raises(ConfigError, match="must include 0"):
        cls(quant_min=1, quant_max=7)
    with pytest.raises(ConfigError, match="less than"):
        cls(quant_min=0, quant_max=0)
    wrong = torch.per_tensor_affine if "PerChannel" in name else torch.per_channel_affine
    with pytest.raises(ConfigError, match="requested with"):
        cls(qscheme=wrong)
    with pytest.raises(TypeError):
        cls(unknown=1)


@pytest.mark.parametrize("name", MEASURING)
def test_before_any_data_one_and_zero_with_a_warning(
    name: str, oracle: Callable[..., Any], quietly: Callable[..., Any]
) -> None:
    observer = getattr(observe, name)()
    with pytest.warns(UserWarning, match=f"{name} saw no data"):
        found = observer.calculate_qparams()
    expected = quietly(oracle(name).calculate_qparams)
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", MEASURING)
def test_copies_pickles_and_state_dicts_keep_the_state(name: str, tmp_path: Any) -> None:
    cls = getattr(observe, name)
    observer = cls(dtype=torch.qint8)
    observer(torch.randn(4, 8))
    expected = observer.calculate_qparams()
    torch.save(observer.state_dict(), tmp_path / "state.pt")
    loaded = cls(dtype=torch.qint8)
    result = loaded.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert not result.missing_keys
    assert not result.unexpected_keys
    used = cls(dtype=torch.qint8)
    used(torch.randn(6, 8))
    used.load_state_dict(observer.state_dict())
    for other in (copy.deepcopy(observer), pickle.loads(pickle.dumps(observer)), loaded, used):
        assert all(map(torch.equal, other.calculate_qparams(), expected))
        more = torch.randn(4, 8) * 3
        again = copy.deepcopy(observer)
        again(more), other(more)
        assert all(map(torch.equal, other.calculate_qparams(), again.calculate_qparams()))
    assert all(map(torch.equal, observer.calculate_qparams(), expected))


@pytest.mark.parametrize("name", MEASURING)
def test_state_dicts_are_interchangeable_with_the_oracle(
    name: str, oracle: Callable[..., Any]
) -> None:
    theirs, ours = oracle(name), getattr(observe, name)()
    theirs(torch.randn(4, 8))
    ours.load_state_dict(theirs.state_dict())
    assert all(map(torch.equal, ours.calculate_qparams(), theirs.calculate_qparams()))


def test_nothing_is_added_to_a_histogram_of_the_oracle(oracle: Callable[..., Any]) -> None:
    theirs, ours = oracle("HistogramObserver"), observe.HistogramObserver()
    theirs(torch.randn(10))
    ours.load_state_dict(theirs.state_dict())
    for use in (lambda: ours(torch.randn(3)), lambda: observe.HistogramObserver().merge(ours)):
        with pytest.raises(CalibrationError, match=r"measured by torch\.ao"):
            use()
    again = observe.HistogramObserver()
    again.load_state_dict(ours.state_dict())
    assert all(map(torch.equal, again.calculate_qparams(), theirs.calculate_qparams()))
    ours.reset_min_max_vals()
    ours(torch.tensor([0.0, 2.55]))
    assert round(ours.calculate_qparams()[0].item(), 4) == 0.01


def test_states_of_older_versions_load() -> None:
    observer = observe.PerChannelMinMaxObserver()
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    state.update(min_vals=torch.zeros(3), max_vals=torch.ones(3))
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    observer.load_state_dict(state)
    assert observer.max_val.tolist() == [1.0, 1.0, 1.0]
    assert observer.eps.item() == torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", MEASURING)
def test_forward_returns_its_input_and_keeps_no_graph(name: str) -> None:
    observer = getattr(observe, name)()
    x = torch.randn(3, 4, requires_grad=True)
    assert observer(x) is x
    assert not any(b.requires_grad for b in observer.buffers())


@pytest.mark.parametrize("name", MEASURING)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_other_input_dtypes_equal_the_oracle(
    name: str, dtype: torch.dtype, oracle: Callable[..., Any]
) -> None:
    x = (torch.randn(3, 64) * 10).to(dtype)
    observer = getattr(observe, name)()
    observer(x)
    reference = getattr(observe, name)()
    reference(x.float())
    assert all(map(torch.equal, observer.calculate_qparams(), reference.calculate_qparams()))
    assert observer.calculate_qparams()[0].dtype == torch.float32


@pytest.mark.parametrize("name", MEASURING)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_leave_the_state_intact(name: str, bad: float) -> None:
    clean, dirty = getattr(observe, name)(), getattr(observe, name)()
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    spoiled = torch.cat((second, torch.full((3, 2), bad)), 1)
    clean(first), clean(second)
    dirty(torch.empty(0, 4)), dirty(first)
    dirty(spoiled)
    dirty(torch.full((3, 4), bad))
    assert (clean.ignored, dirty.ignored) == (0, 6 + 12)
    assert all(map(torch.equal, clean.calculate_qparams(), dirty.calculate_qparams()))


@pytest.mark.parametrize(
    "name", ["PerChannelMinMaxObserver", "HistogramObserver", "MinMaxObserver"]
)
def test_only_bad_values_at_first_then_good_ones(name: str) -> None:
    clean, dirty = getattr(observe, name)(), getattr(observe, name)()
    good = torch.randn(3, 4)
    dirty(torch.full((3, 4), float("nan")))
    clean(good), dirty(good)
    assert dirty.ignored == 12
    assert all(map(torch.equal, clean.calculate_qparams(), dirty.calculate_qparams()))


@pytest.mark.parametrize("name", MEASURING)
def test_forgetting(name: str) -> None:
    observer = getattr(observe, name)()
    observer(torch.randn(3, 4))
    observer.reset_min_max_vals()
    with pytest.warns(UserWarning, match="saw no data"):
        observer.calculate_qparams()
    observer(torch.ones(3, 4))
    assert torch.equal(observer.max_val, torch.ones_like(observer.max_val))


def test_merging_different_settings_is_refused() -> None:
    one = observe.MinMaxObserver()
    with pytest.raises(ConfigError, match="configured differently") as caught:
        one.merge(observe.MinMaxObserver(dtype=torch.qint8))
    assert "torch.quint8 and torch.qint8" in caught.value.where
    with pytest.raises(ConfigError, match="HistogramObserver"):
        one.merge(observe.HistogramObserver())
    with pytest.raises(ConfigError, match="eps"):
        one.merge(observe.MinMaxObserver(eps=0.5))


class Custom(UniformQuantizationObserverBase):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._calculate_qparams(torch.tensor(-1.0), torch.tensor(1.0))


def test_a_users_subclass_works_and_merges_only_if_it_says_how() -> None:
    custom = Custom(dtype=torch.qint8)
    assert isinstance(custom, ObserverBase)
    assert custom.calculate_qparams()[0].item() == pytest.approx(2 / 255)
    with pytest.raises(ConfigError, match="does not define how to merge"):
        custom.merge(Custom(dtype=torch.qint8))
    with pytest.raises(ConfigError, match="cannot forget"):
        custom.reset_min_max_vals()


def test_the_bases_are_abstract() -> None:
    with pytest.raises(TypeError):
        ObserverBase(torch.quint8)  # type: ignore[abstract]
