"""An operator that backquant has no record of: sinc, in each spelling."""

import torch

from backquant.operators import Operator, Sample

SINC = Operator(
    name="sinc",
    family="activation",
    sample=Sample(),  # how it is called: one float tensor
    functions=(torch.sinc,),
    methods=("sinc", "sinc_"),
    aten=(torch.ops.aten.sinc.default,),
)
