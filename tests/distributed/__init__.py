# SPDX-License-Identifier: Apache-2.0
"""Training on several real processes, with gloo."""
