"""Seven-bit activations: one row says where values are stored, how many bits they have, of what kind."""

import torch

from backquant.dtypes import Format, QDType

UINT7 = QDType(torch.uint7, torch.uint8, 7, Format.UNSIGNED)
