"""Modules with a local name."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def test_a_chosen_name_stays(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch.ao.quantization as tq
        from torch.ao.quantization import observer as obs
        tq.quantize_fx.prepare_fx(tq.QConfig, 1, obs.MinMaxObserver, tq.QuantStub)
        """,
        """
        import backquant as tq
        from backquant import observe as obs
        tq.prepare_fx(tq.QConfig, 1, obs.MinMaxObserver, tq.nn.QuantStub)
        """,
    )


def test_a_module_without_a_chosen_name_goes(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.ao.quantization import quantize_fx, observer
        import torch.ao.quantization.quantize_fx as quantize_fx
        def run(model):
            return quantize_fx.fuse_fx(model, observer.MinMaxObserver)
        """,
        """
        import backquant
        def run(model):
            return backquant.fuse_fx(model, backquant.MinMaxObserver)
        """,
    )


def test_a_module_of_the_same_name_stays(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.ao.nn import intrinsic
        from torch.ao.quantization import backend_config
        import torch.nn.qat.dynamic as dynamic
        intrinsic.ConvReLU2d, intrinsic.qat.ConvReLU2d, dynamic.Linear
        backend_config.BackendConfig, backend_config.x86.get_x86_backend_config()
        """,
        """
        from backquant.nn import intrinsic
        from backquant import backend_config
        import backquant.nn.qat.dynamic as dynamic
        intrinsic.ConvReLU2d, intrinsic.qat.ConvReLU2d, dynamic.Linear
        backend_config.BackendConfig, backend_config.get_x86_backend_config()
        """,
    )


def test_a_name_that_the_new_module_has_not(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch.ao.quantization.qconfig as qc
        qc.QConfig(qc.MinMaxObserver, qc.default_weight_observer)
        """,
        """
        import backquant
        import backquant.qconfig as qc
        qc.QConfig(backquant.MinMaxObserver, backquant.default_weight_observer)
        """,
    )


def test_what_needs_a_person_keeps_the_import(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch.ao.quantization as tq
        tq.fuse_known_modules(tq.QConfig)
        """,
        """
        import backquant
        import torch.ao.quantization as tq
        tq.fuse_known_modules(backquant.QConfig)
        """,
        [(2, "fusion by name")],
    )


@pytest.mark.parametrize(
    "use",
    ["getattr(tq, name)", "register(tq)", "vars(tq.observer)", "setattr(tq, 'x', 1)", "del tq"],
)
def test_a_module_as_a_value(migrated: Callable[..., object], use: str) -> None:
    result = migrated(f"import torch.ao.quantization as tq\n{use}\ntq.QConfig\n")
    assert result.after.splitlines()[-2:] == [use, "backquant.QConfig"]  # type: ignore[attr-defined]
    assert [f.kind for f in result.findings] == ["dynamic use"]  # type: ignore[attr-defined]


def test_a_module_that_is_only_asked_for(becomes: Callable[..., None]) -> None:
    becomes(
        """
        try:
            from torch.ao.quantization import quantize_fx
        except ImportError:
            quantize_fx = None
        if quantize_fx and quantize_fx is not None and not (not quantize_fx):
            quantize_fx.convert_fx(1)
        """,
        """
        try:
            import backquant as quantize_fx
        except ImportError:
            quantize_fx = None
        if quantize_fx and quantize_fx is not None and not (not quantize_fx):
            quantize_fx.convert_fx(1)
        """,
    )


def test_a_patched_module(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch.ao.quantization as tq
        tq.default_qconfig = None
        tq.default_qconfig.extra = None
        """,
        """
        import backquant
        import torch.ao.quantization as tq
        tq.default_qconfig = None
        backquant.default_qconfig.extra = None
        """,
        [(2, "patched name")],
    )


def test_a_parameter_hides_the_import(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.ao.quantization import observer
        def f(observer):
            return observer.MinMaxObserver
        [observer for observer in f(observer.MinMaxObserver)]
        """,
        """
        from backquant import observe as observer
        def f(observer):
            return observer.MinMaxObserver
        [observer for observer in f(observer.MinMaxObserver)]
        """,
    )


def test_names_that_are_exported(becomes: Callable[..., None]) -> None:
    becomes(
        """
        from torch.ao.quantization import quantize_fx
        __all__ = ["quantize_fx"]
        quantize_fx.fuse_fx
        """,
        """
        import backquant as quantize_fx
        __all__ = ["quantize_fx"]
        quantize_fx.fuse_fx
        """,
    )


def test_two_modules_under_one_name(becomes: Callable[..., None]) -> None:
    becomes(
        """
        try:
            import torch.ao.quantization.quantize_fx as tq
        except ImportError:
            import torch.quantization as tq
        tq.QConfigMapping()
        """,
        """
        try:
            import backquant as tq
        except ImportError:
            import backquant as tq
        tq.QConfigMapping()
        """,
    )


def test_quantized_modules_are_partly_there(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch.nn.quantized as nnq
        import torch.nn.quantized.dynamic as nnqd
        nnq.FloatFunctional(), nnq.Linear(1, 2), nnq.functional.relu, nnqd.LSTM
        """,
        """
        import backquant
        import torch.nn.quantized as nnq
        import torch.nn.quantized.dynamic as nnqd
        backquant.nn.quantized.FloatFunctional(), nnq.Linear(1, 2), nnq.functional.relu, nnqd.LSTM
        """,
        [(3, "quantized modules")] * 3,
    )
