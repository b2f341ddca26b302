"""The machine of one host, as its kernel describes it.

Here live the reading of ``sys`` and ``proc`` under any root, and Machine with its JSON.
Nothing here knows hosts, options or plans. May call: errors, json_text.
"""
