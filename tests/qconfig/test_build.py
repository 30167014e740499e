from __future__ import annotations

import pytest
import torch

from backquant.backend_config import BackendConfig, BackendDefaults, DefaultOverride, QuantDefault
from backquant.backend_config.defaults import FAKE_QUANTIZES, OBSERVERS
from backquant.errors import ConfigError, SpecError
from backquant.observe import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    NoopObserver,
)
from backquant.qconfig.build import observer_factory, ptq_qconfig, qat_qconfig


@pytest.mark.parametrize("name", OBSERVERS)
def test_every_observer_that_a_description_can_name_is_made(name: str) -> None:
    made = observer_factory(QuantDefault(name))()
    assert type(made).__name__.lower().startswith(name.replace("_", ""))


@pytest.mark.parametrize("name", FAKE_QUANTIZES)
def test_every_fake_quantizer_that_a_description_can_name_is_made(name: str) -> None:
    default = QuantDefault("moving_average_minmax", quant_min=0, quant_max=127, fake_quantize=name)
    made = observer_factory(default)()
    assert type(made.activation_post_process).__name__ == "MovingAverageMinMaxObserver"
    assert made.quant_max == 127


def test_options_reach_the_observer() -> None:
    default = QuantDefault("minmax", dtype=torch.qint8, quant_min=-127, quant_max=127, eps=0.5)
    observer = observer_factory(default)()
    assert (observer.dtype, observer.quant_min, observer.eps.item()) == (torch.qint8, -127, 0.5)


def test_an_override_falls_back_on_the_backend_role_by_role() -> None:
    fused = QuantDefault("moving_average_minmax", fake_quantize="fused_moving_average")
    defaults = BackendDefaults(QuantDefault("histogram"), QuantDefault("minmax"), fused, fused)
    override = DefaultOverride(("reshape",), weight=QuantDefault("noop"))
    qconfig = ptq_qconfig(defaults, override)
    assert (qconfig.activation, qconfig.weight) == (HistogramObserver, NoopObserver)
    trained = qat_qconfig(defaults, override)
    assert trained.weight == qat_qconfig(defaults).weight
    assert ptq_qconfig(defaults).weight is MinMaxObserver


def test_no_defaults_for_training_are_refused() -> None:
    defaults = BackendDefaults(QuantDefault("histogram"), QuantDefault("minmax"))
    with pytest.raises(ConfigError, match="no defaults for training"):
        qat_qconfig(defaults)


def test_observers_are_named_by_their_import_path(tmp_path) -> None:
    path = tmp_path / "b.yaml"
    path.write_text(
        "schema_version: 1\nname: b\ndefaults:\n"
        "  activation: {observer: backquant.observe.MovingAverageMinMaxObserver, dtype: qint8, eps: 0.5}\n"
        "  weight: {observer: minmax, dtype: qint8}\n"
    )
    config = BackendConfig.load(path)
    made = ptq_qconfig(config.defaults).activation()
    assert type(made) is MovingAverageMinMaxObserver and float(made.eps) == 0.5
    config.save(tmp_path / "again.yaml")
    assert BackendConfig.load(tmp_path / "again.yaml") == config
    path.write_text(path.read_text().replace("MovingAverageMinMax", "MovingAvrageMinMax"))
    with pytest.raises(SpecError, match="MovingAverageMinMaxObserver") as caught:
        BackendConfig.load(path)
    assert "b.yaml:4" in str(caught.value)
