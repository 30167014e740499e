#!/usr/bin/env python
# A file that uses torch for nothing else.
import torch


def qconfig():
    return torch.ao.quantization.get_default_qconfig("x86")
