# SPDX-License-Identifier: Apache-2.0
"""What lies where and what it takes, as numbers: layouts, plans, predictions, and the machine they are for."""
