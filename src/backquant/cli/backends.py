"""``BACKEND`` on the command line: a name or a file."""

from __future__ import annotations

from collections.abc import Sequence

from backquant.backend_config import BackendConfig, get_backend_config
from backquant.backend_config.installed import is_spec_file
from backquant.backend_config.validate import Finding


def load_backend(backend: str, allow: Sequence[str] | None = None) -> BackendConfig:
    """The description that ``BACKEND`` names; ``allow``: packages that a file may name classes from.

    >>> load_backend("x86").name
    'x86'
    """
    if is_spec_file(backend):
        return BackendConfig.load(backend, allow=tuple(allow or ()))
    return get_backend_config(backend)


def sound_backend(backend: str, allow: Sequence[str] | None = None) -> BackendConfig:
    """As ``load_backend``; raises ``SpecError`` for a file in which ``check`` finds an error.

    >>> sound_backend("x86").name
    'x86'
    """
    from backquant.api.arguments import sound_file

    if is_spec_file(backend):
        return sound_file(backend, tuple(allow or ()))
    return get_backend_config(backend)


def findings(backend: str, allow: Sequence[str] | None = None) -> list[Finding]:
    """Everything there is to say about a description, what only its engine knows included.

    Raises ``SpecError`` when there is no such file, ``UnknownBackendError`` when no such backend.

    >>> {finding.severity for finding in findings("x86")} <= {"note", "warning"}
    True
    """
    from backquant.api.arguments import description_findings, file_findings

    if is_spec_file(backend):
        return file_findings(backend, tuple(allow or ()))
    return description_findings(get_backend_config(backend))
