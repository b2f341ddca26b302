"""Modules that trace one forward of a model.

A trace contains the losses, the operations, the IPU of each operation, and the names of the tensors
that the forward changes. A TorchFunctionMode follows the calls of torch's functions. Inside these
calls, a TorchDispatchMode records torch's operations. No module of this package compiles a model or
chooses how a model runs.
May call: calls, weights, enums, errors, and the library's ipu.
"""
