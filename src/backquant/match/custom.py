"""What a PrepareCustomConfig means for matching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CustomMatching"]


@dataclass(frozen=True)
class CustomMatching:
    """Modules that are no patterns: quantized on their own, by their own classes, or not traced.

    >>> CustomMatching(standalone_names=frozenset({"decoder"})).standalone_names
    frozenset({'decoder'})
    """

    standalone_names: frozenset[str] = frozenset()
    standalone_classes: frozenset[type] = frozenset()
    custom_module_classes: frozenset[type] = frozenset()
    non_traceable_names: frozenset[str] = frozenset()
    non_traceable_classes: frozenset[type] = frozenset()

    @classmethod
    def of(cls, config: Any) -> CustomMatching:
        """From a ``PrepareCustomConfig``; ``None`` gives the empty one.

        >>> CustomMatching.of(None) == CustomMatching()
        True
        """
        if config is None:
            return cls()
        custom = {
            float_class
            for mapping in config.float_to_observed_mapping.values()
            for float_class in mapping
        }
        return cls(
            frozenset(config.standalone_module_names),
            frozenset(config.standalone_module_classes),
            frozenset(custom),
            frozenset(config.non_traceable_module_names),
            frozenset(config.non_traceable_module_classes),
        )

    def is_standalone(self, path: str, module: Any) -> bool:
        """Whether a called module is quantized on its own."""
        return path in self.standalone_names or type(module) in self.standalone_classes

    def is_custom(self, module: Any) -> bool:
        """Whether a called module becomes an observed module of the user's."""
        return type(module) in self.custom_module_classes

    @property
    def untraced_names(self) -> frozenset[str]:
        """Names of all modules that the capture leaves whole."""
        return self.standalone_names | self.non_traceable_names

    @property
    def untraced_classes(self) -> frozenset[type]:
        """Classes of all modules that the capture leaves whole."""
        return self.standalone_classes | self.custom_module_classes | self.non_traceable_classes
