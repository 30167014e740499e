"""An operator that backquant has no record of: Mish, in each spelling."""

import torch
from torch import nn
from torch.nn import functional as F

from backquant.operators import Operator, Sample

MISH = Operator(
    name="mish",
    family="activation",
    sample=Sample(),  # how it is called: one float tensor
    modules=(nn.Mish,),
    functions=(F.mish,),
    aten=(torch.ops.aten.mish.default,),
)
