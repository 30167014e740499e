"""One generated model in every form, beside our reference model.

1. Prepared, converted to a reference model, lowered: no error but ours.
2. Each kernel, given the integers of the reference model, is within its stated steps.
3. Recorded and run again, the bits are those of the interpreted graph.
4. Saved and loaded, the bits are the same. In integers only, each operator is within a step. Compiled (a
   share of the models), the result is within the noise of roundings.
5. What the float model refuses is refused, with our error or the float model's own; what it takes has its
   shape and dtype.
"""

from __future__ import annotations

import copy
import random
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx, nn

import backquant
from against_torch.kernels import check_kernels
from backquant.api import convert_fx, convert_to_reference_fx, prepare_fx
from backquant.errors import BackquantError
from backquant.lower.kernels.engine_setting import running
from generated.families import FAMILIES, Drawn, draw
from generated.forms import (
    as_compiled,
    as_loaded,
    cuts_a_bias,
    dithered,
    in_integers,
    ratio,
)
from generated.values import FOREIGN, NOT_FINITE, extreme_weights, fill
from kernel_audit.layouts import LAYOUTS

__all__ = ["ENGINES", "Result", "check", "compare"]

ENGINES = ("native", "fbgemm", "qnnpack", "x86", "onednn")
_FLOAT_SHARE = 1e-3  # of the greatest value: kernels that give floats
_RECURRENT_SHARE = 0.05  # recurrent cells quantize their state, some of them to 7 bits
_COMPILED = ("x86", "onednn")
_COMPILED_SHARE = 0.006  # a compiler takes as long as 100 models
_WIDENED = ("float16", "bfloat16")  # every float16 is a float32: taken as the reference model does


@dataclass
class Result:
    """``compared``: integer kernels; ``calls``: inputs tried; ``refused``: our error, where one
    ended the model; ``forms``: those besides the lowered model that were compared."""

    seed: int
    backend: str
    family: str
    label: str = ""
    refused: str = ""
    compared: int = 0
    calls: int = 0
    forms: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


def check(seed: int, engine: str) -> Result:
    """Draw model ``seed`` and compare all of its forms on ``engine``."""
    choice = random.Random(zlib.crc32(b"generated") + seed * 65_537)
    family = list(FAMILIES)[seed % len(FAMILIES)]
    made = draw(family, choice)
    changed = extreme_weights(made.model, choice) if choice.random() < 0.3 else ""
    result = Result(seed, engine, family, f"{made.model} on {made.shape} {changed}")
    return compare(made, engine, choice, result)


