"""Modules that handle the arguments and results of a call of a wrapped model.

The modules of the package handle nested values, default arguments, custom types, the sizes of
batches, and the transfer between host and device. No module of this package depends on options or
models.
May call: enums, logger, errors, and the library's popart.
"""
