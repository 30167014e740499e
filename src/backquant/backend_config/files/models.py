"""The layout of a spec file, version 1, as pydantic models. The published JSON Schema is made from them.

They check structure only (keys, kinds of values). ``read`` resolves names and builds the config.
Field names are those of PyTorch's API, so that one vocabulary serves Python, files and messages.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints, Tag
from typing_extensions import TypeAliasType

from backquant.backend_config.files.condition_models import Where
from backquant.backend_config.files.model_parts import (
    Count,
    DTypeName,
    GranularityText,
    ImportPath,
    Model,
    Number,
    ObservationName,
    QSchemeName,
    Scalar,
    kind_by_key,
    kind_of,
    union,
)
from backquant.backend_config.files.pattern_models import (
    ExtraInputs,
    OperatorNames,
    Pattern,
    PatternOrName,
    PortEntry,
    PortName,
)

__all__ = ["SCHEMA_VERSION", "FileModel"]

SCHEMA_VERSION = 1


class Constraints(Model):
    """A dtype with what the backend asks of its quantization parameters."""

    dtype: DTypeName | None = None
    quant_min_lower_bound: Number | None = None
    quant_max_upper_bound: Number | None = None
    scale_min_lower_bound: Number | None = None
    scale_max_upper_bound: Number | None = None
    scale_exact_match: Number | None = None
    zero_point_exact_match: int | None = Field(
        None, description="Alone, with scales that are measured around it."
    )
    symmetric: bool | None = Field(None, description="true: symmetric only; false: affine only.")
    granularity: GranularityText | None = None
    ch_axis: int | None = Field(None, description="The channel axis when per_channel.")
    power_of_two_scale: bool | None = None
    scales: list[Number] | None = Field(
        None, description="The scales that the hardware has; the next one above is taken."
    )
    scale_range: Annotated[list[Number | None], Field(min_length=2, max_length=2)] | None = Field(
        None, description="Smallest and largest scale; what is measured is moved into it."
    )
    scale_dtype: DTypeName | None = Field(
        None,
        description="What scales are stored in: float8_e8m0fnu (MX), float8_e4m3fn (NVFP4), float16, "
        "bfloat16.",
    )


TensorDType = TypeAliasType(
    "TensorDType",
    Annotated[
        Annotated[DTypeName, Tag("<text>")] | Annotated[Constraints, Tag("<mapping>")],
        union(kind_of, "a dtype name, or a mapping with the key dtype"),
    ],
)


class Tolerance(Model):
    """How far an engine's results may be from the integer reference, and why."""

    steps: Number = Field(
        description="Of integers; of results in float: of the 255 parts of their range."
    )
    reason: str = Field(min_length=1, description="What the engine computes otherwise.")


class DTypeConfig(Model):
    """One admitted combination of dtypes."""

    input_dtype: TensorDType | None = None
    output_dtype: TensorDType | None = None
    weight_dtype: TensorDType | None = None
    bias_dtype: DTypeName | None = None
    is_dynamic: bool | None = None
    bias_scale: Literal["input_times_weight", "output"] | None = None
    rounding: Literal["half_even", "half_up", "half_away"] | None = Field(
        None, description="How results are rounded."
    )
    requantization: Literal["float", "fixed_point", "fixed_point_twice", "shift"] | None = Field(
        None, description="By which arithmetic sums become results."
    )
    table_entries: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Of the hardware's table of a function of one value: it interpolates."
    )
    tolerance: Tolerance | None = Field(
        None,
        description="How far results may be from the integer reference; without it: not at all.",
    )
    requantization_ratio: (
        Annotated[
            Annotated[Literal["power_of_two"], Tag("<text>")]
            | Annotated[list[Number | None], Field(min_length=2, max_length=2), Tag("<list>")],
            union(kind_of, "power_of_two, or the smallest and the largest ratio"),
        ]
        | None
    ) = Field(None, description="What input scale × weight scale / output scale may be.")
    bias_step_upper_bound: Number | None = Field(
        None,
        description="What input scale × weight scale / output scale may be at most beside a bias.",
    )
    where: Where | None = Field(None, description="The uses of the operator that are admitted so.")


