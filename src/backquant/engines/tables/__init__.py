"""Lowering tables: one file per operator family, and one per set of kernels that joins them."""
