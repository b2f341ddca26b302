"""A login shell of another kind than Bourne's: it runs words, and takes no assignments.

As fish answers ``NAME=value ; export NAME``: with an error.
"""

import os
import shlex
import sys

words = shlex.split(sys.argv[sys.argv.index("-c") + 1])
if any("=" in word.partition(" ")[0] for word in words[:1]) or ";" in words:
    sys.exit("strict: Unsupported use of '='")
try:
    os.execvp(words[0], words)
except OSError:
    sys.exit(127)
