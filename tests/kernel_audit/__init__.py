"""Every kernel beside the reference model: generated operators, shapes, memory layouts and integers.

``cases`` draws an operator, ``layouts`` how its inputs lie in memory, ``check`` compares. A few minutes of it
are tests (``tests/lower/kernels/test_against_reference.py``); ``tools/kernel_audit.py`` runs thousands.
"""
