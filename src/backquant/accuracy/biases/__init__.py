"""Biases and rows of weights, corrected by what a few batches of the calibration say."""
