# SPDX-License-Identifier: Apache-2.0
"""What happens outside `step()`: hooks, updates in backward, the window, speculation for clipping."""
