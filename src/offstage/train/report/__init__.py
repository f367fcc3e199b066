# SPDX-License-Identifier: Apache-2.0
"""`write_report`: a run folder as one self-contained HTML page.

`recorded.py` reads the folder, `figures.py` and `tables.py` make the parts, `page.py` the page. Figures are SVG
(`chart.py`), with searchable text and colours that follow the reader's theme.
"""

from offstage.train.report.page import write_report

__all__ = ["write_report"]
