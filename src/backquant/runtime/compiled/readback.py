"""What a compiled package holds: the kernels that its code calls, read in the code, and weights."""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from pathlib import Path

_DEFINED = re.compile(r'extern "C"\s+void\s+(cpp_fused_\w+)\([^;{]*\{')
_CALLED = re.compile(
    r"^\s+(?:AOTI_TORCH_ERROR_CODE_CHECK\()?(cpp_fused_\w+|aoti_torch_cpu_\w+)\(", re.M
)
_OURS = re.compile(
    r"backquant::(convolution|tiled_convolution|grouped|Depthwise|quantize3|join|gate|average|in_turns|attend)[<(]"
)
_NAMES = {
    "convolution": "backquant.convolution",
    "tiled_convolution": "backquant.convolution",
    "grouped": "backquant.convolution",
    "Depthwise": "backquant.depthwise",
    "quantize3": "backquant.image",
    "join": "backquant.join",
    "gate": "backquant.gate",
    "average": "backquant.average",
    "in_turns": "backquant.shuffle",
    "attend": "backquant.attention",
}


def lacks_weights(package: Path) -> bool:
    """Whether the file of a package's weights is empty: its layers have none, or hold them elsewhere."""
    with zipfile.ZipFile(package) as files:
        return any(i.filename.endswith(".blob") and not i.file_size for i in files.infolist())


def called_kernels(package: Path) -> dict[str, int]:
    """How often a package's code calls each kernel, by name: ``backquant.…``, ``onednn.…``, another
    operator of torch's, or ``generated``."""
    with zipfile.ZipFile(package) as files:
        texts = [files.read(name).decode() for name in files.namelist() if name.endswith(".cpp")]
    own: dict[str, str] = {}
    for text in texts:
        starts = list(_DEFINED.finditer(text))
        ends = [match.start() for match in starts[1:]]
        for match, end in zip(starts, [*ends, len(text)], strict=False):
            found = _OURS.search(text, match.end(), end)
            own.setdefault(match[1], _NAMES[found[1]] if found else "generated")
    counts: Counter[str] = Counter()
    for text in texts:
        for name in _CALLED.findall(text):
            counts[own.get(name) or _operator(name)] += 1
    return dict(counts)


def _operator(name: str) -> str:
    """``aoti_torch_cpu__qconv_pointwise_tensor`` as ``onednn.qconv_pointwise``.

    >>> _operator("aoti_torch_cpu__qconv_pointwise_tensor"), _operator("aoti_torch_cpu_bmm_out")
    ('onednn.qconv_pointwise', 'aten.bmm')
    """
    plain = name.removeprefix("aoti_torch_cpu_").removesuffix("_tensor").removesuffix("_out")
    return f"onednn.{plain[1:]}" if plain.startswith(("_qconv", "_qlinear")) else f"aten.{plain}"
