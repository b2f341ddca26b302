"""The command ``poprun-py-pod``: parses words, calls a pod, prints tables or JSON.

Its grammar is that of V-IPU's command line: a verb, an object, a name, options.
"""
