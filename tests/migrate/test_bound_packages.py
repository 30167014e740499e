"""``torch`` itself: chains of attributes, and whether its import is still needed."""

from __future__ import annotations

from collections.abc import Callable


def test_import_torch_stays_while_it_is_used(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch
        torch.ao.quantization.get_default_qconfig_mapping("x86"), torch.nn.Linear
        """,
        """
        import backquant
        import torch
        backquant.get_default_qconfig_mapping("x86"), torch.nn.Linear
        """,
    )


def test_import_torch_goes_when_nothing_else_uses_it(becomes: Callable[..., None]) -> None:
    becomes(
        """
        # framework
        import torch
        from torch import nn  # layers
        nn.intrinsic.ConvReLU2d(torch.quantization.QConfig)
        """,
        """
        # framework
        import backquant
        # layers
        backquant.nn.intrinsic.ConvReLU2d(backquant.QConfig)
        """,
    )


def test_an_unused_import_that_was_there_before_stays(becomes: Callable[..., None]) -> None:
    becomes(
        "import torch\nfrom torch.ao.quantization import QConfig\n",
        "import torch\nfrom backquant import QConfig\n",
    )


def test_a_dotted_import_binds_torch(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch.ao.quantization
        torch.ao.quantization.QConfig, torch.zeros(1)
        """,
        """
        import backquant
        import torch
        backquant.QConfig, torch.zeros(1)
        """,
    )


def test_dotted_imports_next_to_import_torch(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch
        import torch.ao.quantization
        # fused modules
        import torch.nn.intrinsic
        torch.nn.intrinsic.ConvReLU2d, torch.zeros(1)
        """,
        """
        import backquant
        import torch
        # fused modules
        backquant.nn.intrinsic.ConvReLU2d, torch.zeros(1)
        """,
    )


def test_a_dotted_import_that_a_person_needs_stays(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch.ao.quantization
        import torch.ao.ns._numeric_suite
        torch.ao.quantization.fuse_known_modules(1), torch.ao.quantization.QConfig
        torch.ao.ns._numeric_suite.compare_weights
        """,
        """
        import backquant
        import torch.ao.quantization
        import torch.ao.ns._numeric_suite
        torch.ao.quantization.fuse_known_modules(1), backquant.QConfig
        torch.ao.ns._numeric_suite.compare_weights
        """,
        [(3, "fusion by name"), (4, "numeric suite")],
    )


def test_the_engine_needs_a_person(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch
        import torch.ao.quantization
        torch.backends.quantized.engine = torch.ao.quantization.QConfig
        if "x86" in torch.backends.quantized.supported_engines:
            pass
        """,
        """
        import backquant
        import torch
        torch.backends.quantized.engine = backquant.QConfig
        if "x86" in torch.backends.quantized.supported_engines:
            pass
        """,
        [(3, "engine"), (4, "engine")],
    )


def test_a_parameter_called_torch_hides_it(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch.ao.quantization
        def f(torch):
            return torch.ao.quantization.QConfig
        f(torch.ao.quantization.QConfig)
        """,
        """
        import backquant
        import torch
        def f(torch):
            return torch.ao.quantization.QConfig
        f(backquant.QConfig)
        """,
    )


def test_a_quoted_annotation_needs_its_import(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch
        def f(x: "torch.Tensor"):
            return torch.ao.quantization.QConfig
        """,
        """
        import backquant
        import torch
        def f(x: "torch.Tensor"):
            return backquant.QConfig
        """,
    )


def test_imports_in_functions(becomes: Callable[..., None]) -> None:
    becomes(
        """
        def f():
            import torch
            return torch.ao.quantization.QConfig
        def g():
            import torch; import torch.quantization; x = 1
            return torch.quantization.QConfig, torch.zeros(x)
        """,
        """
        def f():
            import backquant
            return backquant.QConfig
        def g():
            import backquant; import torch; x = 1
            return backquant.QConfig, torch.zeros(x)
        """,
    )


def test_an_import_at_the_top_serves_the_functions_below(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch
        torch.quantization.QConfig
        def f():
            import torch.quantization
            return torch.quantization.MinMaxObserver, torch.zeros(1)
        """,
        """
        import backquant
        import torch
        backquant.QConfig
        def f():
            return backquant.MinMaxObserver, torch.zeros(1)
        """,
    )


def test_a_file_that_calls_something_else_backquant(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch
        backquant = torch.ao.quantization.QConfig
        """,
        """
        import backquant as bq
        backquant = bq.QConfig
        """,
    )


def test_a_file_that_imports_backquant_already(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import backquant
        import torch
        backquant.explain(torch.ao.quantization.QConfig, torch)
        """,
        """
        import backquant
        import torch
        backquant.explain(backquant.QConfig, torch)
        """,
    )


def test_an_ambiguous_torch(becomes: Callable[..., None]) -> None:
    becomes(
        """
        try:
            import torch
        except ImportError:
            torch = None
        torch.ao.quantization.QConfig
        """,
        """
        try:
            import torch
        except ImportError:
            torch = None
        torch.ao.quantization.QConfig
        """,
        [(5, "ambiguous name")],
    )
