"""Re-creates, from memory, the custom operation (cube) of PopTorch's user guide.

A compiled operation cannot run here: the program has to see an error that says so.
"""

import ctypes
import pathlib
import sys

import torch

import poptorch

if not pathlib.Path("libcustom_cube_op.so").exists():
    print("no libcustom_cube_op.so: the operation is not compiled")
else:
    myop = ctypes.cdll.LoadLibrary("libcustom_cube_op.so")


def test():
    inputs = torch.tensor([[-1.0], [2.0], [3.0]])

    class BasicNetwork(torch.nn.Module):
        def forward(self, x, bias):
            x, y = poptorch.custom_op(
                [x, bias],
                "Cube",
                "com.acme",
                1,
                example_outputs=[x, x],
                attributes={"alpha": 0.02},
            )
            return x, y

    model = BasicNetwork()
    inference_model = poptorch.inferenceModel(model)
    return inference_model(inputs, torch.tensor([1.0]))


try:
    test()
except poptorch.Error as error:
    print(error)
    sys.exit(7)
