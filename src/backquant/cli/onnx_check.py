"""``backquant check FILE.onnx --for TARGET``: the rules of a deployment target on a file of any origin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from backquant.cli.console import DONE, NO, emit, guarded, stop
from backquant.errors import UsageError, command

if TYPE_CHECKING:
    from backquant.deploy.tensorrt import Finding


_TARGETS = ("tensorrt",)
_SHOWN = 5  # findings of one rule that are printed; --json has all


def is_onnx(spec: str) -> bool:
    """Whether the argument of ``check`` names an ONNX file.

    >>> is_onnx("model.onnx"), is_onnx("x86")
    (True, False)
    """
    return spec.endswith(".onnx")


def check_file(path: str, target: str | None, *, as_json: bool) -> None:
    """Print the findings; exit 1 when one of them is an error, 0 for advice."""
    with guarded(as_json=as_json):
        if target not in _TARGETS:
            what = f"no rules are known for {target!r}" if target else "no target is named"
            fix = command("backquant", "check", path, "--for", "tensorrt")
            raise UsageError(what, where="--for", fix=fix)
        from backquant.deploy.tensorrt import check_onnx

        found = check_onnx(path)
    counts = {kind: sum(f.severity == kind for f in found) for kind in ("error", "advice")}
    total = (
        f"{counts['error']} error{'' if counts['error'] == 1 else 's'}, {counts['advice']} advice"
    )
    lines = [*_lines(found), f"{path}, for {target}: {total}"]
    data: dict[str, Any] = {"file": path, "target": target}
    data |= {"findings": [finding.to_dict() for finding in found], **counts}
    emit("\n".join(lines), as_json=as_json, data=data)
    stop(NO if counts["error"] else DONE)


def _lines(found: list[Finding]) -> Iterator[str]:
    """Each finding, of many of one rule the first ones; under each rule its source."""
    for rule in dict.fromkeys(finding.rule for finding in found):
        same = [finding for finding in found if finding.rule == rule]
        yield from map(str, same[:_SHOWN])
        if len(same) > _SHOWN:
            yield f"        … and {len(same) - _SHOWN} more (--json lists them)"
        yield f"        {same[0].citation}"
