# SPDX-License-Identifier: Apache-2.0
"""`fit`: one number decides. A job is measured in its own loop, planned as a whole, and switched between steps."""
