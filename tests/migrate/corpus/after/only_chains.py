#!/usr/bin/env python
# A file that uses torch for nothing else.
import backquant.ao
import torch


def qconfig():
    return backquant.ao.quantization.get_default_qconfig("x86")
