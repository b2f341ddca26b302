"""The wrapper of a PyTorch model that trainingModel() and inferenceModel() return.

The package contains trainingModel(), inferenceModel(), the class PoplarExecutor with its parts, the
access to devices, and the files of saved models.
No module of this package computes the outputs or gradients of a model.
May call: every other package but data and operators.
"""
