"""A login shell that is not a Bourne shell: it runs one command and rejects assignments.

Like fish, it answers ``NAME=value ; export NAME`` with an error.
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
