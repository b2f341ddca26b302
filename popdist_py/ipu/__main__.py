"""The command ``python -m popdist_py.ipu``, which tells whether a model fits into IPUs' memory.

``--help`` prints an explanation of the options. The command does not train the model. The code of
the command is in ``popdist_py.poptorch.on_ipu.command``, because building the user's model needs
torch. ``runpy`` runs this module by its name, so that the package ``popdist_py.ipu`` does not
import ``popdist_py.poptorch``.
"""

import runpy
import sys

# The exit code of a process that ``Ctrl-C`` ends, as shells count it.
_INTERRUPTED = 130

if __name__ == "__main__":
    try:
        runpy.run_module("popdist_py.poptorch.on_ipu.command", run_name="__main__")
    except KeyboardInterrupt:  # ``Ctrl-C`` during the import of torch, which takes seconds
        sys.exit(_INTERRUPTED)
