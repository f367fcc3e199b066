# SPDX-License-Identifier: Apache-2.0
"""Backends that catch races: work that runs late and out of order, and a checker of declared accesses."""
