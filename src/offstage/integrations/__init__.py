# SPDX-License-Identifier: Apache-2.0
"""Doors into other engines: one module or package per engine, imported only where that engine is used."""
