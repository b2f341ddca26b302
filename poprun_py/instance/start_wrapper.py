"""The script that mpirun starts for each instance: ``start_wrapper.py -- PROGRAM ...``.

This file is short, because Python compiles a script at every start but caches imported modules.
"""

import os
import sys

if __name__ == "__main__":
    # The folder that contains poprun_py is put last on sys.path, so that its files hide no standard
    # module. Python's options -I and -S have left only the standard library on sys.path.
    sys.path.append(os.path.abspath(f"{__file__}/../../.."))

    from poprun_py.instance import wrapper

    # os._exit skips the finalisation of the interpreter, which would delay the end of the job. The
    # wrapper has no buffered output, threads or exit functions.
    os._exit(wrapper.main(sys.argv))
