"""Compression of the gradients that hosts send to each other.

Gradients are rounded to 16 bits, or a gradient matrix is replaced by the two factors of PowerSGD.
The compression errors of a step are added to the gradients of the next step (module
``error_feedback``).
Nothing here reduces gradients within a host.
May call: logger, and the library's collectives.
"""
