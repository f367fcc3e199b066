# SPDX-License-Identifier: Apache-2.0
"""Weights that live on the host and come to the device for their layer."""
