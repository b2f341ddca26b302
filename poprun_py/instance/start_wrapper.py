"""Entry of the process that mpirun starts for each instance: ``start_wrapper.py -- PROGRAM ...``.

This file is short, because Python compiles a script at every start but caches imported modules.
"""

import os
import sys

if __name__ == "__main__":
    # Last on the path, so that no file beside this package hides one of the standard library. The
    # options -I and -S of Python leave only the standard library on it.
    sys.path.append(os.path.abspath(f"{__file__}/../../.."))

    from poprun_py.instance import wrapper

    sys.exit(wrapper.main(sys.argv))
