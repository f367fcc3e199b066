# SPDX-License-Identifier: Apache-2.0
"""`write_report`: a run folder as one HTML page that needs nothing else. Called by `offstage report RUN`.

`recorded.py` reads the folder, `figures.py` and `tables.py` make parts of what is there, `page.py` puts them together.
Figures are SVG, made by `chart.py`: text that can be searched, and colours that follow the reader's theme.
"""

from offstage.train.report.page import write_report

__all__ = ["write_report"]
