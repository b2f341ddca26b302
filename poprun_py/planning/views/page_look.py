"""The look that all pages share: type, colours, tables and code, for light, dark and paper.

Only text is made here. What a page has of its own stands with it.
"""

from __future__ import annotations

from typing import Final

PAGE_LOOK: Final = """
:root{color-scheme:light dark}
body{margin:0 auto;padding:12px;max-width:1180px;background:#f8fafc;color:#0f172a;
font:15px/1.5 system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}
h1{font-size:1.3em;margin:.3em 0}h2{font-size:1.1em;margin:1.2em 0 .4em}
.alerts{list-style:none;margin:.5em 0;padding:0}
.alerts li{margin:4px 0;padding:5px 10px;border:1px solid #f59e0b;border-radius:4px;
background:#fef3c7}
.hosts{display:flex;flex-wrap:wrap;gap:10px;align-items:flex-start}
.hosts svg{display:block;max-width:100%;height:auto;break-inside:avoid}
.rows{overflow-x:auto}
table{border-collapse:collapse;font-size:13px}
th,td{padding:3px 9px;border:1px solid #cbd5e1;text-align:left;vertical-align:top;
white-space:nowrap}
th{background:#f1f5f9}
pre{margin:0;padding:8px 10px;border:1px solid #cbd5e1;border-radius:4px;background:#fff;
white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px}
@media screen and (prefers-color-scheme:dark){
body{background:#0b1120;color:#e2e8f0}.alerts li{background:#422006;border-color:#d97706}
th{background:#0f172a}th,td,pre{border-color:#475569}pre{background:#172033}}
@media print{.hosts{gap:1%}.hosts svg{max-width:49%}body{padding:0;max-width:none;font-size:11px;
background:none;print-color-adjust:exact;-webkit-print-color-adjust:exact}
table,pre{font-size:9px}th,td{padding:2px 5px;white-space:normal}
.rows{overflow:visible}tr{break-inside:avoid}}
"""
