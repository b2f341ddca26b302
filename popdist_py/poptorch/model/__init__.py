"""The wrapped model that a program holds: its life cycle, and what it shows.

Here live trainingModel, inferenceModel, PoplarExecutor and its parts, devices, and saved models.
Nothing here computes. May call: every other package but data and operators.
"""
