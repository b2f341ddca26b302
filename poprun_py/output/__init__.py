"""What instances write: shown on the launcher's own screen, and kept in the run folder.

Here live whole, tagged lines on two streams, and the folder of --output-dir.
Nothing here decides how a job goes on. May call: atomic_file, errors.
"""
