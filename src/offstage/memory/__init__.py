# SPDX-License-Identifier: Apache-2.0
"""Host memory that the accelerator can copy from at link speed, and the CPUs near it."""
