"""Migration of one Python source: from its text to the new one, and what is left to a person."""

from __future__ import annotations

import ast
import re
import warnings

import libcst as cst
from libcst.metadata import MetadataWrapper

from backquant.migrate.calls import rewrite_calls
from backquant.migrate.changes import applied
from backquant.migrate.decide import decide
from backquant.migrate.decisions import Decisions
from backquant.migrate.finding import FileResult, Finding
from backquant.migrate.local_names import names_of
from backquant.migrate.statements import rewrite_imports
from backquant.migrate.strings import report_strings

#: A part of every dotted name that is migrated.
_PART = re.compile(r"\b(ao|quantization|quantized|quantizable|intrinsic|qat)\b")


def mentions_quantization(text: str) -> bool:
    """Whether a text may have something to migrate: cheap, true rather too often than too seldom.

    >>> mentions_quantization("import torch\\n"), mentions_quantization("from torch.ao import nn\\n")
    (False, True)
    """
    return "torch" in text and _PART.search(text) is not None


def migrate_source(text: str, path: str = "<text>") -> FileResult:
    """Rewrite a Python source from ``torch.ao.quantization`` to backquant.

    Comments and layout of what is not rewritten stay. A source that uses a flow without counterpart
    (eager mode, TorchScript, PT2E) is left as it is, since what it shares with that flow, QConfigs
    and observers, would be of two libraries. Broken Python raises nothing: it is a finding.

    >>> print(migrate_source("from torch.ao.quantization import QConfig\\n").after, end="")
    from backquant import QConfig
    >>> migrate_source("import torch.ao.quantization as q\\nq.prepare(m)\\n").findings[0].what
    'torch.ao.quantization.prepare'
    """
    if not mentions_quantization(text):
        return FileResult(path, text, text)
    if _is_too_deep(text):
        return FileResult(path, text, text, (_too_deep(path),))
    try:
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        return _migrated(wrapper, text, path)
    except cst.ParserSyntaxError as error:
        return FileResult(path, text, text, (_broken(path, error),))
    except RecursionError:
        return FileResult(path, text, text, (_too_deep(path),))


def _migrated(wrapper: MetadataWrapper, text: str, path: str) -> FileResult:
    names = names_of(wrapper)
    decisions = decide(names, reexports=path.endswith("__init__.py"))
    if any(why.holds for _, _, why in decisions.reported):
        return FileResult(path, text, text, _findings(decisions, path))
    rewrite_calls(decisions)
    report_strings(decisions)
    rewrite_imports(names, decisions.changes)
    if not decisions.changes.edits:
        return FileResult(path, text, text, _findings(decisions, path))
    after = applied(wrapper.module, decisions.changes.edits).code
    cst.parse_module(after)  # never give back what cannot be read
    targets = frozenset(resolved.target for resolved in decisions.resolved)
    return FileResult(path, text, after, _findings(decisions, path), targets)


def _findings(decisions: Decisions, path: str) -> tuple[Finding, ...]:
    """What was reported, in the order of the file, each place once."""
    findings = {
        Finding(path, *decisions.names.line(node), why.kind, what, why.why, why.how, why.holds)
        for node, what, why in decisions.reported
    }
    return tuple(sorted(findings))


def _broken(path: str, error: cst.ParserSyntaxError) -> Finding:
    return Finding(
        path,
        error.raw_line,
        error.raw_column,
        "syntax error",
        "this file is not valid Python",
        error.message.splitlines()[0],
        "correct it and run migrate again",
    )


def _is_too_deep(text: str) -> bool:
    """Whether a text is nested too deeply for Python itself; it would crash libcst's parser.

    A text that this Python cannot parse for another reason may be in the syntax of another version.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the text, not of ours: invalid escapes
            ast.parse(text)
    except (RecursionError, MemoryError):
        return True
    except SyntaxError as error:
        return "too many nested" in str(error)
    except ValueError:  # a null byte
        return False
    return False


def _too_deep(path: str) -> Finding:
    return Finding(
        path,
        0,
        0,
        "too deep",
        "expressions of this file are nested too deeply",
        "Python's own limit of nesting is reached",
        "split the expression, or change the imports by hand",
    )
