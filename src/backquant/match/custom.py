"""What a PrepareCustomConfig means for matching."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from backquant.errors import ConfigError, did_you_mean
from backquant.graph import GraphIndex
from backquant.match.plan import MatchKind, TensorRequest
from backquant.qconfig import PrepareCustomConfig, QuantType
from backquant.qconfig.quant_type import quant_type_of


@dataclass(frozen=True)
class CustomMatching:
    """Modules that are not matched with patterns: standalone modules, custom modules, modules not traced.

    ``with_own_request`` holds the names and classes of standalone modules that have a QConfigMapping of
    their own; ``custom_modules`` the float classes with the kind of quantization that their
    observed class is for; ``declined`` anchors and entries of patterns that are not to match.

    >>> CustomMatching(standalone_names=frozenset({"decoder"})).standalone_names
    frozenset({'decoder'})
    """

    standalone_names: frozenset[str] = frozenset()
    standalone_classes: frozenset[type] = frozenset()
    with_own_request: frozenset[str | type] = frozenset()
    custom_modules: frozenset[tuple[QuantType, type]] = frozenset()
    non_traceable_names: frozenset[str] = frozenset()
    non_traceable_classes: frozenset[type] = frozenset()
    declined: frozenset[tuple[str, int]] = frozenset()

    @classmethod
    def of(cls, config: PrepareCustomConfig | None) -> CustomMatching:
        """From a ``PrepareCustomConfig``; ``None`` gives the empty one.

        >>> CustomMatching.of(None) == CustomMatching()
        True
        """
        if config is None:
            return cls()
        entries: dict[Any, Any] = {
            **config.standalone_module_names,
            **config.standalone_module_classes,
        }
        return cls(
            frozenset(config.standalone_module_names),
            frozenset(config.standalone_module_classes),
            frozenset(key for key, e in entries.items() if e.qconfig_mapping is not None),
            frozenset(
                (kind, float_class)
                for kind, mapping in config.float_to_observed_mapping.items()
                for float_class in mapping
            ),
            frozenset(config.non_traceable_module_names),
            frozenset(config.non_traceable_module_classes),
        )

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError for a standalone module that ``model`` lacks, or that is named twice.

        >>> CustomMatching(standalone_names=frozenset({"head"})).check(nn.Sequential())
        Traceback (most recent call last):
        ...
        backquant.errors.ConfigError: the model has no module 'head' to prepare on its own
          where  PrepareCustomConfig.set_standalone_module_name
        """
        known = dict(model.named_modules(remove_duplicate=False)) if self.standalone_names else {}
        for name in sorted(self.standalone_names):
            if name not in known or not name:
                raise ConfigError(
                    f"the model has no module {name!r} to prepare on its own",
                    where="PrepareCustomConfig.set_standalone_module_name",
                    fix=did_you_mean(name, known, most=2, quote='"{}"'.format),
                )
            if name in self.non_traceable_names:
                raise ConfigError(
                    f"module {name!r} is named as standalone and as non-traceable",
                    where="PrepareCustomConfig",
                    fix="leave it out of set_non_traceable_module_names, or of "
                    "set_standalone_module_name",
                )

    def special(
        self, graph: GraphIndex, requested: Mapping[str, QuantType | None]
    ) -> dict[fx.Node, MatchKind]:
        """The nodes that call standalone or custom modules.

        ``requested``: the kind of quantization that a QConfig asks for, by name of the node. A class
        that is mapped for other kinds only is no custom module there.
        """
        found: dict[fx.Node, MatchKind] = {}
        for node in graph.calls():
            module = graph.module_of(node)
            if module is None:
                continue
            if self.is_standalone(str(node.target), module):
                found[node] = MatchKind.STANDALONE
            elif type(module) in self.custom_classes and (
                node.name not in requested
                or (requested[node.name], type(module)) in self.custom_modules
            ):
                found[node] = MatchKind.CUSTOM_MODULE
        return found

    def is_standalone(self, path: str, module: Any) -> bool:
        """Whether a called module is quantized on its own."""
        return path in self.standalone_names or type(module) in self.standalone_classes

    def has_own_request(self, path: str, module: Any) -> bool:
        """Whether a standalone module has a QConfigMapping of its own. Names outweigh classes."""
        key = path if path in self.standalone_names else type(module)
        return key in self.with_own_request

    def kinds(self, module: Any) -> tuple[QuantType, ...]:
        """The kinds of quantization that the class of ``module`` is mapped for."""
        return tuple(sorted(kind for kind, cls in self.custom_modules if cls is type(module)))

    @property
    def custom_classes(self) -> frozenset[type]:
        """Float classes of custom modules of any kind."""
        return frozenset(float_class for _, float_class in self.custom_modules)

    @property
    def untraced_names(self) -> frozenset[str]:
        """Names of all modules that the capture leaves whole."""
        return self.standalone_names | self.non_traceable_names

    @property
    def untraced_classes(self) -> frozenset[type]:
        """Classes of all modules that the capture leaves whole."""
        return self.standalone_classes | self.custom_classes | self.non_traceable_classes

    def uncalled(self, paths: Iterable[str]) -> list[str]:
        """Standalone names that are not among the called ``paths``."""
        return sorted(self.standalone_names - set(paths))


def requested_kind(
    activation: TensorRequest | None, weight: TensorRequest | None
) -> QuantType | None:
    """The kind of quantization (static, dynamic, weight-only) that the requests for activation and weight
    mean.

    >>> import torch
    >>> static = TensorRequest(torch.quint8, "MinMaxObserver")
    >>> requested_kind(static, TensorRequest(torch.qint8, "MinMaxObserver"))
    <QuantType.STATIC: 1>
    """
    if activation is None or weight is None:
        return None
    return quant_type_of(activation.dtype, activation.is_dynamic, weight.dtype)
