# SPDX-License-Identifier: Apache-2.0
"""Run folders as self-contained HTML pages, `write_report` and `write_comparison`, and as a trace, `write_trace`.

`recorded.py` reads a folder, `headline.py`, `figures.py`, `iteration.py` and `tables.py` make the parts, `page.py` and
`compare.py` the pages. Figures are SVG (`chart.py`), with searchable text, colours that follow the reader's theme, and
values at the pointer (`hover.py`).
"""

from offstage.train.report.compare import write_comparison
from offstage.train.report.page import write_report
from offstage.train.report.trace import write_trace

__all__ = ["write_comparison", "write_report", "write_trace"]
