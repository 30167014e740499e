"""Small models of many kinds, with odd shapes and extreme values, beside our own reference model.

``families`` draws a model, ``values`` its weights and inputs, ``check`` compares every form of it. Some
hundred
are tests (``test_generated.py``); ``tools/random_graphs.py --against reference`` runs thousands.
"""
