"""The flow with custom configs, ours and PyTorch's, on x86 with min/max observers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.ao.quantization as tq
from torch import fx, nn
from torch.ao.quantization import quantize_fx as torch_fx
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config as torch_x86
from torch.ao.quantization.fx import custom_config as torch_custom
from torch.ao.quantization.observer import MinMaxObserver as TorchMinMax

import backquant as bq
from against_torch.torch_side import min_max


@dataclass(frozen=True)
class Side:
    """One of the two: its functions and classes, and its backend."""

    is_torch: bool

    @property
    def config(self) -> Any:
        """The module that has the custom configs."""
        return torch_custom if self.is_torch else bq

    def mapping(self) -> Any:
        if self.is_torch:
            return min_max(tq.get_default_qconfig_mapping("x86"), tq.QConfig, TorchMinMax)
        return min_max(bq.get_default_qconfig_mapping("x86"), bq.QConfig, bq.MinMaxObserver)

    def backend(self) -> Any:
        return torch_x86() if self.is_torch else bq.backend_config.get_x86_backend_config()

    def prepare(
        self, model: nn.Module, example: Any, custom: Any = None, mapping: Any = None
    ) -> fx.GraphModule:
        prepare = torch_fx.prepare_fx if self.is_torch else bq.prepare_fx
        with self._quiet():
            return prepare(
                copy.deepcopy(model),
                mapping or self.mapping(),
                example if isinstance(example, tuple) else (example,),
                prepare_custom_config=custom,
                backend_config=self.backend(),
            )

    def reference(self, prepared: fx.GraphModule, custom: Any = None, **options: Any) -> Any:
        with self._quiet():
            if self.is_torch:
                return torch_fx.convert_to_reference_fx(
                    copy.deepcopy(prepared), custom, backend_config=self.backend(), **options
                )
            return bq.convert_to_reference_fx(prepared, custom, **options)

    def convert(self, prepared: fx.GraphModule, custom: Any = None, **options: Any) -> Any:
        with self._quiet():
            if self.is_torch:
                return torch_fx.convert_fx(
                    copy.deepcopy(prepared), custom, backend_config=self.backend(), **options
                )
            return bq.convert_fx(prepared, custom, **options)

    def _quiet(self) -> Any:
        quiet = warnings.catch_warnings()
        if self.is_torch:
            quiet.__enter__()
            warnings.simplefilter("ignore")
            return _Leaving(quiet)
        return quiet


class _Leaving:
    """A context manager that was entered already."""

    def __init__(self, entered: Any) -> None:
        self._entered = entered

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self._entered.__exit__(*error)


def feed(prepared: nn.Module, batches: Sequence[Any]) -> nn.Module:
    with torch.no_grad():
        for batch in batches:
            prepared(*batch) if isinstance(batch, tuple) else prepared(batch)
    return prepared


@dataclass(frozen=True)
class Both:
    ours: Side = Side(False)
    theirs: Side = Side(True)

    @staticmethod
    def feed(prepared: nn.Module, *batches: Any) -> nn.Module:
        return feed(prepared, batches)


@pytest.fixture
def both() -> Both:
    return Both()
