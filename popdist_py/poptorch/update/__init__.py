"""From gradients to new weights: reduce once, then step.

Here live gradients of all replicas, loss scaling, the device's optimisers, and rounding.
Nothing here runs a forward. May call: optim, optimizer_state, enums, logger,
errors, and the library's collectives and activities.
"""
