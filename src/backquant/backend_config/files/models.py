"""The layout of a spec file, version 1, as pydantic models. The published JSON Schema is made from them.

They check structure only (keys, kinds of values). ``read`` resolves names and builds the config.
Field names are those of the seeds' API, so that one vocabulary serves Python, files and messages.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag
from typing_extensions import TypeAliasType

__all__ = ["SCHEMA_VERSION", "FileModel"]

SCHEMA_VERSION = 1

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_DOTTED = rf"{_WORD}(\.{_WORD})+"


# Tags stand in angle brackets: they appear in the location of an error, where fields do not.
def _union(choose: Any, expected: str) -> Discriminator:
    """Choose a union's member by the kind of value, so that an error names what was expected."""
    return Discriminator(
        choose, custom_error_type="kind", custom_error_message=f"expected {expected}"
    )


Operator = TypeAliasType(
    "Operator",
    Annotated[
        str,
        StringConstraints(pattern=rf"^(\.{_WORD}|{_DOTTED}|MatchAllNode)$"),
        Field(
            description="An import path (torch.nn.Conv2d, operator.add, torch.ops.aten.add.Tensor), "
            "or a method with a dot (.view)",
            examples=["torch.nn.Conv2d", ".view"],
        ),
    ],
)
ImportPath = TypeAliasType(
    "ImportPath",
    Annotated[
        str,
        StringConstraints(pattern=f"^{_DOTTED}$"),
        Field(description="The import path of a class or function.", examples=["torch.nn.Linear"]),
    ],
)
DTypeName = TypeAliasType(
    "DTypeName",
    Annotated[
        str,
        StringConstraints(pattern=r"^(torch\.)?[a-z][a-z0-9_]*$"),
        Field(
            description="A torch dtype, without or with the prefix torch.",
            examples=["quint8", "qint8", "uint8", "int8", "float16", "float32"],
        ),
    ],
)
QSchemeName = TypeAliasType(
    "QSchemeName",
    Annotated[
        str,
        StringConstraints(pattern=r"^(torch\.)?per_[a-z_]+$"),
        Field(
            description="A torch qscheme, without or with the prefix torch.",
            examples=["per_tensor_affine", "per_channel_symmetric"],
        ),
    ],
)
PowerOfTwo = TypeAliasType(
    "PowerOfTwo",
    Annotated[
        str,
        StringConstraints(pattern=r"^2\*\*-?[0-9]{1,4}$"),
        Field(description="A power of two, written as in Python.", examples=["2**-12"]),
    ],
)
Finite = Annotated[float, Field(allow_inf_nan=False)]
Scalar = Annotated[bool | int | Finite | None, Tag("<scalar>")]
ObservationName = Literal[
    "OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT",
    "OUTPUT_SHARE_OBSERVER_WITH_INPUT",
    "INPUT_OUTPUT_NOT_OBSERVED",
]
Count = Annotated[int, Field(ge=0)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, list):
        return "<list>"
    if isinstance(value, dict):
        return "<mapping>"
    return "<scalar>"


def _number_kind(value: Any) -> str:
    if isinstance(value, str):
        return "<text>"
    return "<float>" if isinstance(value, float) else "<int>"


def _kind_by_key(*keys: str) -> Any:
    """The kind, with a mapping told apart by which of ``keys`` it has (the first if none)."""

    def choose(value: Any) -> str | None:
        kind = _kind(value)
        if kind == "<mapping>":
            return f"<{next((key for key in keys if key in value), keys[0])}>"
        return kind

    return choose


Number = TypeAliasType(
    "Number",
    Annotated[
        Annotated[int, Tag("<int>")]
        | Annotated[Finite, Tag("<float>")]
        | Annotated[PowerOfTwo, Tag("<text>")],
        Discriminator(_number_kind),
    ],
)


