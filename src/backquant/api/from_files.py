"""``quantize_files``: a model larger than memory, from the files of its weights to that of the artifact."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from backquant.api.arguments import given_model
from backquant.api.flow import Flow, Options
from backquant.backend_config.config import Backend
from backquant.calibrate.measure import calibrate_by_layer
from backquant.errors import UsageError
from backquant.mapped import EmptyOnMeta, MappedMemory, WeightFiles, filled
from backquant.qconfig import PrepareCustomConfig, QConfigMapping
from backquant.report.model import Report


def quantize_files(
    model: nn.Module | Callable[[], nn.Module],
    files: str | os.PathLike[str],
    to: str | os.PathLike[str],
    example_inputs: Any = None,
    *,
    backend: Backend | None = None,
    calibration: Iterable[Any] | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    weights: str | Mapping[str, str | None] | None = None,
    group_size: int | None = None,
    require: float | str | Sequence[str] | None = None,
    prepare_custom_config: PrepareCustomConfig | None = None,
    capture: str = "auto",
    dynamic_shapes: Any = None,
    ignore: Sequence[str] = (),
    allow: Sequence[str] = (),
    progress: bool = False,
) -> Report:
    """Quantize a model whose weights stay in safetensors files, and write the artifact to ``to``.

    The file has the bytes of ``save(quantize(model, ..., slower="keep", recipe="none"), to)``, but for the
    SQNR on a batch, which is not measured. Weights are
    mapped, read a layer at a time, and released; calibration passes all batches (32 at a time) through one
    part of the model before the next; integer weights are written to a file beside ``to`` as they are made.
    So memory holds a few copies of the largest tensor, and the activations of those batches between two
    layers, however deep the model is.

    Args:
        model: a function without arguments that makes the model; it is called in a way that allocates no
            weights. Or the model, with its parameters on the device ``meta``.
        files: a ``.safetensors`` file, the ``.safetensors.index.json`` of several, or their folder.
        to: the artifact; replaced if it is there.
        example_inputs, backend, calibration, qconfig_mapping, weights, group_size, require,
            prepare_custom_config, capture, dynamic_shapes, progress: as in ``quantize``. No times are
            measured: operators that are slower on integers stay on integers.
        ignore: patterns of tensors in the files that the model lacks (``"*.attn.bias"``).
        allow: as in ``save``.

    Returns:
        The report; ``load(to, verify=False)`` maps the artifact.

    Raises:
        UsageError: the files lack a tensor, hold one more, or one of another shape or dtype; tied weights
            that differ; a buffer without values.
        ArtifactError: a file is damaged, or ``to`` cannot be written.
        ConfigError: an observer whose state depends on the order of batches (moving averages).
        CaptureError, InputError, CalibrationError, EngineError, CoverageError: as ``quantize``.

    >>> import tempfile
    >>> import torch
    >>> from safetensors.torch import save_file
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file(model.state_dict(), f"{folder}/model.safetensors")
    ...     report = quantize_files(
    ...         lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), folder, f"{folder}/model.bq",
    ...         calibration=[torch.randn(4, 8)],
    ...     )
    >>> report.coverage
    1.0
    """
    from backquant.artifact.file import check_place  # read here: schemas of files take time to make
    from backquant.artifact.store import write_model
    from backquant.artifact.tensors import TensorWriter

    target = Path(to)
    check_place(target)
    options = Options(
        backend,
        qconfig_mapping,
        weights,
        group_size,
        require,
        prepare_custom_config,
        capture,
        dynamic_shapes,
        progress=progress,
    )
    flow = Flow(options, feed=calibrate_by_layer)
    empty, found = _made(model), WeightFiles.of(files)
    with MappedMemory(target.resolve().parent) as memory:
        source = filled(empty, dict(found.tensors(memory)), found.place, ignore)
        ready = flow.calibrated(source, example_inputs, calibration)
        # With nothing as its source it may share what is mapped: it is only written.
        lowered = flow.lower(ready, ready.reference(kept=memory.kept), nn.Module())
        report: Report = lowered.report
        write_model(lowered, target, TensorWriter(memory.kept), allow)
    return report


def _made(model: Any) -> nn.Module:
    if isinstance(model, nn.Module) or not callable(model):
        return given_model(model)
    with EmptyOnMeta():
        made = model()
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"the function gives a {type(made).__name__}, not an nn.Module",
            where="model",
            fix="quantize_files(lambda: MyModel(...), files, to)",
        )
    return given_model(made)