class Sequential(Model):
    """The fuser that puts the matched modules into one container class."""

    sequential: ImportPath
    arity: Annotated[int, Field(ge=1)] = 2


class ReversedArguments(Model):
    """A fuser that is called with the modules in the order of the pattern (last, (…, first))."""

    reversed_arguments: Callable


class ForwardArguments(Model):
    """A fuser written for the order (last, (…, first)), called with the modules in forward order."""

    forward_arguments: Callable


class Factory(Model):
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
        union(
            kind_by_key("sequential", "reversed_arguments", "forward_arguments", "factory"),
            "the import path of a function, or {sequential: <fused module>}",
        ),
    ],
)
Argument = TypeAliasType(
    "Argument",
    Annotated[
        Annotated[ImportPath, Tag("<text>")] | Scalar | Annotated[Factory, Tag("<factory>")],
        union(kind_by_key("factory"), "a number, an import path, or {factory: …}"),
    ],
)
DTypeConfigRef = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[DTypeConfig, Tag("<mapping>")],
    union(kind_of, "the name of a dtype config, or a dtype config"),
]


class Entry(Model):
    """What the backend can do with one pattern, with several that share every other field, or with every
    spelling of some operators."""

    pattern: Pattern | None = None
    patterns: list[Pattern] | None = Field(None, min_length=1)
    operators: list[OperatorNames] | None = Field(
        None,
        min_length=1,
        description="Names of operators: an entry for each module, function and method.",
        examples=[["relu", "conv2d+relu"]],
    )
    observation_type: ObservationName | None = None
    dtype_configs: list[DTypeConfigRef] | None = None
    add_dtype_configs: list[DTypeConfigRef] | None = Field(
        None, description="Appended to the dtype configs that the entry inherits."
    )
    where: Where | None = Field(
        None, description="The uses of the pattern that the backend takes; all without it."
    )
    root_module: ImportPath | None = None
    qat_module: ImportPath | None = None
    reference_quantized_module: ImportPath | None = None
    fused_module: ImportPath | None = None
    fuser_method: Callable | None = None
    ports: dict[PortName, PortEntry] | None = Field(
        None, description="How the inputs and the output of a graph pattern are observed, by name."
    )
    root_node_getter: PortName | ImportPath | None = Field(
        None, description="The name of a node of a graph pattern, or a function's import path."
    )
    extra_inputs_getter: ExtraInputs | None = Field(
        None, description="Names of inputs of a graph pattern, or a function's import path."
    )
    num_tensor_args_to_observation_type: (
        dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}$")], ObservationName] | None
    ) = None
    input_type_to_index: dict[Literal["input", "weight", "bias"], Count] | None = None
    input_output_observed: bool | None = None
    overwrite_output_fake_quantize: Callable | None = None
    overwrite_output_observer: Callable | None = None


class QuantDefault(Model):
    """How one role of tensor is measured and quantized by default."""

    observer: str = Field(
        description="How the tensor is measured: a name, or the import path of a class of observers.",
        examples=["histogram", "backquant.observe.HistogramObserver"],
    )
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
    granularity: GranularityText | None = None


class DefaultOverride(Model):
    """Other defaults for some operators."""

    operators: list[PatternOrName] = Field(min_length=1)
    activation: QuantDefault | None = None
    weight: QuantDefault | None = None
    output: QuantDefault | None = None
    qat_activation: QuantDefault | None = None
    qat_weight: QuantDefault | None = None
    qat_output: QuantDefault | None = None
    between_float_operators: bool | None = Field(
        None,
        description="Only where all activations that they read are float, and so are their readers.",
    )
    beside_float: bool | None = Field(
        None,
        deprecated=True,
        description="between_float_operators, as files of earlier versions say.",
    )


