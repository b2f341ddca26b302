"""What the host of an instance keeps for its job, and what it permits: folders, and control groups.

Launcher and wrappers alike use it. Nothing here is done at import: every start would pay for it.
May call: no other room.
"""
