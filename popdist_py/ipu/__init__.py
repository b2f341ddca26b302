"""A model of the memory and the time that a graph of operations needs on IPUs.

All functions are pure. Their arguments are a graph of operations with their shapes, the placement
of the operations on IPUs, the settings of a run, and an IPU. Figures without a source are
parameters with a default.
No module of this package imports torch or NumPy, reads PopTorch's options, or runs a model.
May call: documents, errors.
"""
