"""Observation of the training loops of PyTorch programs, which call nothing of this library.

The start hook (``popdist_py/start_hook/popdist_torch_steps.py``) calls ``make_loop`` at the first
step of an optimizer. The package counts steps, and the time of loading, computing and updating.
The package does not import torch, because a program with an optimizer has already imported it.
No module of this package reads tensors: numbers of samples and losses stay unknown.
May call: activities, environment, heartbeat, timeline.
"""

from popdist_py.torch_loops.training_loop import make_loop

__all__ = ["make_loop"]
