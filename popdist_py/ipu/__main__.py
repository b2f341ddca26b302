"""The command ``python -m popdist_py.ipu``, which tells whether a model fits into IPUs' memory.

See ``--help``. The command does not train the model. The code of the command is in
``popdist_py.poptorch``, because building the model needs torch. This module runs the code by its
name, so that this package does not import ``popdist_py.poptorch``.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("popdist_py.poptorch.on_ipu.command", run_name="__main__")
