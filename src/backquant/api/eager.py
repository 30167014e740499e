"""Calls that change a model where its modules stand, without a capture (PyTorch's eager mode)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from backquant.api.arguments import given_backend, given_model
from backquant.backend_config import BackendConfig
from backquant.errors import UsageError
from backquant.fuse.by_name import Fuse, Names, fused_by_name, fuser_of_backend
from backquant.pipeline.eager import kernels_alone, requested_by_path, with_kernels
from backquant.qconfig import QConfig
from backquant.report.model import warn_of_skipped


def fuse_modules(
    model: nn.Module,
    modules_to_fuse: Names,
    inplace: bool = False,
    fuser_func: Fuse | None = None,
    fuse_custom_config_dict: dict[str, Any] | None = None,
    *,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> nn.Module:
    """A copy of ``model`` in which the listed sequences of modules are fused, for inference.

    Of each list of names the first becomes the fused module (batch norms are folded into it), the others
    ``nn.Identity``. ``prepare_fx`` needs no such list: it fuses what the backend fuses. Forward pre-hooks of
    the first and forward hooks of the last module of a list go to the fused one.

    Args:
        model: any module, in evaluation mode where batch norms are to be folded.
        modules_to_fuse: one list of paths, or a list of such lists: ``[["conv", "bn", "relu"]]``.
        inplace: fuse the modules of ``model`` itself, and return it.
        fuser_func: takes a list of modules, returns as many. Default: the fuser of the backend's pattern.
        fuse_custom_config_dict: ``{"additional_fuser_method_mapping": {classes: fuser}}``, where a fuser is
            ``f(is_qat, *modules)``.
        backend_config: whose patterns. Default: native.

    Raises:
        UsageError: a path that the model lacks; classes for which there is no fuser.
        ConfigError: the modules are in training mode, or in different modes.

    >>> model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()).eval()
    >>> [type(module).__name__ for module in fuse_modules(model, ["0", "1", "2"])]
    ['ConvReLU2d', 'Identity', 'Identity']
    """
    fuse = fuser_func or fuser_of_backend(
        False, given_backend(backend_config), fuse_custom_config_dict
    )
    return fused_by_name(given_model(model), modules_to_fuse, inplace, fuse)


def fuse_modules_qat(
    model: nn.Module,
    modules_to_fuse: Names,
    inplace: bool = False,
    fuser_func: Fuse | None = None,
    fuse_custom_config_dict: dict[str, Any] | None = None,
    *,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> nn.Module:
    """A copy of ``model`` in which the listed sequences of modules are fused, for training.

    As ``fuse_modules``; batch norms stay, in the fused modules that ``prepare_qat_fx`` trains.

    >>> model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    >>> type(fuse_modules_qat(model, ["0", "1", "2"])[0]).__name__
    'ConvBnReLU2d'
    """
    fuse = fuser_func or fuser_of_backend(
        True, given_backend(backend_config), fuse_custom_config_dict
    )
    return fused_by_name(given_model(model), modules_to_fuse, inplace, fuse)


def quantize_dynamic(
    model: nn.Module,
    qconfig_spec: Iterable[type | str] | Mapping[type | str, QConfig | None] | None = None,
    dtype: torch.dtype = torch.qint8,
    mapping: None = None,
    inplace: bool = False,
    *,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> nn.Module:
    """A copy of ``model`` whose linear and recurrent layers (or embeddings) run on integer kernels.

    Weights are quantized now, activations at each call; no data is needed. The model is not captured:
    whatever its ``forward`` does, ``model.encoder.fc`` is replaced by a kernel that is called like it. Layers
    without a kernel stay float; one warning lists them with the reasons. ``backquant.quantize`` with
    ``default_dynamic_qconfig`` does the same to a captured model, with a report.

    The result is for inference, and is saved by its ``state_dict``: make the same model again with
    ``quantize_dynamic`` and load it.

    Args:
        model: any module.
        qconfig_spec: a set of classes and paths of modules, or a dict from these to QConfigs (``None``: leave
            it in float). The QConfig of a module holds for its submodules, unless they are named themselves.
            Default: the layers that ``dtype`` is for.
        dtype: of the weights, unless QConfigs are given: ``torch.qint8`` or ``torch.float16`` for linear
            and recurrent layers, ``torch.quint8`` or ``torch.quint4x2`` for embeddings.
        mapping: must be ``None``: the backend says what becomes of a module.
        inplace: replace the modules of ``model`` itself, and return it.
        backend_config: the backend whose kernels are used. Default: native.

    Raises:
        UsageError: another dtype, a path or class that the model lacks, a ``mapping``.
        EngineError: this build or CPU lacks the backend's engine.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    >>> quantized = quantize_dynamic(model, {nn.Linear})
    >>> type(quantized[0]).__name__, quantized[0].weight().dtype, quantized(torch.ones(2, 4)).shape
    ('Linear', torch.qint8, torch.Size([2, 4]))
    """
    if mapping is not None:
        raise UsageError(
            "quantize_dynamic takes no table of modules: the backend says what each becomes",
            where="mapping",
            fix="leave it out; BackendPatternConfig(...).set_reference_quantized_module(...)",
        )
    requested = requested_by_path(given_model(model), qconfig_spec, dtype)
    alone = kernels_alone(model, requested, given_backend(backend_config))
    warn_of_skipped(alone.plan, *map(str, alone.left_in_float))
    return with_kernels(model, alone.shown, inplace=inplace)
