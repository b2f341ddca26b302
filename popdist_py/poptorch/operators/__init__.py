"""PopTorch's larger operations, which programs call as functions of ``poptorch.ops``.

The package contains custom operations, CTC decoding, MultiConv, operations on point clouds, and
printing.
No module of this package depends on wrapped models.
May call: tracing, enums, errors.
"""
