"""Gradients between hosts with fewer bits: in 16 bits, or as the factors of PowerSGD.

What a step does not send is added to the gradients of the next step (``error_feedback``).
Nothing here reduces gradients within a host. May call: logger, and the library's collectives.
"""
