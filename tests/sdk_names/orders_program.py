"""Imports the SDK's names and ours in many orders, each in a process of its own."""

import itertools
import os
import sys

FIRST = (
    "import torchvision",
    "import poptorch",
    "import popdist",
    "import popdist.poptorch",
    "import horovod.torch as hvd",
    "import popart",
    "import torch",
    "from poptorch.optim import AdamW",
    "import poptorch.optim as opt",
    "from poptorch import DataLoader, optim",
    "from popdist.poptorch import Options",
    "import popdist_py",
    "import popdist_py.poptorch",
    "from popdist_py import poptorch as ours",
)
AFTERWARDS = """
import importlib, sys
import popdist, poptorch, popdist.poptorch, poptorch.optim
from popdist_py import poptorch as ours
assert poptorch.Options is ours.Options
assert poptorch.optim.AdamW is ours.optim.AdamW
assert poptorch.optim is sys.modules["poptorch.optim"]
assert popdist.poptorch.Options is ours.DistributedOptions
assert isinstance(popdist.poptorch.Options(), poptorch.Options)
if "torchvision" in sys.modules:
    assert sys.modules["torchvision"].ops.nms
"""


def runs(order):
    """Run the statements of an order in a child; tell whether they worked."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        exec("\n".join([*order, AFTERWARDS]), {"__name__": "program"})
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


def main(without, warm):
    # torch itself takes longest; what is imported after it is what differs.
    if warm:
        import torch  # noqa: F401
    names = [line for line in FIRST if line not in without]
    orders = [(line,) for line in names] if not warm else list(itertools.permutations(names, 2))
    orders = orders if sys.argv[1] == "all" else orders[:: int(sys.argv[1])]
    failed = [order for order in orders if not runs(order)]
    print(len(orders), *failed, sep="\n")


if __name__ == "__main__":
    main(sys.argv[3:], warm=sys.argv[2] == "warm")
