"""The names of the files in a pod's folder.

This module is small, because each launch imports it to list the pods. Few launches open a pod.
"""

from typing import Final

# The description of the pod, which the user may edit.
POD_FILE: Final = "pod.toml"
# The database of the pod's partitions, and of the processes that hold IPUs.
DATABASE: Final = "pod.sqlite"
# SQLite's write-ahead log. If a process was killed, the log contains the last changes.
DATABASE_LOG: Final = f"{DATABASE}-wal"
# The remedy for a damaged database, for error messages.
MOVE_AWAY: Final = (
    f"move {DATABASE} and {DATABASE_LOG} to another folder to start with an empty database"
)
# The folder with one locked file for each process that holds IPUs.
HOLDERS: Final = "holders"
# The file with the token that clients send to the pod's server.
TOKEN_FILE: Final = "token"
