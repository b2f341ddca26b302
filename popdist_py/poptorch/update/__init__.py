"""The weight update of a training model, with gradient reduction, loss scaling and rounding.

The gradients of all replicas are reduced once per accumulation window (the micro-batches between
two weight updates), before the optimiser step.
No module here runs a forward pass.
May call: compressed, weights, optim, optimizer_state, enums, logger, errors, and the library's
collectives, torch_states and activities.
"""