class LeaveFloat(Model):
    """Operators, or results of operators, that stay float at some places."""

    operators: list[PatternOrName] = Field(min_length=1)
    after: list[PatternOrName] = Field(
        default_factory=list, description="Where they read what one of these computes."
    )
    before: list[PatternOrName] = Field(
        default_factory=list, description="Where one of these reads what they compute."
    )
    with_table: bool | None = Field(
        None,
        description="Where they read a mask or a table: a value that depends on no float input.",
    )
    unless_between_quantized: bool | None = Field(
        None,
        description="Where an activation that they read is float, or no quantized operator reads them.",
    )
    beside_float: bool | None = Field(
        None,
        deprecated=True,
        description="unless_between_quantized, as files of earlier versions say.",
    )
    results: bool | None = Field(
        None,
        description="Only their results, where no quantized operator reads them. Stands alone.",
    )


class Defaults(Model):
    """What a user who asks for nothing in particular gets on this backend."""

    activation: QuantDefault
    weight: QuantDefault
    output: QuantDefault | None = Field(
        None, description="Of outputs, where it is not as for inputs."
    )
    qat_activation: QuantDefault | None = None
    qat_weight: QuantDefault | None = None
    qat_output: QuantDefault | None = None
    overrides: list[DefaultOverride] = Field(default_factory=list)
    leave_float: list[LeaveFloat] = Field(
        default_factory=list, description="What stays float where the request names no place."
    )


class QDQ(Model):
    """How a deployment target wants the reference model written."""

    dequantize_per_user: bool | None = Field(
        None, description="Every reader of a quantized value dequantizes it by itself."
    )
    quantize_constants: bool | None = Field(
        None, description="Values that depend on no input are quantized, too."
    )
    weights: Literal["integer", "quantized_float"] | None = Field(
        None, description="How the weights of an exported model are stored."
    )
    bias: Literal["float", "int32"] | None = Field(
        None, description="How the bias of a product is stored in ONNX."
    )
    leave_float: list[LeaveFloat] = Field(
        default_factory=list, description="What stays float whatever is asked for."
    )
    epilogues: list[Pattern] = Field(
        default_factory=list,
        description="Operators computed in the kernel of the weighted operator before them.",
    )
    additions: Literal["add", "sum"] | None = Field(
        None, description="How a float addition of two activations is written in ONNX."
    )
    attention: Literal["whole", "products"] | None = Field(
        None, description="How attention that is quantized is written."
    )
    columns: Literal["columns", "lines", "integer_lines"] | None = Field(
        None, description="How convolutions along a column of one pixel are written."
    )


class KnownSlower(Model):
    """What is slower on integers than in float, with one case that was measured."""

    operators: list[OperatorNames] = Field(
        min_length=1, description="By the names of their records."
    )
    where: Where = Field(description="The sizes for which it holds.")
    measured: str = Field(min_length=1, description="The case that was measured, in words.")
    integer_us: Number = Field(description="Its time on integers in microseconds.")
    float_us: Number = Field(description="Its time in float.")


def _no_look_alike(version: object) -> object:
    """``true`` and ``1.0`` equal 1 in Python."""
    return version if type(version) is int else str(version)


class FileModel(Model):
    """A backend description for backquant."""

    schema_version: Annotated[Literal[1], BeforeValidator(_no_look_alike)] = Field(
        description="The version of this layout."
    )
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
    slower: list[KnownSlower] = Field(
        default_factory=list, description="What is known to be slower on integers than in float."
    )
    dtype_configs: dict[str, DTypeConfig] = Field(
        default_factory=dict, description="Dtype configs by name, for the entries to refer to."
    )
    entries: list[Entry] = Field(default_factory=list)


for _model in (ReversedArguments, ForwardArguments, Factory):
    _model.model_rebuild()
