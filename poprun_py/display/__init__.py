"""Formatting of output: numbers, terminal tables, HTML pages, charts, and values in a notebook.

``formatting.py`` writes numbers, bytes, times and lists of CPUs. ``tables.py`` draws tables for a
terminal. ``page.py`` defines the parts of a page, and renders them with the Jinja2 templates in
this folder. ``charts.py`` makes charts. ``public_values.py`` has the base class of values that are
shown as text and HTML. No module of this package imports the packages for plans, jobs or runs.
"""
