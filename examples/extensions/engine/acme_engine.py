"""An engine with one kernel, a linear layer on int8 as an operator of its own, and a backend for it."""

import torch
from torch import Tensor, nn

from backquant.backend_config import BackendConfig, BackendDefaults, DTypeConfig, QuantDefault
from backquant.lower import Emit, Engine, EngineInfo, LowerRule, MachineFacts, Site, operand
from backquant.nn.quantized.reference import Linear
from backquant.operators import entries_of


@torch.library.custom_op("acme::linear_int8", mutates_args=())
def linear_int8(
    x: Tensor, x_zero_point: int, weight: Tensor, scale: Tensor, bias: Tensor, zero_point: int
) -> Tensor:
    """Integers in, integers out; ``scale`` and ``bias`` are in steps of the result."""
    total = (x.int() - x_zero_point) @ weight.int().t()
    return (total * scale + bias).round().add(zero_point).clamp(-128, 127).to(torch.int8)


@linear_int8.register_fake
def _(x, x_zero_point, weight, scale, bias, zero_point):
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.int8)


class LinearInt8(nn.Module):
    """The kernel with its weight, as a module of the lowered model."""

    def __init__(self, x, weight, scale, bias, out) -> None:
        super().__init__()
        self.x_zero_point, self.zero_point = x.zero_point, out.zero_point
        bias = torch.zeros(len(weight)) if bias is None else bias.detach()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale * x.scale / out.scale)
        self.register_buffer("bias", bias / out.scale)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.acme.linear_int8(
            x, self.x_zero_point, self.weight, self.scale, self.bias, self.zero_point
        )


def lower_linear(site: Site):
    """The kernel for this linear layer, or the reason why it stays float."""
    x, layer = operand(site.node.args[0]), site.module
    if not x.is_integer or site.out is None:
        return site.refuse("float-input", "a float input or result", "integers on both sides")
    if layer.in_features % 16:
        return site.refuse("features", f"{layer.in_features} inputs", "a multiple of 16")
    kernel = LinearInt8(x.qparams, layer.weight, layer.weight_scale, layer.bias, site.out)
    return Emit(kernel, (x.node,), "acme.linear_int8", site.out)


def info(facts: MachineFacts) -> EngineInfo:
    """What the engine offers on this machine; raise ``backquant.EngineError`` where it cannot run."""
    return EngineInfo(
        "acme", facts.isa, facts.torch_version, ("acme.linear_int8",), (torch.int8,), (torch.int8,)
    )


ENGINE = Engine("acme", info, lambda: [LowerRule("linear", ((Linear,),), lower_linear)])


def backend_config() -> BackendConfig:
    int8 = DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float)
    activation = QuantDefault("histogram", torch.qint8, torch.per_tensor_affine)
    weight = QuantDefault("per_channel_minmax", torch.qint8, torch.per_channel_symmetric)
    made = BackendConfig("acme_cpu").set_engine("acme")
    made.set_defaults(BackendDefaults(activation, weight))
    return made.set_backend_pattern_configs(entries_of(["linear"], [int8]))
