# SPDX-License-Identifier: Apache-2.0
"""One test per line of the contract, with plain torch as the oracle."""
