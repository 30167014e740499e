"""Other forms of a generated model: saved and loaded, in integers only, compiled."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._inductor import config as inductor_config

import backquant
from backquant.artifact import store
from backquant.errors import EngineError
from backquant.lower.kernels.integer.normalized import IntegerBatchNorm, IntegerNorm
from backquant.lower.kernels.integer.weighted import IntegerWeighted
from backquant.lower.qdq import is_quantize
from backquant.runtime import QuantizedModel

__all__ = ["as_compiled", "as_loaded", "cuts_a_bias", "dithered", "in_integers", "ratio"]


def as_loaded(model: QuantizedModel) -> QuantizedModel:
    """``model``, saved and read back."""
    with _one_description(), tempfile.TemporaryDirectory(dir=_memory()) as folder:
        path = Path(folder) / "model.bq"
        backquant.save(model, path)
        return backquant.load(path)


_written: dict[str, dict[str, str]] = {}
_read: dict[str, backquant.BackendConfig] = {}


@contextmanager
def _one_description() -> Iterator[None]:
    """An engine's description is most of a small file, and the same in each: written and read once."""
    write, read = store._spec, store._config

    def spec(config: backquant.BackendConfig) -> dict[str, str]:
        if config.name not in _written:
            _written[config.name] = write(config)
        return _written[config.name]

    def config(stored: dict[str, str], allow: tuple[str, ...]) -> backquant.BackendConfig:
        name = stored["name"]
        if name not in _read:
            _read[name] = read(stored, allow)
        return _read[name]

    with mock.patch.multiple(store, _spec=spec, _config=config):
        yield


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def in_integers(prepared: fx.GraphModule) -> QuantizedModel | None:
    """The integer reference, where the model has its arithmetic."""
    try:
        return backquant.convert_to_integer_reference(prepared)
    except EngineError:
        return None


def cuts_a_bias(model: QuantizedModel) -> bool:
    """Whether a bias is no integer of 32 bits in the steps that the integer reference has it in, or a
    factor none of 16: beyond them it is saturated, and lost where such a step is one of the result."""
    for kernel in model.modules():
        if isinstance(kernel, IntegerWeighted) and kernel.bias is not None:
            far = kernel.bias.double().abs() >= 2.0**30
            if bool(far.any()) or bool((kernel.unit > kernel.config.out_scale / 2).any()):
                return True
        config: Any = getattr(kernel, "config", None)
        is_coarse = isinstance(kernel, IntegerBatchNorm) and (
            config.x_scale * config.gamma_scale > config.out_scale / 2
        )
        if isinstance(kernel, IntegerNorm):
            far = kernel.beta.double().abs() >= 2.0**30
            is_coarse = bool(far.any()) or config.gamma_scale < 1e-30
        if is_coarse:
            return True
    return False


def as_compiled(model: QuantizedModel) -> QuantizedModel:
    """Compiled for the shapes of the calibration, without optimising what surrounds the loops."""
    with _fast_builds():
        return model.compile()


@contextmanager
def _fast_builds() -> Iterator[None]:
    with inductor_config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        yield


class _Dithered(fx.Interpreter):
    """A reference model with up to half a step of noise at each rounding."""

    generator: torch.Generator

    def run_node(self, n: fx.Node) -> Any:
        if not is_quantize(n):
            return super().run_node(n)
        value, scale, *rest = self.fetch_args_kwargs_from_env(n)[0]
        noise = torch.rand(value.shape, generator=self.generator, dtype=value.dtype) - 0.5
        return n.target(value + noise * scale, scale, *rest)  # type: ignore[operator]


def dithered(reference: fx.GraphModule, x: torch.Tensor) -> torch.Tensor:
    """What ``reference`` gives with noise at each rounding."""
    run = _Dithered(reference)
    run.generator = torch.Generator().manual_seed(0)
    found: torch.Tensor = run.run(x)
    return found


def ratio(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """How far above the difference ``wanted`` is, in dB; 120 where they are as good as equal."""
    finite = wanted.isfinite()
    if wanted.shape != got.shape or not torch.equal(got.isfinite(), finite):
        return -120.0
    one, two = wanted[finite].double(), got[finite].double()
    signal, noise = float(one.square().sum()), float((one - two).square().sum())
    if noise <= signal * 1e-12:
        return 120.0
    return float(10 * torch.log10(torch.tensor(max(signal, 1e-300) / noise)))
