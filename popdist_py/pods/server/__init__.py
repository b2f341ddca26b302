"""The client of a pod's server, and the calls that client and server exchange as JSON over HTTP.

The server itself is ``poprun_py/command/pods/pod_server.py``. No module of this package opens a
file.
May call: pods.model.
"""
