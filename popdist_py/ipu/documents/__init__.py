"""The display of reports as plain text, as coloured tables in a terminal, and as HTML.

No module of the package ``documents`` depends on the figures that a report contains. The library
rich is imported only when it shows a report. May call: nothing.
"""
