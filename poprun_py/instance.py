"""What mpirun starts in each instance: ``python -I -S instance.py -- program args...``.

Nothing lives here: Python compiles a script anew at every start, but keeps what a script imports.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

    import wrapper

    sys.exit(wrapper.main(sys.argv))
