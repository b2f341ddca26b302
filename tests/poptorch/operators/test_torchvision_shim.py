"""torchvision's operators have one owner, whoever defines them first."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from support.repository import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)
_SOMEBODY_DEFINES = """
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
_SOMEBODY_DEFINES_ONE = """
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
_API = """
    from popdist_py import poptorch
"""
_TORCHVISION = """
    import torchvision
    assert torchvision.ops.nms
"""
ORDERS = {
    "somebody, the API": _SOMEBODY_DEFINES + _API + _TORCHVISION,
    "the API, somebody": _API + _SOMEBODY_DEFINES + _TORCHVISION,
    "somebody defines one of two": _SOMEBODY_DEFINES_ONE + _TORCHVISION + _API,
}


# A definition ends with its process, so each order has one of its own: a fork, which has torch.
_FORK = """
if not os.fork():
{order}
    os.write(1, {name!r}.encode() + b"\\n")
    os._exit(0)
os.wait()
"""


@pytest.mark.sweep
def test_somebody_may_define_them_before_and_after_the_api():
    program = "import os\nimport torch\nimport popdist_torchvision_hook\n"
    program += "".join(_FORK.format(order=order, name=name) for name, order in ORDERS.items())
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == list(ORDERS), done.stderr[-3000:]
