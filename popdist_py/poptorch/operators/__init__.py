"""PopTorch's operations that are more than a name: ``poptorch.ops`` is their face.

Here live custom operations, decoding, multi-convolutions, point clouds and printing.
Nothing here knows wrapped models. May call: tracing, enums, errors.
"""
