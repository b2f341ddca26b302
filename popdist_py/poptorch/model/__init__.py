"""The wrapper of a PyTorch model that trainingModel() and inferenceModel() return.

The package ``model`` contains trainingModel(), inferenceModel() and the class PoplarExecutor. The
package ``model`` also contains the code that attaches models to devices, and the code that saves
compiled models to files. No module of this package computes the outputs or gradients of a model.
May call: every other package but data and operators.
"""
