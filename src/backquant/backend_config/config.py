"""A description with what can be done with it: files, checks, differences."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from backquant.backend_config.description import Description

if TYPE_CHECKING:
    from backquant.backend_config.diff import BackendDiff
    from backquant.backend_config.validate import Finding


class BackendConfig(Description):
    """The patterns that a backend quantizes, and how each becomes a reference pattern.

    Invariants

    1. There is one entry per pattern, whichever way the pattern is spelled; a later registration
       overrides the entry and keeps its place.
    2. ``engine`` is the name of the engine that runs the lowered model; None: there is only the
       reference model.
    3. ``qdq`` are the rules of a deployment target for that reference model; None: the default rules.
    4. ``slower`` are records of what is slower on integers there, for kernels that cannot be timed here.

    Two are equal when name, engine, defaults, qdq, slower, and the entries in their order are equal.

    >>> import torch
    >>> from backquant.backend_config import BackendPatternConfig, DTypeConfig
    >>> int8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
    >>> linear = BackendPatternConfig(torch.nn.Linear).add_dtype_config(int8)
    >>> backend = BackendConfig("mine").set_backend_pattern_config(linear)
    >>> [str(config.normal_pattern) for config in backend.configs]
    ['torch.nn.Linear']
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as YAML (``.yaml``, ``.yml``) or JSON (``.json``), under a temporary name first.

        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     BackendConfig("mine").save(pathlib.Path(folder, "mine.yaml"))
        ...     BackendConfig.load(pathlib.Path(folder, "mine.yaml")).name
        'mine'
        """
        from backquant.backend_config.files.store import save_file

        save_file(self, path)

    @classmethod
    def of(cls, description: Description) -> Self:
        """A description as a ``BackendConfig``, with the same entries.

        >>> BackendConfig.of(Description("mine"))
        BackendConfig('mine', configs=[])
        """
        if isinstance(description, cls):
            return description
        made = cls()
        made.__dict__.update(vars(description))
        return made

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, allow: Iterable[str] = ()) -> Self:
        """Read a description from a YAML or JSON file.

        ``allow``: packages besides torch and backquant that the file may name classes and functions of.

        Raises ``SpecError`` with file, line and field. See ``save`` for an example.
        """
        from backquant.backend_config.files.store import load_with_places

        return cls.of(load_with_places(path, tuple(allow)).config)

    def validate(self, engine: Any = None) -> list[Finding]:
        """What is wrong with this description, as findings; ``engine`` adds checks that only it can make.

        >>> import torch
        >>> from backquant.backend_config import BackendPatternConfig
        >>> mine = BackendConfig("mine").set_backend_pattern_config(BackendPatternConfig(torch.add))
        >>> [(found.severity, found.rule) for found in mine.validate()]
        [('warning', 'no-dtype-configs')]
        """
        from backquant.backend_config.validate import validate

        return validate(self, engine)

    def diff(self, other: BackendConfig) -> BackendDiff:
        """What differs between this backend and another, by operator and field.

        >>> import torch
        >>> from backquant.backend_config import BackendPatternConfig
        >>> mine = BackendConfig("mine").set_backend_pattern_config(BackendPatternConfig(torch.add))
        >>> [(change.kind, change.pattern) for change in mine.diff(BackendConfig("mine")).entries]
        [('removed', 'torch.add')]
        """
        from backquant.backend_config.diff import diff

        return diff(self, other)
