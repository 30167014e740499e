"""What is asked of the C++ compiler before a model is compiled with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from backquant.errors import EngineError
from backquant.native.build import find_compiler
from backquant.runtime.compiled.inductor import check_compiler


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_one_that_links_its_runtime_statically_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that AOTInductor made with such a compiler ended the process when it was loaded (torch 2.13)."""
    check_compiler()
    own = tmp_path / "static-g++"
    own.write_text(f'#!/bin/sh\nexec {find_compiler()} "$@" -static-libstdc++ -static-libgcc\n')
    own.chmod(0o755)
    monkeypatch.setenv("CXX", str(own))
    with pytest.raises(EngineError, match="links its libraries statically") as told:
        check_compiler()
    assert str(own) in str(told.value)
