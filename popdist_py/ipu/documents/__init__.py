"""The display of reports as plain text, as coloured tables in a terminal, and as HTML.

No module of this package depends on the contents of reports. Rich is imported only when a report is
shown with it.
May call: nothing.
"""
