"""How a report is shown: as plain text, in a terminal's colours, in a notebook.

Nothing here knows what a report is about, or imports rich before one is shown with it.
May call: nothing.
"""
