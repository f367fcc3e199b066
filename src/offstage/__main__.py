# SPDX-License-Identifier: Apache-2.0
"""`python -m offstage` is `offstage`."""

import sys

from offstage.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
