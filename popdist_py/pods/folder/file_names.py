"""The names of the files in a pod's folder.

The module is separate because each launch lists pods, but few launches open a pod.
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
