"""The command ``python -m popdist_py.ipu``, which tells whether a model fits into IPUs' memory.

The command ``python -m popdist_py.ipu --help`` prints an explanation of the options. The command
``python -m popdist_py.ipu`` does not train the model. The code of the command ``python -m
popdist_py.ipu`` is in ``popdist_py.poptorch.on_ipu.command``, because building the user's model
needs torch. ``runpy`` runs the module of the command by its name, so that the package
``popdist_py.ipu`` does not import ``popdist_py.poptorch``.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("popdist_py.poptorch.on_ipu.command", run_name="__main__")
