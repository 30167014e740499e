"""Modules with quantized weights: ``backquant.nn.quantized.reference``."""
