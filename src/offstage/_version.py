# SPDX-License-Identifier: Apache-2.0
"""The version, importable without torch: the build reads it."""

__version__ = "0.1.0"
