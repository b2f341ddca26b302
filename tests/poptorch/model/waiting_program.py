"""A program that attaches to the device of its first argument, and stays until it is ended."""

import os
import sys
import time

import torch

from popdist_py import poptorch

options = poptorch.Options().showCompilationProgressBar(False).useIpuId(int(sys.argv[1]))
model = poptorch.inferenceModel(torch.nn.Linear(2, 2), options)
model(torch.ones(1, 2))
child = os.fork()
if not child:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
