"""The ONNX writer: static quantization as QDQ, dynamic as integer products, weights as integers.

Other targets that read ONNX use it as it is; what differs between them is in the graph that they are
given (signed or unsigned, symmetric or not) and so in the backend's description.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from backquant.backend_config import BackendConfig
from backquant.deploy.job import ExportJob
from backquant.deploy.onnx.additions import write_sums
from backquant.deploy.onnx.blocks import settle_blocks
from backquant.deploy.onnx.dynamic import settle_types, use_integer_products
from backquant.deploy.onnx.fold import drop_unused, fold_integer_constants
from backquant.deploy.onnx.gemm import store_described_biases, store_integer_biases
from backquant.deploy.onnx.names import name_nodes
from backquant.deploy.onnx.translate import translations
from backquant.deploy.program import quiet
from backquant.errors import BackquantError, ExportError
from backquant.graph import register_quantized_decomposed
from backquant.graph.own_thread import printing_nowhere

__all__ = ["OPSET", "onnx_model", "save_onnx"]

OPSET = 18
_LIMIT = 2**31 - 2**20  # a protobuf file holds less than 2 GiB; larger weights go beside it


def onnx_model(job: ExportJob) -> Any:
    """``job`` as an ``onnx_ir.Model``; nodes carry the names of the reference graph's nodes.

    The option ``opset`` is the ONNX operator set (default 18, for 8-bit floats 19, for groups 21). Raises
    ``ExportError`` when the exporter has no translation for an operator.
    """
    register_quantized_decomposed()
    program = job.program
    opset = int(job.options.get("opset", _least_opset(job)))
    try:
        with quiet(), printing_nowhere():
            made = torch.onnx.export(
                program.exported,
                dynamo=True,
                verbose=False,
                opset_version=opset,
                custom_translation_table=translations(),
                optimize=False,
            )
    except Exception as error:
        raise _refused(error) from error
    assert made is not None
    name_nodes(made.model)
    settle_types(made.model)
    fold_integer_constants(made.model)
    with quiet(), printing_nowhere():
        made.optimize()
    fold_integer_constants(made.model)
    use_integer_products(made.model)
    settle_blocks(made.model)
    if job.qdq.additions == "sum":
        write_sums(made.model)
    if job.qdq.bias == "int32":
        store_integer_biases(made.model)
    if _describes_biases(job.config):
        store_described_biases(made.model)
    drop_unused(made.model)
    return made.model


def _describes_biases(config: BackendConfig) -> bool:
    """Whether biases are integers of the scale input × weight: then the model's are such already."""
    configs = (config for entry in config.configs for config in entry.dtype_configs)
    return any(config.bias_scale == "input_times_weight" for config in configs)


def _least_opset(job: ExportJob) -> int:
    """8-bit floats came with operator set 19, groups with 21."""
    names = [str(node.target) for node in job.program.exported.graph.nodes]
    if any(name.startswith("backquant.dequantize_blocks") for name in names):
        return 21
    return 19 if any(name.startswith("backquant.quantize_float8") for name in names) else OPSET


def save_onnx(model: Any, path: Path) -> None:
    """Write and check an ``onnx_ir.Model``; weights of 2 GiB and more go to a file beside it."""
    import onnx
    import onnx_ir

    size = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    external = f"{path.name}.data" if size >= _LIMIT else None
    onnx_ir.save(model, path, external_data=external)
    with quiet():
        onnx.checker.check_model(str(path), full_check=True)


def _refused(error: Exception) -> BackquantError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BackquantError):
            return cause
        cause = cause.__cause__ or cause.__context__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ExportError(
        f"the model cannot be written as ONNX: {' '.join(lines[:4])[:400]}",
        where=type(error).__name__,
        fix="leave the part out, or write it with operators that ONNX has",
    )
