import torch
from torch.ao.quantization.quantize_pt2e import convert_pt2e, prepare_pt2e
from torch.ao.quantization.quantizer.x86_inductor_quantizer import X86InductorQuantizer
from torch.ao.quantization import QConfigMapping

quantizer = X86InductorQuantizer()
prepared = prepare_pt2e(torch.export.export(model, inputs).module(), quantizer)
converted = convert_pt2e(prepared)
