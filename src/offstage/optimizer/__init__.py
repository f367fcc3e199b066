# SPDX-License-Identifier: Apache-2.0
"""The `torch.optim.Optimizer` contract over state that is elsewhere."""
