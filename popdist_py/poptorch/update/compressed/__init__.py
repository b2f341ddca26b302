"""Compression of gradients that hosts send each other, to 16 bits or to PowerSGD's factors.

The compression errors of a step are added to the gradients of the next step (``error_feedback``).
Nothing here reduces gradients within a host. May call: logger, and the library's collectives.
"""
