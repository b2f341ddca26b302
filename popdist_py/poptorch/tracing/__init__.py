"""Modules that trace one forward pass of a model.

The trace of a forward pass contains the losses, the operations, the IPU of each operation, and the
names of the tensors that the forward pass changes. A TorchFunctionMode records the calls of torch's
functions. A TorchDispatchMode records the operations that run inside torch's functions.
No module of this package compiles a model or chooses how a model runs.
May call: calls, weights, enums, errors, and the library's ipu.
"""
