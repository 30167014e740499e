"""torchao's ``prepare_pt2e`` with a backend and a mapping of ours: ``as_quantizer``."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from backquant.backend_config import BackendConfig
from backquant.errors import MissingExtraError, UsageError
from backquant.qconfig import QConfigMapping

if TYPE_CHECKING:
    from backquant.interop.annotating import PlanQuantizer


def as_quantizer(backend_config: BackendConfig, qconfig_mapping: QConfigMapping) -> PlanQuantizer:
    """A quantizer for torchao's ``prepare_pt2e`` that annotates what our plan quantizes.

    The same rules apply as for a captured graph: an operator that is all that one of PyTorch's modules
    does counts as that module, any other as a function. After a model was annotated, ``plan`` of the result
    has the decisions and reasons. Bounds on measured scales are not checked again after calibration.

    Args:
        backend_config: what the backend admits.
        qconfig_mapping: any rules but those of ``set_module_name_object_type_order``.

    Raises:
        MissingExtraError: torchao is not installed.
        UsageError: an argument of the wrong type, or rules by order.

    >>> import torch, backquant
    >>> from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    >>> quantizer = as_quantizer(
    ...     backquant.get_backend_config("x86"), backquant.get_default_qconfig_mapping("x86"))
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval(), torch.randn(8, 4)
    >>> prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    >>> _ = prepared(x)
    >>> convert_pt2e(prepared)(x).shape
    torch.Size([8, 4])
    >>> [(node, decision.outcome.value) for node, decision in quantizer.plan.decisions.items()]
    [('linear', 'quantized')]
    """
    _check("backend_config", backend_config, BackendConfig)
    _check("qconfig_mapping", qconfig_mapping, QConfigMapping)
    ordered = qconfig_mapping.module_name_object_type_order_qconfigs
    if ordered:
        raise UsageError(
            "rules of set_module_name_object_type_order are not taken for exported graphs",
            where=f"as_quantizer: {next(iter(ordered))}",
            fix="name the module: QConfigMapping().set_module_name(...)",
        )
    if importlib.util.find_spec("torchao") is None:
        raise MissingExtraError(
            "a quantizer for prepare_pt2e needs torchao",
            extra="torchao",
            where="as_quantizer",
        )

    from backquant.interop.annotating import PlanQuantizer  # imports torchao

    return PlanQuantizer(backend_config, qconfig_mapping)


def _check(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise UsageError(
            f"{name} is a {type(value).__name__}, not a {kind.__name__}",
            where=f"as_quantizer: {name}",
            fix=f"pass a backquant.{kind.__name__}",
        )
