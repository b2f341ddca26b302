"""A model of the memory and the time that a graph of operations needs on IPUs.

All functions of the package ``ipu`` are pure: they do not change their arguments or global state.
Most of them have the same four arguments: the graph of a model's operations, the IPU of each
operation, the PopTorch options of a run, and the figures of an IPU. If no document of Graphcore
gives a constant of the device model, the constant is a parameter with a default. No module of this
package imports torch or NumPy, reads PopTorch's options, or runs a model. May call: documents,
errors.
"""
