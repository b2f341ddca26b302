"""What mpirun starts in each instance: ``python -I -S main.py -- program args...``.

Nothing lives here: Python compiles a script anew at every start, but keeps what a script imports.
"""

import os
import sys

if __name__ == "__main__":
    # Last on the path, which -I -S leave to the standard library alone: nothing beside us hides it.
    sys.path.append(os.path.abspath(f"{__file__}/../../.."))

    from poprun_py.instance import wrapper

    sys.exit(wrapper.main(sys.argv))
