"""A pure model of the device: what an IPU has, and what a graph needs of it in memory and time.

Everything is a function of values: a graph of operations with their shapes, where each stands, the
settings of a run, and an IPU. Figures that no source gives are parameters with a default.
Nothing here imports torch or NumPy, knows PopTorch's options, or runs anything.
May call: documents, errors.
"""
