"""Integer kernels: plain functions on plain integer tensors, with literal qparams, and modules.

Everything here is found by its import path, so that graphs that call it can be stored as text.
"""
