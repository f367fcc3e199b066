# SPDX-License-Identifier: Apache-2.0
"""Saved tensors that leave in forward and return before backward."""
