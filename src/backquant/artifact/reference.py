"""The reference model of a lowered one in its file: what the loaded model shows, and takes checkpoints by.

1. It is stored where the model shows it, and it has no part that a file cannot hold.
2. Its integers are mostly the very tensors of the kernels, which a file has once. Where they are not, and the
   file would grow by more than a tenth, it is left out: a loaded model then shows its kernels.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from backquant.artifact.json_values import Decoder, Encoder
from backquant.artifact.manifest import STEM
from backquant.artifact.modules import ModuleDecoder, ModuleEncoder
from backquant.artifact.tensors import TensorWriter
from backquant.convert import ReferenceModel, reference_state
from backquant.errors import ArtifactError
from backquant.graph import Scope, rebuilt
from backquant.nn.quantized.reference.integer_weights import IntegerWeights
from backquant.prepare import Record, with_state
from backquant.prepare.record import QParamsKey
from backquant.runtime import QuantizedModel
from backquant.runtime.dialect_operators import functional_name

_WHERE = "the reference model"
_SMALL = 4096  # bytes of scales and the like, in a file of any size


def encode_reference(
    model: QuantizedModel, encoder: Encoder, writer: TensorWriter
) -> dict[str, Any] | None:
    """Rules 1 and 2; ``None``: it is left out."""
    if model.origin is None or not model._shows_tensors():
        return None
    reference, known, size = model.origin.reference, len(writer.tensors), writer.size
    if any(isinstance(part, ReferenceModel) for path, part in reference.named_modules() if path):
        return None
    try:
        stored = ModuleEncoder(encoder).encode(reference)
    except ArtifactError:
        stored = {}
    state, nodes = reference_state(reference), reference.graph.nodes
    functional = [n.name for n in nodes if functional_name(n) and n.name in state.scopes]
    scopes = {name: state.scopes[name].path for name in functional}
    stems = (*scopes.values(), *(key.stem for key in state.keys.values()))
    are_plain = all(STEM.fullmatch(stem) for stem in stems)
    if not stored or not are_plain or writer.size > size * 1.1 + _SMALL:
        writer.drop_after(known)
        return None
    keys = {name: list(key) for name, key in state.keys.items()}
    return {"model": stored, "keys": keys, "scopes": scopes}


def decode_reference(stored: dict[str, Any], decoder: Decoder, record: Record) -> ReferenceModel:
    """The reference model, with what ``record`` knows of it."""
    decoded = ModuleDecoder(decoder).decode(stored["model"])
    if not isinstance(decoded, fx.GraphModule):
        raise TypeError("the reference model is no graph")
    for module in decoded.modules():
        _check_weights(module)
    keys = {name: QParamsKey(*key) for name, key in stored["keys"].items()}
    scopes = {name: Scope(path, None) for name, path in stored["scopes"].items()}
    made = rebuilt(ReferenceModel, decoded, decoded)
    with_state(made, _with(record, keys, scopes))
    return made


def _with(record: Record, keys: dict[str, QParamsKey], scopes: dict[str, Scope]) -> Record:
    shared = {name: vars(record)[name] for name in Record.__dataclass_fields__}
    own = {"dialect": "decomposed", "keys": keys, "scopes": scopes, "report_of": None}
    return Record(**{**shared, **own})


def _check_weights(module: nn.Module) -> None:
    """Engines read as many scales and zero points as the weight has slices."""
    if not isinstance(module, IntegerWeights):
        return
    for name in module.weight_names:
        weight, axis = module.get_buffer(name), vars(module)[f"{name}_axis"]
        for part in ("scale", "zero_point"):
            numbers = module.get_buffer(f"{name}_{part}")
            slices = weight.shape[axis] if -weight.dim() <= axis < weight.dim() else 0
            if numbers.dim() < 2 and numbers.numel() not in (1, slices):
                kind, count = type(module).__name__, numbers.numel()
                what = f"{count} numbers in {name}_{part} of {kind}, for {slices} slices"
                raise ArtifactError(what, where=_WHERE)