def compare(made: Drawn, engine: str, choice: random.Random, result: Result) -> Result:
    """``result``, with what was found of all forms of ``made``."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            _Forms(made, engine, choice, result).run()
        except BackquantError as error:
            result.refused = f"{type(error).__name__}: {error.what}"
        except Exception as error:
            result.findings.append(f"raw error: {_told(error)}")
    return result


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"


def _is_rank_check(error: Exception) -> bool:
    """What modules say of inputs without a batch, which operators take: ``nn.BatchNorm2d`` that it expects
    another rank, ``nn.BatchNorm1d`` behind a convolution that it has statistics for other channels. And of
    the norm of single values, which is the bias, that it is nothing to train with."""
    text = str(error)
    batch_norm = isinstance(error, RuntimeError) and text.startswith("running_mean should contain")
    said = ("expected ", "Expected more than 1 value per channel when training")
    return batch_norm or (isinstance(error, ValueError) and text.startswith(said))


def _is_at_the_end(x: torch.Tensor) -> bool:
    """Whether sums of products leave float32 that cancel out in the float model alone."""
    return x.is_floating_point() and bool((x.abs() > 1e37).any())


def _outcome(run: Callable[[Any], Any], x: torch.Tensor) -> Any:
    try:
        return run(x)
    except Exception as error:
        return error


class _Forms:
    def __init__(self, made: Drawn, engine: str, choice: random.Random, result: Result) -> None:
        self.made, self.engine, self.choice, self.result = made, engine, choice, result

    def run(self) -> None:
        kind, x = self._input(self.made.shape[0], 0.7)
        self.result.label += f" calibrated with {kind}"
        before = copy.deepcopy(self.made.model.state_dict())
        mapping = _mapping(self.engine, self.choice, self.made.ids > 0)
        backend = _backend(self.engine)
        prepared = prepare_fx(self.made.model, mapping, (x,), backend_config=backend)
        self._prepared(prepared, x)
        self.reference = convert_to_reference_fx(prepared, dialect="decomposed")
        self.lowered: Any = convert_fx(prepared)
        self._values("calibration", x)
        self._loaded(x)
        self._in_integers(prepared, x)
        if self.engine in _COMPILED and self.choice.random() < _COMPILED_SHARE:
            self._compiled(x)
        for name, other in self._others(x):
            self._values(name, other)
        if any(
            not torch.equal(v, before[k]) and not (v.isnan().any())
            for k, v in self.made.model.state_dict().items()
        ):
            self._find("the model was changed")

    def _loaded(self, x: torch.Tensor) -> None:
        self.result.forms.append("loaded")
        loaded = as_loaded(self.lowered)
        wanted, got = _outcome(self.lowered, x), _outcome(loaded, x)
        if isinstance(wanted, torch.Tensor) != isinstance(got, torch.Tensor):
            self._find(f"loaded: {got if isinstance(wanted, torch.Tensor) else wanted}")
        elif isinstance(got, torch.Tensor) and not _same(wanted, got):
            self._find(f"loaded: {_far(wanted, got)} from the saved model")

    def _in_integers(self, prepared: Any, x: torch.Tensor) -> None:
        integers = in_integers(prepared)
        if integers is None:
            return
        self.result.forms.append("integers")
        try:
            found = check_kernels(self.reference, integers, x)
        except Exception as error:
            self._find(f"in integers: {_told(error)}")
            return
        self.result.compared += found.checked
        if found.worst > 1 and not cuts_a_bias(integers) and not self._leaves_float32(x):
            self._find(f"in integers: {found.node} is {found.worst} steps from the reference model")

    def _leaves_float32(self, x: torch.Tensor) -> bool:
        """Whether products of activations do, such as the scores of attention: in floats alone."""
        values = _every_value(self.reference, x).values()
        return any(_is_at_the_end(v) or not v.isfinite().all() for v in values)

    def _compiled(self, x: torch.Tensor) -> None:
        self.result.forms.append("compiled")
        if any(v.isnan().any() for v in _every_value(self.lowered.graph_module, x).values()):
            return  # as integers they are not defined
        made = as_compiled(self.lowered)
        wanted, got = self.lowered(x), made(x)
        found = ratio(wanted, got)
        if found < 20:
            plain = self.reference(x)
            if found < ratio(plain, dithered(self.reference, x)) - 3:
                self._find(f"compiled: {found:.1f} dB from the lowered model")

    def _find(self, text: str) -> None:
        self.result.findings.append(text)

    def _input(self, batch: int, plain: float) -> tuple[str, torch.Tensor]:
        x = self.made.input(self.choice, batch)
        return ("ids", x) if self.made.ids else fill(x, self.choice, plain)

    def _prepared(self, prepared: nn.Module, x: torch.Tensor) -> None:
        wanted, got = _outcome(self.made.model, x), prepared(x)
        if isinstance(wanted, torch.Tensor) and (
            wanted.shape != got.shape or wanted.dtype != got.dtype
        ):
            self._find("prepared: another shape or dtype")
        _, other = self._input(self.made.shape[0], 0.9)
        prepared(other)

    def _others(self, x: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        choice = self.choice
        batch = choice.choice((0, 1, 3))
        kind, other = self._input(batch, 0.5)
        found = [(f"batch {batch}, {kind}", other)]
        layout = choice.choice(list(LAYOUTS)[1:])
        found.append((layout, LAYOUTS[layout](self._input(self.made.shape[0], 0.5)[1], choice)))
        foreign = choice.sample(list(FOREIGN), 3)
        found += [(name, FOREIGN[name](x, choice)) for name in foreign]
        if not self.made.ids:
            name = choice.choice(list(NOT_FINITE))
            found.append((name, NOT_FINITE[name](self._input(self.made.shape[0], 1)[1], choice)))
        return found

    def _values(self, name: str, x: torch.Tensor) -> None:
        self.result.calls += 1
        with_float = _outcome(self.made.model, x.clone())
        kept = x.clone()
        first = _outcome(self.lowered, x)
        if isinstance(first, Exception):
            own = isinstance(first, BackquantError)
            if not own and not isinstance(with_float, type(first)):
                self._find(f"{name}: raw error: {_told(first)}")
            elif self._is_usual(name, with_float) and not _is_at_the_end(x):
                self._find(f"{name}: refused, the float model takes it: {_told(first)}")
            return
        if isinstance(with_float, Exception):
            if x.device.type == "meta" and not self.lowered.kernels:
                return  # a layer alone takes it, the batch norm that became part of it did not
            if name not in _WIDENED and first.numel() and not _is_rank_check(with_float):
                self._find(f"{name}: taken, the float model refuses it: {_told(with_float)}")
            return
        if x.device.type == "meta":
            return
        if first.shape != with_float.shape or (
            first.dtype != with_float.dtype and name not in _WIDENED
        ):
            self._find(
                f"{name}: {first.dtype}{list(first.shape)}, not {with_float.dtype}{list(with_float.shape)}"
            )
        self._replays(name, x, first)
        if not _same(x, kept):
            self._find(f"{name}: the input was overwritten")
        self._kernels(name, kept)

    def _is_usual(self, name: str, with_float: Any) -> bool:
        """Whether the float model gives numbers for an input as it was made for: then nothing is refused."""
        usual = name not in (*FOREIGN, *NOT_FINITE) and isinstance(with_float, torch.Tensor)
        if self.result.family == "recurrent" and name.startswith("batch 0"):
            return False  # torch's kernels take no sequence of nothing
        return usual and bool(with_float.isfinite().all())

    def _replays(self, name: str, x: torch.Tensor, first: torch.Tensor) -> None:
        with running():
            plain = self.lowered.graph_module(x)
        for i in range(3):
            again = _outcome(self.lowered, x)
            if isinstance(again, Exception) or not _same(again, plain) or not _same(first, plain):
                if not isinstance(again, Exception) and self._varies(x):
                    return
                what = _told(again) if isinstance(again, Exception) else f"{_far(again, plain)}"
                self._find(f"{name}: call {i + 2} is not the interpreted graph: {what}")
                return

    def _varies(self, x: torch.Tensor) -> bool:
        """Whether the interpreted graph differs from itself, in any value: MKL's products of floats do with
        their addresses, and what follows may round the other way."""
        kept, found = [x], [_every_value(self.lowered.graph_module, x)]
        for size in range(1, 40, 3):
            kept.append(torch.empty(size))  # moves what is made next
            found.append(_every_value(self.lowered.graph_module, x.clone()))
        first = found[0]
        return any(not _same(first[name], one[name]) for one in found[1:] for name in first)

    def _kernels(self, name: str, x: torch.Tensor) -> None:
        if not x.numel():  # no values, and PyTorch's operators measure none
            wanted, given = _outcome(self.reference, x), _outcome(self.lowered, x)
            if not isinstance(wanted, Exception) and not _alike(wanted, given):
                self._find(f"{name}: without elements: {_told_or_shape(given)}")
            return
        try:
            found = check_kernels(self.reference, self.lowered, x)
        except Exception as error:
            wanted = _outcome(self.reference, x)
            refused = "ChooseQuantizationParams" in str(
                error
            )  # NaN at a layer with qparams at each call
            if isinstance(wanted, Exception) or (refused and not wanted.isfinite().all()):
                return  # the reference model does not run on this dtype or shape
            self._find(f"{name}: beside the reference: {_told(error)}")
            return
        self.result.compared += found.checked
        if found.worst > 1:
            self._find(f"{name}: {found.node} is {found.worst} steps from the reference model")
        recurrent = self.result.family == "recurrent"
        if not found.relative <= (_RECURRENT_SHARE if recurrent else _FLOAT_SHARE):
            self._find(
                f"{name}: {found.float_node} is {found.relative:.2g} of its greatest value off"
            )
        if not found.dynamic <= 1.6:  # half a step of 7 bits, half one of 8, and the sums'
            self._find(
                f"{name}: a dynamic layer is {found.dynamic:.2g} steps from the reference model"
            )
        if not found.decibels >= 10:
            self._find(
                f"{name}: a recurrent layer is {found.decibels:.1f} dB from the reference model"
            )


class _Keeping(fx.Interpreter):
    """Keeps each tensor that a node gives, as it was given."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.kept: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.kept[n.name] = value.clone()
        return value


