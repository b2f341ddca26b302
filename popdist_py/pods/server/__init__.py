"""The client of a pod's server, and the calls that client and server exchange as JSON over HTTP.

The module ``poprun_py/command/pods/pod_server.py`` contains the server. No module of this package
opens a file.
May call: pods.model.
"""
