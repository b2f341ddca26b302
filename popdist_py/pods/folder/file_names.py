"""The names of the files in a pod's folder.

The module imports nothing, because each launch looks for pods before it needs one.
"""

from typing import Final

# The description, which the user may edit.
POD_FILE: Final = "pod.toml"
# The partitions and attachments.
DATABASE: Final = "pod.sqlite"
# SQLite's log, which has the last changes if a process was killed.
DATABASE_LOG: Final = f"{DATABASE}-wal"
# A folder with a locked file for each process with attached IPUs.
HOLDERS: Final = "holders"
# The token that clients of the pod's server send.
TOKEN_FILE: Final = "token"
