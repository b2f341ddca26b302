"""One HTML page with the reports about a model's memory and time on IPUs, to plan a run with.

plan_page            the whole page, and the function that writes its file
summary_sections     the sections "Summary" and "Insights"
memory_sections      the section "Memory Report"
liveness_section     the section "Liveness Report"
execution_sections   the sections "Operations" and "Execution Trace"
what_if_section      the section "What if", and the estimates of its table
search_section       the section "Search", the result of ``--find``
saved_reports        reports that ``--json`` has written
comparison_section   the section "Comparison" of two reports
charted_values       the colours of categories and activities, and tables behind charts

The sections have the names that Graphcore's PopVision Graph Analyser gives them. No module of this
package imports torch, or builds the graph of a model.
May call: ipu, documents, reports, searches, what_if, html_pages, atomic_file, errors.
"""

from popdist_py.ipu.page.plan_page import Planned, plan_page, write_plan_page
from popdist_py.ipu.page.saved_reports import SavedReports, read_saved_reports

__all__ = ["Planned", "SavedReports", "plan_page", "read_saved_reports", "write_plan_page"]
