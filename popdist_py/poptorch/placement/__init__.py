"""Which IPU and which stage every part of a model belongs to.

Here are the marks on a model and the execution strategies.
Nothing here runs a model. May call: tracing, enums, errors.
"""