class Constraints(_Model):
    """A dtype with what the backend asks of its quantization parameters."""

    dtype: DTypeName | None = None
    quant_min_lower_bound: Number | None = None
    quant_max_upper_bound: Number | None = None
    scale_min_lower_bound: Number | None = None
    scale_max_upper_bound: Number | None = None
    scale_exact_match: Number | None = None
    zero_point_exact_match: int | None = None
    symmetric: bool | None = Field(None, description="true: symmetric only; false: affine only.")
    granularity: Literal["per_tensor", "per_channel"] | None = None
    ch_axis: int | None = Field(None, description="The channel axis when per_channel.")
    power_of_two_scale: bool | None = None


TensorDType = TypeAliasType(
    "TensorDType",
    Annotated[
        Annotated[DTypeName, Tag("<text>")] | Annotated[Constraints, Tag("<mapping>")],
        _union(_kind, "a dtype name, or a mapping with the key dtype"),
    ],
)


class DTypeConfig(_Model):
    """One admitted combination of dtypes."""

    input_dtype: TensorDType | None = None
    output_dtype: TensorDType | None = None
    weight_dtype: TensorDType | None = None
    bias_dtype: DTypeName | None = None
    is_dynamic: bool | None = None
    bias_scale: Literal["input_times_weight"] | None = None


Element = TypeAliasType(  # type: ignore[misc]  # mypy knows no recursive alias of this form
    "Element",
    Annotated[
        Annotated[Operator, Tag("<text>")]
        | Scalar
        | Annotated[list["Element"], Tag("<list>"), Field(min_length=1)],  # type: ignore[misc]
        _union(_kind, "an operator, MatchAllNode, a literal, or a list [operator, argument, …]"),
    ],
)


class ReversedPattern(_Model):
    """The reversed nested form: [operator, argument, …], the last operator first."""

    reversed: Element


class PatternNode(_Model):
    """One operator of a pattern graph, or one value that it must be called with."""

    op: Operator | None = None
    inputs: list[Count] | None = Field(None, description="Positions of earlier nodes.")
    literal: str | bool | int | Finite | None = None
    constant: ImportPath | None = Field(None, description="A literal such as torch.float16.")


class PatternGraph(_Model):
    """A pattern as a graph in dataflow order; the last node is where matching starts."""

    nodes: list[PatternNode] = Field(min_length=1)


Pattern = TypeAliasType(
    "Pattern",
    Annotated[
        Annotated[Operator, Tag("<text>")]
        | Annotated[list[Operator], Tag("<list>"), Field(min_length=2)]
        | Annotated[ReversedPattern, Tag("<reversed>")]
        | Annotated[PatternGraph, Tag("<nodes>")],
        _union(
            _kind_by_key("reversed", "nodes"),
            "an operator, a list of operators in forward order, {reversed: […]} or {nodes: […]}",
        ),
    ],
)


class Sequential(_Model):
    """The fuser that puts the matched modules into one container class."""

    sequential: ImportPath
    arity: Annotated[int, Field(ge=1)] = 2


class ReversedArguments(_Model):
    """A fuser that is called with the modules in the order of the pattern (last, (…, first))."""

    reversed_arguments: Callable


class ForwardArguments(_Model):
    """A fuser written for the order (last, (…, first)), called with the modules in forward order."""

    forward_arguments: Callable


class Factory(_Model):
    """An observer class with arguments filled in: factory.with_args(…)."""

    factory: ImportPath
    with_args: dict[str, Argument] = Field(default_factory=dict)


Callable = TypeAliasType(
    "Callable",
    Annotated[
        Annotated[ImportPath, Tag("<text>")]
        | Annotated[Sequential, Tag("<sequential>")]
        | Annotated[ReversedArguments, Tag("<reversed_arguments>")]
        | Annotated[ForwardArguments, Tag("<forward_arguments>")]
        | Annotated[Factory, Tag("<factory>")],
        _union(
            _kind_by_key("sequential", "reversed_arguments", "forward_arguments", "factory"),
            "the import path of a function, or {sequential: <fused module>}",
        ),
    ],
)
Argument = TypeAliasType(
    "Argument",
    Annotated[
        Annotated[ImportPath, Tag("<text>")] | Scalar | Annotated[Factory, Tag("<factory>")],
        _union(_kind_by_key("factory"), "a number, an import path, or {factory: …}"),
    ],
)
DTypeConfigRef = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[DTypeConfig, Tag("<mapping>")],
    _union(_kind, "the name of a dtype config, or a dtype config"),
]


