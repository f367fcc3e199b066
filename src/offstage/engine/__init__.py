# SPDX-License-Identifier: Apache-2.0
"""One device's part of a step: arenas, slots, and the trips of chunks between them."""
