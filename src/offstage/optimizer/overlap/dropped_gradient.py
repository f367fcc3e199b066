# SPDX-License-Identifier: Apache-2.0
"""`DroppedGradient`: what is left in `p.grad` after an update in backward. Any use of it raises.

`None` would do as a value, but `torch.nn.utils.clip_grad_norm_` skips parameters without a gradient and would return
0 as if it had clipped. `step()` removes it.
"""

from __future__ import annotations

from typing import Any

import torch

from offstage.errors import OffstageError


class DroppedGradient(torch.Tensor):
    """A tensor of the gradient's shape without any data."""

    parameter_name: str

    def __new__(cls, param: torch.Tensor, name: str) -> DroppedGradient:
        """In place of the gradient of `param`."""
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        made.parameter_name = name
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Any use of the values says where they went."""
        everything = torch.utils._pytree.tree_leaves((args, kwargs))
        name = next(arg.parameter_name for arg in everything if isinstance(arg, cls))
        raise OffstageError(
            f"The gradient of {name!r} was used for its update during backward and dropped; {func} was called with "
            "it before step(). With update_in_backward=True: clip with optimizer.clip_grad_norm_(max_norm), from the "
            "first iteration on; put the backward of every micro-batch but the last under optimizer.accumulate(); "
            "run one backward per step. GradScaler, and reading gradients, need update_in_backward=False."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DroppedGradient({self.parameter_name!r})"
