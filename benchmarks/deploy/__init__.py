"""Quantized models on the runtimes that people deploy, beside each runtime's floats and own quantizer."""
