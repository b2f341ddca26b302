"""``python -m popdist_py.ipu``: whether a model fits, without training it; see ``--help``.

The command builds the model, which needs torch: it lives with PopTorch's modules. It is run by its
name, so that this room imports nothing of them.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("popdist_py.poptorch.on_ipu.command", run_name="__main__")
