"""A constraint that hardware has: how it is described, what keeps to it, what does not."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

import backquant
from backquant.cli.models import findings
from backquant.report.recorded import report_of

HEAD = "schema_version: 1\nname: chip\n"


@dataclass(frozen=True)
class Request:
    """A model with its input, and what is asked (None: the description's defaults)."""

    model: Callable[[], nn.Module]
    x: Callable[[], Any]
    asked: Callable[[], backquant.QConfig] | None = None

    def made(self) -> tuple[nn.Module, Any, backquant.QConfigMapping | None]:
        torch.manual_seed(0)
        asked = None if self.asked is None else self.asked()
        mapping = None if asked is None else backquant.QConfigMapping().set_global(asked)
        return self.model().eval(), self.x(), mapping

    def converted(self, backend: backquant.BackendConfig) -> Any:
        """The report after calibration, whatever stays float."""
        model, x, mapping = self.made()
        inputs = x if isinstance(x, tuple) else (x,)
        mapping = mapping or backquant.get_default_qconfig_mapping(backend)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which says what stays float
            prepared = backquant.prepare_fx(model, mapping, inputs, backend_config=backend)
            prepared(*inputs)
            made = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
        return report_of(made)


@dataclass(frozen=True, eq=False)
class Row:
    """``kept`` is quantized, and ``honoured`` looks at the result; each of ``beyond`` is refused by the rule
    that is its key."""

    name: str
    constraint: str
    who: str
    spec: str
    kept: Request
    honoured: Callable[[Tried], str]
    beyond: dict[str, Request]

    @cached_property
    def backend(self) -> backquant.BackendConfig:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "chip.yaml"
            path.write_text(HEAD + self.spec, encoding="utf-8")
            return backquant.BackendConfig.load(path)

    def expressible(self) -> None:
        """The description loads, ``check`` finds nothing, and it comes back as it was saved."""
        with tempfile.TemporaryDirectory() as folder:
            path, again = Path(folder) / "chip.yaml", Path(folder) / "again.yaml"
            path.write_text(HEAD + self.spec, encoding="utf-8")
            found = [str(f) for f in findings(str(path)) if f.severity != "note"]
            assert found == []
            self.backend.save(again)
            assert backquant.BackendConfig.load(again) == self.backend

    def enforced(self) -> None:
        """What keeps to it is quantized; what does not is left in float, for this reason."""
        assert {row.outcome for row in self.result.rows} == {"quantized"}
        for rule, reason in self.refusals.items():
            assert reason.rule.partition(" ")[0] == rule.partition(" ")[0]

    @cached_property
    def result(self) -> Tried:
        return Tried.of(self.backend, self.kept)

    @cached_property
    def refusals(self) -> dict[str, Any]:
        """The reasons, by their rules."""
        found = {}
        for rule, request in self.beyond.items():
            left = [row for row in request.converted(self.backend).operators if not row.quantized]
            found[rule] = left[-1].reasons[0]
        return found

    def message(self) -> str:
        """What a person reads where the constraint is not kept."""
        parts = []
        for reason in self.refusals.values():
            lines = [
                ("rule", reason.rule),
                ("requested", reason.asked),
                ("supported", reason.admitted),
            ]
            lines.append(("fix", reason.fix.replace("\n", "\n          ")))
            parts.append("\n".join(f"{word:<10}{text}" for word, text in lines if text))
        return "\n\n".join(parts)


@dataclass(frozen=True)
class Tried:
    """A model after ``quantize``."""

    model: nn.Module
    x: Any
    quantized: Any

    @classmethod
    def of(cls, backend: backquant.BackendConfig, request: Request) -> Tried:
        model, x, mapping = request.made()
        made = backquant.quantize(
            model, x, backend=backend, calibration=[x], qconfig_mapping=mapping
        )
        return cls(model, x, made)

    @property
    def rows(self) -> list[Any]:
        return list(self.quantized.report.operators)

    def observed(self, role: str, row: int = 0) -> Any:
        """What the report says of a tensor."""
        return next(o for o in self.rows[row].observers if o.role == role)

    @property
    def graph(self) -> Any:
        return self.quantized.graph_module

    def called(self, operator: str) -> list[Any]:
        """The nodes of an operator of the reference model."""
        return [node for node in self.graph.graph.nodes if operator in str(node.target)]

    @property
    def decibels(self) -> float:
        """From the float model."""
        x = self.x if isinstance(self.x, tuple) else (self.x,)
        with torch.no_grad():
            want, got = self.model(*x), self.quantized(*x)
        return float(10 * torch.log10(want.square().mean() / (want - got).square().mean()))
