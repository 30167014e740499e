"""Where in the module tree a node of a captured graph comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scope:
    """The module that a node calls (``call_module``) or whose ``forward`` made it.

    ``path`` is the dotted path (``""`` for the model itself); ``module_type`` its class, ``None``
    for the model itself, as in PyTorch.

    >>> Scope("encoder.fc", None).parent
    'encoder'
    """

    path: str
    module_type: type | None

    @property
    def parent(self) -> str:
        """Path of the module that contains this one; ``""`` at the top."""
        return self.path.rpartition(".")[0]
