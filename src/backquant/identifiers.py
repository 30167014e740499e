"""Names that graphs can hold: ASCII identifiers, since ``torch.fx`` writes them into Python source.

``nn.Module`` takes any text as the name of a module, parameter or buffer. In source a keyword or a quote is a
syntax error, and Python compares identifiers after NFKC normalisation: µ and μ would be one attribute.

1. A plain name is an ASCII identifier, no keyword, and begins neither with two underscores nor with
   ``PREFIX``. Plain names stay as they are.
2. The outermost module is the result, which has attributes of its own: names of its children, parameters and
   buffers are plain if they are not those (``RESULTS_OWN``).
3. Any other name is written as ``PREFIX`` and its characters: letters and digits as they are, an underscore
   twice, others as their code point between underscores. So no two names become one, and ``label`` gives the
   user's own back.
"""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

PREFIX = "bqname_"
_WRAPPERS = ("module.", "_orig_mod.")
_ASCII_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(rf"{PREFIX}[A-Za-z0-9_]*")
_Data = TypeVar("_Data")
# what graph modules have, beside what ``nn.Module`` keeps for itself, and results of backquant
RESULTS_OWN = frozenset(
    (
        *(
            "add_submodule",
            "code",
            "delete_all_unused_submodules",
            "delete_submodule",
            "graph",
            "meta",
        ),
        *("print_readable", "recompile", "shape_env", "to_folder", "_boxed_call", "_code"),
        *("_create_node_hooks", "_deepcopy_hooks", "_deepcopy_init", "_erase_node_hooks", "_graph"),
        *("_lineno_map", "_prologue_start", "_recompile_submodules", "_register_create_node_hook"),
        *("_register_deepcopy_hook", "_register_erase_node_hook", "_register_replace_node_hook"),
        *("_replace_hooks", "_set_replace_hook", "_tracer_cls", "_tracer_extras"),
        *("_unregister_create_node_hook", "_unregister_deepcopy_hook"),
        *("_unregister_erase_node_hook", "_unregister_replace_node_hook"),
        *(
            "_ddp_params_and_buffers_to_ignore",
            "audit",
            "backend_config",
            "changes",
            "check_finite",
            "check_unedited",
        ),
        *(
            "compilation",
            "engine",
            "example",
            "export",
            "graph_module",
            "input_qparams",
            "interface",
        ),
        *("kernels", "left_in_float", "lowered", "origin", "original_weights_lookup"),
        *("output_qparams", "plan", "qparams", "record", "replays", "report", "save", "source"),
        *("_alone", "_as_written", "_begin_face", "_begin_plainly", "_begin_replays", "_called"),
        *("_check_inputs", "_checks_calls", "_has_kernels", "_held", "_hold", "_is_plain"),
        *("_is_unchanged", "_literally", "_loaded", "_over", "_packed_weights", "_program"),
        *("_quantized_inputs", "_returned", "_run", "_show", "_shows_tensors", "_take_over"),
        *("_watched", "_weight_numbers"),
    )
)
_CHARACTER = re.compile(r"__|_([0-9a-f]{1,5}|10[0-9a-f]{4})_|([A-Za-z0-9])")


def is_identifier(name: object) -> bool:
    """Whether ``name`` can stand in source as an attribute or argument, and means itself there.

    >>> [is_identifier(name) for name in ("conv1", "in", "µ", "a b", "ｆｏｒｗａｒｄ", "0", "")]
    [True, False, False, False, False, False, False]
    """
    return (
        isinstance(name, str)
        and _ASCII_IDENTIFIER.fullmatch(name) is not None
        and not keyword.iskeyword(name)
    )


def identifier(name: str) -> str:
    """``name`` if it is plain or a number, as in ``nn.Sequential``; otherwise a plain name for it alone.

    >>> [identifier(name) for name in ("conv1", "0", "in", "a_b c", "µ", "μ", "__x")]
    ['conv1', '0', 'bqname_in', 'bqname_a__b_20_c', 'bqname__b5_', 'bqname__3bc_', 'bqname_____x']
    """
    is_index = name.isascii() and name.isdecimal()
    if is_index or (is_identifier(name) and not name.startswith(("__", PREFIX))):
        return name
    return _written_out(name)


def attribute(name: str) -> str:
    """``identifier`` for what the outermost module holds.

    >>> [attribute(name) for name in ("conv1", "in", "report")]
    ['conv1', 'bqname_in', 'bqname_report']
    """
    return _written_out(name) if name in RESULTS_OWN else identifier(name)


def _written_out(name: str) -> str:
    return PREFIX + "".join(map(_written, name))


def _written(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    return "__" if character == "_" else f"_{ord(character):x}_"


def label(path: str) -> str:
    """The user's own names of a path of plain ones.

    >>> label("heads.bqname__b5_.0"), label("layers.0.weight")
    ('heads.µ.0', 'layers.0.weight')
    """
    if PREFIX not in path:
        return path
    return ".".join(map(_label, path.split(".")))


def labelled(text: str) -> str:
    """``text`` with the user's own names for those that ``identifier`` wrote, to be read: what cannot be
    printed in a line is escaped.

    >>> labelled("heads_bqname_in: module 'heads.bqname_in' is float")
    "heads_in: module 'heads.in' is float"
    """
    return _PLAIN.sub(lambda match: _shown(_label(match[0])), text) if PREFIX in text else text


def labelled_data(data: _Data) -> _Data:
    """``data`` of dataclasses, tuples, lists and dicts with ``labelled`` texts.

    >>> labelled_data({"bqname_in": ("heads.bqname_in", 1)})
    {'in': ('heads.in', 1)}
    """
    return _labelled_data(data)  # type: ignore[no-any-return]


def _labelled_data(data: Any) -> Any:
    if isinstance(data, str) and type(data) is str:
        return labelled(data)
    if isinstance(data, dict):
        return type(data)((_labelled_data(k), _labelled_data(v)) for k, v in data.items())
    if type(data) in (tuple, list):
        return type(data)(map(_labelled_data, data))
    if not dataclasses.is_dataclass(data) or isinstance(data, type):
        return data
    before = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    after = {name: _labelled_data(value) for name, value in before.items()}
    changed = {name: value for name, value in after.items() if value != before[name]}
    return dataclasses.replace(data, **changed) if changed else data


def wrapper_prefix(names: Collection[str], own: Iterable[str]) -> str:
    """What ``nn.DataParallel`` and ``torch.compile`` have put before all ``names``, and not before ``own``.

    >>> wrapper_prefix(["module.fc.weight", "module.fc.bias"], ["fc.weight", "fc.bias"])
    'module.'
    """
    found = ""
    for prefix in _WRAPPERS * 2:
        if names and all(name.startswith(found + prefix) for name in names):
            found += prefix
    return "" if any(name.startswith(found) for name in own) else found


def _shown(name: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def _label(name: str) -> str:
    if not name.startswith(PREFIX):
        return name
    own = _CHARACTER.sub(_read, name.removeprefix(PREFIX))
    return own if name in (identifier(own), attribute(own)) else name


def _read(match: re.Match[str]) -> str:
    code, plain = match.groups()
    return plain or ("_" if code is None else chr(int(code, 16)))


def identifiers(names: Iterable[str]) -> str:
    """A path of these names, from the outermost.

    >>> identifiers(["heads", "in"])
    'heads.bqname_in'
    """
    first, *rest = names
    return ".".join((attribute(first), *map(identifier, rest)))
