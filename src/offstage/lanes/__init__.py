# SPDX-License-Identifier: Apache-2.0
"""Lanes: ordered work on a device or on host threads, and the marks that order it."""
