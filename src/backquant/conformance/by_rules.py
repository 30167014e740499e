"""Descriptions whose engine is not here: what can be said without it.

What lies beyond a claim has to be refused by the plan, for that reason, as on any engine. What a claim admits
is planned, and its reference model computes it; where ``export`` writes files for the chip (TensorRT), the
file is written and judged by the documented rules. What these leave open is ``untried``, and says so.
"""

from __future__ import annotations

import importlib.util
import platform
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, fx

from backquant.conformance.seam import NotAskedError, Ran, RefusedByEngineError
from backquant.conformance.torch_engines import REFERENCE, said
from backquant.convert import convert_to_reference
from backquant.deploy import run_export
from backquant.deploy.exported import Exported
from backquant.deploy.job_of import export_job
from backquant.deploy.session import LoadingTarget
from backquant.deploy.target import Target, find_target, list_targets, usual_suffix
from backquant.errors import BackquantError
from backquant.graph.silence import without_warnings
from backquant.pipeline.lower import quantized_model
from backquant.version import __version__

#: The name of the engine of a description that neither an engine nor a target is for.
NONE = "none"


@dataclass(frozen=True)
class Rules:
    """Judges by the plan and, with ``target``, by the rules that files for it are checked by.

    >>> Rules().name, Rules(written_for("tensorrt_fp8")).name
    ('none', 'tensorrt')
    """

    target: Target | None = None
    takes_sizes: bool = False

    @property
    def name(self) -> str:
        return NONE if self.target is None else self.target.name

    def versions(self) -> dict[str, str]:
        found = {
            "backquant": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        needs = () if self.target is None else self.target.requires
        return found | {
            need.package: metadata.version(need.package) for need in needs if _here(need.module)
        }

    def build(self, prepared: fx.GraphModule, example: tuple[Tensor, ...]) -> LeftInFloat:
        """What stays float by the rules. Raises ``RefusedByEngineError`` where a rule is broken, and
        ``NotAskedError`` where nothing speaks against the model."""
        how = _computed(prepared, example)
        if self.target is None or not all(_here(need.module) for need in self.target.requires):
            raise NotAskedError(f"no engine of it is here; {how}")
        kernels, left = self._by_rules(prepared, example)
        if left.in_float:
            return LeftInFloat(left)
        raise NotAskedError(
            f"no {self.target.name} is here; by its rules it computes {kernels}; {how}"
        )

    def _by_rules(self, prepared: fx.GraphModule, example: tuple[Tensor, ...]) -> tuple[str, Ran]:
        assert self.target is not None
        try:
            exported = _exported(prepared, example, self.target)
        except (BackquantError, RuntimeError) as error:
            where = (str(getattr(error, "where", "")).splitlines() or [""])[0]
            raise RefusedByEngineError(f"by its rules: {said(error)}: {where}"[:300]) from error
        named = dict.fromkeys(f"{use.kernel} ({use.dtype})" for use in exported.kernels)
        return ", ".join(named), Ran(tuple(named), exported.left_in_float)


@dataclass(frozen=True)
class LeftInFloat:
    """What is written in part for floats: an outcome by itself, so that nobody runs it."""

    ran: Ran

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        raise NotAskedError(f"there is no engine to run it on {len(inputs)} inputs")


def written_for(backend: str) -> Target | None:
    """The target that writes files for a description of this name, and has no runtime in this process.

    >>> written_for("tensorrt").name, written_for("my_npu")
    ('tensorrt', None)
    """
    for name in list_targets():
        target = find_target(name, Path(f"model{usual_suffix(name)}"))
        own = backend == target.backend or backend.startswith(f"{target.backend}_")
        if own and not isinstance(target, LoadingTarget):
            return target
    return None


def _here(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _computed(prepared: fx.GraphModule, example: tuple[Tensor, ...]) -> str:
    """The reference model computes it: on integers, where the integer reference has its arithmetic."""
    reference = convert_to_reference(prepared)
    with torch.no_grad():
        reference(*example)
        try:
            integers = quantized_model(convert_to_reference(prepared), prepared, REFERENCE)
            integers(*example)
        except (BackquantError, RuntimeError):
            return "its reference model computes it, in float"
    if integers.left_in_float:
        return "its reference model computes it, in float"
    names = dict.fromkeys(use.kernel for use in integers.kernels)
    return f"the integer reference computes it ({', '.join(names)})"


def _exported(prepared: fx.GraphModule, example: tuple[Tensor, ...], target: Target) -> Exported:
    with tempfile.TemporaryDirectory() as folder, without_warnings(UserWarning):
        job = export_job(convert_to_reference(prepared), target, example)
        return run_export(job, target, Path(folder) / f"model{target.suffixes[0]}", 0.0)
