"""Which IPU and which stage every part of a model belongs to.

Here live the marks on a model, execution strategies, the recorder of a forward, and its values.
Nothing here runs a model. May call: calls, forward_phase, enums, errors.
"""
