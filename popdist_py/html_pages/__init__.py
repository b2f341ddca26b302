"""Whole HTML pages that work without a network, fragments for notebooks, and charts.

``page.py`` defines the parts of a page, and renders them with the Jinja2 templates in this folder.
``charts.py`` makes charts, which plotly draws in the browser. The launcher and the library both
use this package. No module of this package knows runs, plans or reports. May call: nothing.
"""
