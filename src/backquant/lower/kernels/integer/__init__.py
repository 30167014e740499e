"""Kernels of the integer reference: integers in, integers out, the same bits on every machine.

1. What moves between kernels are plain tensors of int8, uint8, int16 or uint16.
2. Sums are exact. Products of matrices run in float64, which holds every integer up to ``2**53``, so that
   neither order nor instruction set changes them; sums saturate at 32 bits, or at 40 where the description
   has biases of 64 bits.
3. Sums become results by the arithmetic and the rounding of the description
   (``backquant.dtypes.arithmetic``); what it calls ``float`` is one product of float64 for each term.
4. Functions of one value are tables of a result for each integer that may come in.
"""