class Entry(_Model):
    """What the backend can do with one pattern, or with several that share every other field."""

    pattern: Pattern | None = None
    patterns: list[Pattern] | None = Field(None, min_length=1)
    observation_type: ObservationName | None = None
    dtype_configs: list[DTypeConfigRef] | None = None
    add_dtype_configs: list[DTypeConfigRef] | None = Field(
        None, description="Appended to the dtype configs that the entry inherits."
    )
    root_module: ImportPath | None = None
    qat_module: ImportPath | None = None
    reference_quantized_module: ImportPath | None = None
    fused_module: ImportPath | None = None
    fuser_method: Callable | None = None
    root_node_getter: ImportPath | None = None
    extra_inputs_getter: ImportPath | None = None
    num_tensor_args_to_observation_type: (
        dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}$")], ObservationName] | None
    ) = None
    input_type_to_index: dict[Literal["input", "weight", "bias"], Count] | None = None
    input_output_observed: bool | None = None
    overwrite_output_fake_quantize: Callable | None = None
    overwrite_output_observer: Callable | None = None


class QuantDefault(_Model):
    """How one role of tensor is measured and quantized by default."""

    observer: str = Field(description="How the tensor is measured.", examples=["histogram"])
    dtype: DTypeName | None = None
    qscheme: QSchemeName | None = None
    quant_min: int | None = None
    quant_max: int | None = None
    reduce_range: bool | None = None
    eps: Number | None = None
    ch_axis: int | None = None
    averaging_constant: Number | None = None
    is_dynamic: bool | None = None
    fake_quantize: str | None = Field(None, description="How it is quantized during training.")


class DefaultOverride(_Model):
    """Other defaults for some operators."""

    operators: list[Pattern] = Field(min_length=1)
    activation: QuantDefault | None = None
    weight: QuantDefault | None = None
    qat_activation: QuantDefault | None = None
    qat_weight: QuantDefault | None = None


class Defaults(_Model):
    """What a user who asks for nothing in particular gets on this backend."""

    activation: QuantDefault
    weight: QuantDefault
    qat_activation: QuantDefault | None = None
    qat_weight: QuantDefault | None = None
    overrides: list[DefaultOverride] = Field(default_factory=list)


class QDQ(_Model):
    """How a deployment target wants the reference model written."""

    dequantize_per_user: bool | None = Field(
        None, description="Every reader of a quantized value dequantizes it by itself."
    )
    quantize_constants: bool | None = Field(
        None, description="Values that depend on no input are quantized, too."
    )
    quantized_outputs: Literal["always", "where_read"] | None = Field(
        None, description="Where the outputs of quantized operators are quantized."
    )
    weights: Literal["integer", "quantized_float"] | None = Field(
        None, description="How the weights of an exported model are stored."
    )
    only_between_quantized: list[Pattern] = Field(
        default_factory=list,
        description="Operators that are quantized only between quantized operators.",
    )


class FileModel(_Model):
    """A backend description for backquant."""

    schema_version: Literal[1] = Field(description="The version of this layout.")
    name: str = Field(description="The name of the backend.")
    engine: str | None = Field(
        None, description="What executes the lowered model; without it, the reference model only."
    )
    extends: str | None = Field(
        None, description="A backend's name, or a file relative to this one, to start from."
    )
    remove: list[Pattern] = Field(
        default_factory=list, description="Patterns of the extended backend to leave out."
    )
    defaults: Defaults | None = None
    qdq: QDQ | None = Field(
        None, description="Rules of a deployment target for the reference model."
    )
    dtype_configs: dict[str, DTypeConfig] = Field(
        default_factory=dict, description="Dtype configs by name, for the entries to refer to."
    )
    entries: list[Entry] = Field(default_factory=list)


for _model in (ReversedArguments, ForwardArguments, Factory):
    _model.model_rebuild()
