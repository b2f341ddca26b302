"""Modules that trace one forward of a model.

A trace contains the losses, the operations, the IPU of each operation, and the changes that the
forward makes. A TorchFunctionMode follows the calls of torch's functions. A TorchDispatchMode
records the operations inside these calls. No module of this package compiles a model or chooses how
a model runs. May call: calls, weights, enums, errors.
"""
