# SPDX-License-Identifier: Apache-2.0
"""Made-up optimizer classes: some treat each element alone, each in its own awkward way, and some do not."""

import random

import numpy as np
import torch

_CALLS = [0]


class Base(torch.optim.Optimizer):
    """Momentum; what a subclass adds is in `update`."""

    def __init__(self, params, lr=0.01, beta=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.begin()
        for group in self.param_groups:
            self.begin_group(group)
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        self.fill(p, state, group)
                    self.update(p, p.grad, state, group)

    def begin(self):
        pass

    def begin_group(self, group):
        pass

    def fill(self, p, state, group):
        state["average"] = torch.zeros_like(p)

    def update(self, p, grad, state, group):
        state["average"].mul_(group["beta"]).add_(grad)
        p.add_(state["average"] + group["weight_decay"] * p, alpha=-group["lr"])


# Elementwise, and awkward


class IntStep(Base):
    """An int, a float and a bool per parameter, and tensors of no and of one dimension."""

    seen = torch.float32

    def fill(self, p, state, group):
        super().fill(p, state, group)
        state.update(step=0, product=1.0, odd=False, seen=torch.zeros((), dtype=self.seen), rate=torch.zeros(1))

    def update(self, p, grad, state, group):
        state["step"] += 1
        state["product"] *= group["beta"]
        state["odd"] = not state["odd"]
        state["seen"] += 1
        state["rate"] = state["rate"] + group["lr"]
        super().update(p, grad / (1 + state["product"]) if state["odd"] else grad, state, group)


class IntTensor(IntStep):
    """An int in a tensor. (Loading a state dict, torch itself makes it a float.)"""

    seen = torch.int64


class Rebinding(Base):
    """New memory for weights and state at every step."""

    def update(self, p, grad, state, group):
        state["average"] = state["average"] * group["beta"] + grad
        p.data = p.data - group["lr"] * state["average"]


class ParametersOnly(Base):
    """Leaves out what is no parameter, or needs no gradient."""

    def update(self, p, grad, state, group):
        if isinstance(p, torch.nn.Parameter) and p.requires_grad:
            super().update(p, grad, state, group)


class GroupCount(Base):
    """Counts in its group, whether there are gradients or not, and keeps a tensor there, too."""

    def begin_group(self, group):
        group["k"] = group.get("k", 0) + 1
        group.setdefault("total", torch.zeros(())).add_(group["lr"])

    def update(self, p, grad, state, group):
        super().update(p, grad / group["k"] + group["total"], state, group)


class SharedCount(Base):
    """Counts once for all parameters, in its state."""

    def begin(self):
        self.state["count"] = self.state.get("count", 0) + 1

    def update(self, p, grad, state, group):
        super().update(p, grad / self.state["count"], state, group)


class InPlaceGradient(Base):
    """Uses the gradient's memory."""

    def update(self, p, grad, state, group):
        super().update(p, grad.mul_(0.5).add_(p, alpha=0.1), state, group)


class BoundMethod(Base):
    """Chooses its formula when it is made."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.formula = self.halved

    def halved(self, grad):
        assert not self.state or isinstance(next(iter(self.state)), torch.Tensor)
        return grad / 2

    def update(self, p, grad, state, group):
        super().update(p, self.formula(grad), state, group)


class LaterState(Base):
    """Some state appears at the third step only."""

    def update(self, p, grad, state, group):
        state["step"] = state.get("step", 0) + 1
        if state["step"] >= 3:
            state.setdefault("slow", torch.zeros_like(p)).add_(grad, alpha=0.25)
            grad = grad + state["slow"]
        super().update(p, grad, state, group)


class Limited(Base):
    """Made for so many steps, and fails after them."""

    def update(self, p, grad, state, group):
        state["step"] = state.get("step", 0) + 1
        super().update(p, grad * torch.linspace(1, 0, 5000)[state["step"]], state, group)


class MadeAtFirst(torch.optim.Adagrad):
    """State is made by the constructor."""

    def step(self, closure=None):
        return super().step(closure)


class Scaled(torch.optim.AdamW):
    """Calls its base's step, which runs hooks."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - 0.01 * group["lr"])
        return super().step(closure)


class LossScaled(Base):
    """Uses the loss of a closure."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("average", torch.zeros_like(p)).add_(p.grad * float(loss))
                    p.sub_(self.state[p]["average"], alpha=group["lr"])


ELEMENTWISE = [
    Base,
    IntStep,
    IntTensor,
    Rebinding,
    ParametersOnly,
    GroupCount,
    SharedCount,
    InPlaceGradient,
    BoundMethod,
    LaterState,
    Limited,
    MadeAtFirst,
    Scaled,
    LossScaled,
]


# Not elementwise: what each does to the gradient


def _every(count, other):
    def changed(p, grad, state, group):
        state["step"] = state.get("step", 0) + 1
        return other(p, grad, state, group) if state["step"] % count == 0 else grad

    return changed


def _in_state(p, grad, state, group):
    state["norm"] = float(grad.norm())
    return grad


def _in_group(p, grad, state, group):
    group["norm"] = float(grad.norm())
    return grad


def _class_count(p, grad, state, group):
    COUPLED["a count on the class"].made = getattr(COUPLED["a count on the class"], "made", 0) + 1
    return grad


def _global_count(p, grad, state, group):
    _CALLS[0] += 1
    return grad / _CALLS[0]


def _pairs(values):
    return values.reshape(-1, 2).flip(1).reshape(values.shape)


CHANGES = {
    "norm": lambda p, grad, state, group: grad / (grad.norm() + 1),
    "weight norm": lambda p, grad, state, group: grad * p.norm(),
    "clipped norm": lambda p, grad, state, group: grad * min(1.0, 20.0 / (float(grad.norm()) + 1e-6)),
    "mean": lambda p, grad, state, group: grad - grad.mean(),
    "rows": lambda p, grad, state, group: grad - grad.mean(-1, keepdim=True) if grad.dim() > 1 else grad,
    "maximum": lambda p, grad, state, group: grad / (grad.abs().max() + 1),
    "neighbour": lambda p, grad, state, group: grad + grad.reshape(-1).roll(1).view(grad.shape),
    "pairs": lambda p, grad, state, group: grad + _pairs(grad),
    "sort": lambda p, grad, state, group: grad.reshape(-1).sort().values.view(grad.shape),
    "median": lambda p, grad, state, group: torch.where(grad > grad.median(), grad, 0 * grad),
    "share of signs": lambda p, grad, state, group: grad * ((grad * p) > 0).float().mean(),
    "finite at all": lambda p, grad, state, group: grad if bool(grad.isfinite().all()) else 0 * grad,
    "number of elements": lambda p, grad, state, group: grad / grad.numel(),
    "large ones": lambda p, grad, state, group: grad / 2 if grad.numel() > 4096 else grad,
    "place": lambda p, grad, state, group: grad * torch.arange(grad.numel()).view(grad.shape),
    "dimensions": lambda p, grad, state, group: grad * grad.dim(),
    "four dimensions": lambda p, grad, state, group: grad - grad.mean() if grad.dim() == 4 else grad,
    "random": lambda p, grad, state, group: grad * torch.rand_like(grad),
    "python's random": lambda p, grad, state, group: grad * random.random(),
    "numpy's random": lambda p, grad, state, group: grad * np.random.rand(),
    "every sixth": _every(6, lambda p, grad, state, group: grad - grad.mean()),
    "every fiftieth": _every(50, lambda p, grad, state, group: grad - grad.mean()),
    "norm in state": _in_state,
    "norm in group": _in_group,
    "a count on the class": _class_count,
    "a count elsewhere": _global_count,
}


class _Coupled(Base):
    change = None

    def update(self, p, grad, state, group):
        super().update(p, type(self).change(p, grad, state, group), state, group)


COUPLED = {name: type("Coupled", (_Coupled,), {"change": staticmethod(one)}) for name, one in CHANGES.items()}


class OwnCount(Base):
    """Counts on itself."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = 0

    def begin(self):
        self.count += 1


class OwnList(OwnCount):
    """The same in a list, which a copy of its attributes would share."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counts = [0]

    def begin(self):
        self.counts[0] += 1


class GlobalNorm(Base):
    """Looks at all parameters."""

    def begin(self):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.scale = 1 / (1 + torch.nn.utils.get_total_norm(grads))

    def update(self, p, grad, state, group):
        super().update(p, grad * self.scale, state, group)
        del self.scale


class FirstGroup(Base):
    """Takes the learning rate from the first group."""

    def update(self, p, grad, state, group):
        super().update(p, grad, state, self.param_groups[0])


class CountsParameters(Base):
    """Counts updates of parameters in their group."""

    def update(self, p, grad, state, group):
        group["count"] = group.get("count", 0) + 1
        super().update(p, grad, state, group)


class DecaysAlways(Base):
    """Decays weights without gradients, too."""

    def begin_group(self, group):
        for p in group["params"]:
            p.mul_(0.999)


class SharedMemory(Base):
    """Keeps the weight itself as state."""

    def fill(self, p, state, group):
        super().fill(p, state, group)
        state["weight"] = p.data


class DropsGradients(Base):
    def update(self, p, grad, state, group):
        super().update(p, grad, state, group)
        p.grad = None


class NeedsClosure(Base):
    def step(self, closure):
        closure()
        super().step()


class Wrapper(Base):
    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, **options)
        self.inner = torch.optim.SGD(params, lr=0.1)


class HoldsParameters(Base):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.everything = {"all": [p for group in self.param_groups for p in group["params"]]}


class ChangesRate(Base):
    def begin_group(self, group):
        group["lr"] = group["lr"] * 0.99


class NoEffect(Base):
    def update(self, p, grad, state, group):
        pass


class Quantized(Base):
    def fill(self, p, state, group):
        super().fill(p, state, group)
        state["bits"] = torch.zeros_like(p, dtype=torch.uint8)


REFUSED = {
    OwnCount: "writes to self.count",
    OwnList: "writes to self.counts",
    GlobalNorm: "looks at",
    FirstGroup: "looks at other parameters",
    CountsParameters: "'count' of the group changed beside others",
    DecaysAlways: "changes the weights of a parameter without a gradient",
    SharedMemory: "'weight' has no memory of its own",
    DropsGradients: "removes the gradients",
    NeedsClosure: "without a closure",
    Wrapper: "self.inner is another optimizer",
    HoldsParameters: "self.everything holds parameters beside its groups",
    ChangesRate: "changes the learning rate",
    NoEffect: "changed no weight",
    Quantized: "'bits' is kept as torch.uint8",
}
"""Classes that are refused, and what the message says."""
