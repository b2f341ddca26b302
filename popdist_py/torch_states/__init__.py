"""Checkpoints in memory for trainings with torch, with copies that run beside the training.

state_parts       the tensors of a state, apart from its other values
host_random       the states of the random number generators of torch, Python and NumPy
memory_copies     the copies of states to memory, and the wait for these copies
loop_checkpoints  checkpoints for any PyTorch loop, such as one with DistributedDataParallel

No module of this package knows the models and loaders of PopTorch.
May call: activities, checkpoint, context, environment, heartbeat, memory_slots, own_files.
"""