def _every_value(module: fx.GraphModule, x: torch.Tensor) -> dict[str, torch.Tensor]:
    run = _Keeping(module)
    with running():
        run.run(x)
    return run.kept


def _alike(wanted: Any, given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.shape == wanted.shape


def _told_or_shape(outcome: Any) -> str:
    return _told(outcome) if isinstance(outcome, Exception) else str(list(outcome.shape))


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    same = one.shape == two.shape and one.dtype == two.dtype
    return same and torch.equal(one.nan_to_num(77.0), two.nan_to_num(77.0))


def _far(one: torch.Tensor, two: torch.Tensor) -> str:
    if one.shape != two.shape or one.dtype != two.dtype:
        return f"{one.dtype}{list(one.shape)} and {two.dtype}{list(two.shape)}"
    return f"{(one.double() - two.double()).abs().max().item():.4g}"


@cache
def _backend(engine: str) -> backquant.BackendConfig:
    return backquant.get_backend_config(engine)


def _mapping(engine: str, choice: random.Random, embeds: bool) -> Any:
    """The default request, or qparams at each call."""
    way = choice.random()
    if way < 0.15:
        mapping = backquant.QConfigMapping().set_global(backquant.default_dynamic_qconfig)
    else:
        mapping = backquant.default_mapping(_backend(engine))
    if embeds:
        for kind in (nn.Embedding, nn.EmbeddingBag):
            mapping.set_object_type(kind, backquant.qconfig.float_qparams_weight_only_qconfig)
    return mapping
