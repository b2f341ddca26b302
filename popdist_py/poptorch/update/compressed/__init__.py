"""Compression of the gradients that hosts send to each other.

Gradients are rounded to 16 bits, or PowerSGD replaces a gradient matrix by the product of two thin
matrices. The compression errors of a training step are added to the gradients of the next training
step (module ``error_feedback``).
Nothing here reduces gradients within a host.
May call: logger, and the library's collectives.
"""
