"""The engines of this package: what they are on a machine, and their tables of lowering rules.

Each is an entry point of the group ``backquant.engines``, as those of other packages are;
``backquant.lower.find_engine`` finds them.
"""
