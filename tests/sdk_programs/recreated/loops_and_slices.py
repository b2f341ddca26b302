"""Re-creates, from memory, the loop, condition, slice and print examples of PopTorch's user guide."""

import torch

import poptorch


class ForLoop(torch.nn.Module):
    def forward(self, x):
        def body(x):
            return x * 2

        return poptorch.for_loop(10, body, [x])[0]


class Conditional(torch.nn.Module):
    def forward(self, condition, x, y):
        def body_true(x, y):
            return x + y

        def body_false(x, y):
            return x * y

        return poptorch.cond(condition, body_true, [x, y], body_false, [x, y])


class Slices(torch.nn.Module):
    def forward(self, x, start):
        part = poptorch.dynamic_slice(x, 0, start, 2, 1)
        return part, poptorch.dynamic_update(x, part * 10, 0, start, 2)


class Printer(torch.nn.Module):
    def forward(self, x):
        return poptorch.ipu_print_tensor(x, "x", digits=3) + 0


class Serialised(torch.nn.Module):
    def forward(self, a, b):
        x = poptorch.serializedMatMul(a, b, poptorch.MatMulSerializationMode.InputChannels, 2)
        x = poptorch.set_available_memory(x, 0.1)
        return poptorch.recomputationCheckpoint(poptorch.nop(x))


x = torch.tensor([1.0, 2.0])
print(poptorch.inferenceModel(ForLoop())(x))
cond = poptorch.inferenceModel(Conditional())
print(cond(torch.tensor([True]), torch.tensor([2.0]), torch.tensor([3.0])))
print(cond(torch.tensor([False]), torch.tensor([2.0]), torch.tensor([3.0])))
print(poptorch.inferenceModel(Slices())(torch.arange(8.0), torch.tensor([3])))
print(poptorch.inferenceModel(Printer())(torch.tensor([[1.5, 2.5]])))
print(poptorch.inferenceModel(Serialised())(torch.ones(2, 4), torch.ones(4, 3)))
