"""Biases of quantized layers, corrected by what a few batches of the calibration say."""
