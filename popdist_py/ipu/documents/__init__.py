"""The display of reports as plain text, as coloured tables in a terminal, and as HTML.

No module of this package depends on the contents of reports. The library rich is imported only when
it shows a report.
May call: nothing.
"""
