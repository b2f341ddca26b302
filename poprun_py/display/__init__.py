"""Formatting of output: numbers, terminal tables, and values in a notebook.

``formatting.py`` writes numbers, bytes, times and lists of CPUs. ``tables.py`` draws tables for a
terminal. ``public_values.py`` has the base class of values that are shown as text and HTML. HTML
pages and charts are in ``popdist_py.html_pages``, because reports of the library need them too. No
module of this package imports the packages for plans, jobs or runs.
"""
