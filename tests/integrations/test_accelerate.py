# SPDX-License-Identifier: Apache-2.0
"""accelerate: the same loop with us, with `fraction=0.0` and without us, to the same bits."""

import contextlib
import functools
import importlib
import importlib.metadata
import math
import sys
from dataclasses import dataclass
from typing import Any

import accelerate
import pytest
import torch
from accelerate import optimizer as accelerated
from accelerate.state import PartialState

import offstage
from offstage.integrations import accelerate as adapter
from tests.support import hf
from tests.support.hf import FB, OFF, SMALL, B, F
from tests.support.training import lazily

engine = pytest.mark.engine
MODES = {"plain": SMALL, "forward": F, "backward": B, "both": FB}


@dataclass
class Trained:
    """What a loop has left."""

    weights: dict[str, torch.Tensor]
    norms: list[torch.Tensor]
    receipt: Any = None


class Loop:
    """A user's loop, which knows nothing of us."""

    def __init__(self, settings, *, micro_batches=1, prepare=None, **options):
        """`settings`: of `offload`, or `None`. `prepare`: makes an optimizer of ours before `prepare()`."""
        hf.reset()
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=micro_batches, **options)
        model = hf.make_model(tie_word_embeddings=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        if prepare is not None:
            optimizer = prepare(optimizer, model)
            self.binding = adapter.bind(self.accelerator)
        elif settings is not None:
            adapter.offload(self.accelerator, **settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number))
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        self.micro_batches, self.norms = micro_batches, []

    def train(self, steps, *, scales=(1.0,), max_norm=0.5, by_hand=False):
        rows = hf.Tokens()
        for number in range(steps[0] * self.micro_batches, steps[1] * self.micro_batches):
            with self.accelerator.accumulate(self.model):
                first = 4 * number + 2 * self.accelerator.process_index
                tokens = torch.stack([rows[(first + row) % 64]["input_ids"] for row in range(2)])
                loss = self.model(input_ids=tokens, labels=tokens).loss
                loss = loss * scales[number // self.micro_batches % len(scales)]
                if by_hand:
                    (loss / self.micro_batches).backward()
                else:
                    self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and max_norm is not None:
                    self.norms.append(self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return self

    def done(self):
        ours = adapter.optimizers_of(self.accelerator)
        for optimizer in ours:
            optimizer.synchronize()
        weights = {name: getattr(p, "full_tensor", p.clone)().detach() for name, p in self.model.named_parameters()}
        norms = [getattr(norm, "full_tensor", norm.clone)() for norm in self.norms]
        return Trained(weights, norms, ours[0].receipt() if ours else None)


HITS_AND_MISSES = (0.01, 0.01, 1.0, 0.01, 0.01, 0.01)
"""Factors of the loss: clipping is active where it is 1."""


@functools.cache
def reference(kind, **loop):
    return Loop({"off": OFF, "plain": None}[kind], **loop).train((0, 6), scales=HITS_AND_MISSES).done()


def assert_same(got, expected):
    assert got.weights.keys() == expected.weights.keys()
    for name, weight in got.weights.items():
        assert torch.equal(weight, expected.weights[name]), name
    assert torch.equal(torch.stack(got.norms), torch.stack(expected.norms))


def assert_off_the_device(receipt):
    assert receipt.total_bytes_fetched > 0
    assert receipt.host_state_bytes > 0
    assert receipt.net_saved_bytes > 0


def counted_by_hand(settings, losses=(1.0,)):
    """A loop that counts its micro-batches itself."""
    loop = Loop(settings)
    for number in range(8):
        tokens = hf.Tokens()[number]["input_ids"][None]
        last = number % 2 == 1
        with contextlib.nullcontext() if last else loop.accelerator.no_sync(loop.model):
            loss = loop.model(input_ids=tokens, labels=tokens).loss * losses[number % len(losses)]
            loop.accelerator.backward(loss)
        if last:
            loop.norms.append(loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1e4))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    return loop.done()


def test_no_sync_is_for_gradients_that_are_not_final():
    got = counted_by_hand(FB)
    assert_same(got, counted_by_hand(OFF))
    assert got.receipt.speculation_hits > 0


def test_a_norm_that_is_not_finite():
    """Where offstage clips it skips the step; elsewhere the engine does what it does without us."""
    losses = (1.0, 1.0, math.inf, 1.0)
    in_backward, in_step, plain = (counted_by_hand(settings, losses) for settings in (FB, SMALL, None))
    assert all(weight.isfinite().all() for weight in in_backward.weights.values())
    assert in_backward.receipt.skipped_steps == 2
    for one in (in_step, plain):
        assert any(weight.isnan().any() for weight in one.weights.values())


@engine("accelerate", "same bits", "accumulation", "clipping", "overlap_forward")
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_of_state_that_stays(mode, micro_batches):
    got = Loop(MODES[mode], micro_batches=micro_batches).train((0, 6), scales=HITS_AND_MISSES).done()
    assert_same(got, reference("off", micro_batches=micro_batches))
    assert_off_the_device(got.receipt)
    assert got.receipt.fallbacks == ()


@engine("accelerate", "same bits")
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_of_accelerate_without_us(mode):
    got = Loop({**MODES[mode], "rule": "torch"}).train((0, 6), scales=HITS_AND_MISSES).done()
    assert_same(got, reference("plain"))
    assert_off_the_device(got.receipt)


@engine("accelerate", "update in backward, clipped")
def test_exact_clipping_hits_and_misses():
    receipt = Loop(FB).train((0, 6), scales=HITS_AND_MISSES).done().receipt
    assert (receipt.speculation_hits, receipt.speculation_misses) == (4, 1)  # the first step shows what is final


@engine("accelerate", "lazy lanes")
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_no_race_on_lazy_lanes(micro_batches, seed):
    with lazily(seed):
        got = Loop(FB, micro_batches=micro_batches).train((0, 6), scales=HITS_AND_MISSES).done()
    assert_same(got, reference("off", micro_batches=micro_batches))


@engine("accelerate", "accumulation")
def test_loops_that_call_backward_themselves():
    """`loss.backward()` under `accelerator.accumulate()` counts as `accelerator.backward()` does."""
    got = Loop(FB, micro_batches=2).train((0, 6), scales=HITS_AND_MISSES, by_hand=True).done()
    assert_same(got, reference("off", micro_batches=2))
    assert got.receipt.speculation_hits > 0
    assert got.receipt.fallbacks == ()


BY_HAND = {
    "offload()": lambda optimizer, model: offstage.offload(optimizer, model, **FB),
    "offstage.optim": lambda _, model: offstage.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **FB),
}


@pytest.mark.parametrize("how", BY_HAND)
def test_an_optimizer_that_is_offloaded_already(how):
    got = Loop(None, micro_batches=2, prepare=BY_HAND[how]).train((0, 6), scales=HITS_AND_MISSES).done()
    assert_same(got, reference("off", micro_batches=2))
    assert got.receipt.speculation_hits > 0


def test_offload_after_prepare():
    """In whichever order."""
    loop = Loop(None)
    adapter.offload(loop.accelerator, **FB)
    got = loop.train((0, 6), scales=HITS_AND_MISSES).done()
    assert_same(got, reference("off"))


@engine("accelerate", "save and resume")
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("off", FB, FB),
        ("off", SMALL, OFF),
        ("plain", None, {**FB, "rule": "torch"}),
        ("plain", {**F, "rule": "torch"}, None),
    ],
    ids=["ours", "ours to off", "plain to ours", "ours to plain"],
)
def test_saved_and_resumed(tmp_path, kind, before, after):
    first = Loop(before).train((0, 3), scales=HITS_AND_MISSES)
    first.accelerator.save_state(str(tmp_path))
    norms = first.done().norms
    del first
    second = Loop(after)
    for param in second.model.parameters():
        param.data.zero_()
    second.accelerator.load_state(str(tmp_path))
    got = second.train((3, 6), scales=HITS_AND_MISSES).done()
    got.norms = norms + got.norms
    assert_same(got, reference(kind))


def test_state_that_is_there_does_not_go_to_the_device(monkeypatch):
    """`prepare` of accelerate alone brings all of it there, and loads it again."""
    moved = []
    found = accelerated.move_to_device

    def spy(state, device):
        moved.extend(one for one in [state] if isinstance(one, torch.Tensor))
        return found(state, device)

    monkeypatch.setattr(accelerated, "move_to_device", spy)
    for settings in (None, SMALL):
        hf.reset()
        moved.clear()
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        accelerator = accelerate.Accelerator(cpu=True)
        if settings is not None:
            adapter.offload(accelerator, **settings)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert bool(moved) == (settings is None)
    assert adapter.optimizers_of(accelerator)[0].state_dict()["state"][0]["step"] == 1


def test_a_checkpoint_is_loaded_to_the_host(tmp_path, monkeypatch):
    """On several devices accelerate loads to each of them; here that device could hold no value."""
    loop = Loop(SMALL).train((0, 2))
    loop.accelerator.save_state(str(tmp_path))
    saved = {name: weight.clone() for name, weight in loop.done().weights.items()}
    monkeypatch.setattr(accelerate.Accelerator, "num_processes", 2)
    monkeypatch.setattr(accelerate.Accelerator, "multi_device", True)
    monkeypatch.setitem(PartialState._shared_state, "device", torch.device("meta"))
    loop.accelerator.load_state(str(tmp_path))
    assert all(torch.equal(weight, saved[name]) for name, weight in loop.done().weights.items())


def test_remove_gives_the_methods_back():
    hf.reset()
    accelerator = accelerate.Accelerator(cpu=True)
    before = set(vars(accelerator))
    adapter.offload(accelerator).remove()
    assert set(vars(accelerator)) == before
    adapter.bind(accelerator).remove()


# Refused


@contextlib.contextmanager
def refused(match):
    with pytest.raises(offstage.ConfigError, match=match):
        yield


def test_settings_in_two_places():
    loop = Loop(None, prepare=BY_HAND["offload()"])
    loop.binding.remove()
    with refused("expected them in one place"):
        adapter.offload(loop.accelerator, fraction=0.5)
    adapter.offload(loop.accelerator)  # without settings it stays as it is
    with refused("already; expected one call"):
        adapter.bind(Loop(SMALL).accelerator)
    with refused("expects an accelerate.Accelerator; found Linear"):
        adapter.offload(torch.nn.Linear(1, 1))


def test_clipping_of_a_part():
    loop = Loop(FB).train((0, 2))
    tokens = torch.ones(2, 5, dtype=torch.long)
    loop.accelerator.backward(loop.model(input_ids=tokens, labels=tokens).loss)
    with refused("the parameters of one optimizer, all of them"):
        loop.accelerator.clip_grad_norm_(list(loop.model.parameters())[:2], 1.0)
    with refused(r"Expected clip_grad_norm_\(\)"):
        loop.accelerator.clip_grad_value_(loop.model.parameters(), 1.0)


def test_a_scaler_and_updates_in_backward():
    hf.reset()
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    adapter.offload(accelerator, **FB)
    model = torch.nn.Linear(64, 64)
    with refused("mixed_precision='fp16'"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def test_a_scaler_steps_the_offloaded_optimizer():
    """accelerate has taken the plain optimizer's `step` by then."""
    weights = []
    for settings in (OFF, F):
        hf.reset()
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        adapter.offload(accelerator, **settings)
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        for number in range(4):
            loss = model(torch.full((2, 64), 1.0 + number)).square().mean()
            accelerator.backward(loss * (float("inf") if number == 2 else 1.0))
            optimizer.step()
            assert optimizer.step_was_skipped == (number == 2)
            optimizer.zero_grad()
        ours = adapter.optimizers_of(accelerator)[0]
        ours.synchronize()
        assert ours.receipt().steps == 3
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


class Distributed:
    def __init__(self, name):
        self.name = name


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA", "FSDP"])
def test_engines_within_accelerate(kind, monkeypatch):
    hf.reset()
    accelerator = accelerate.Accelerator(cpu=True)
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", Distributed(kind))
    with refused("fsdp_version=1" if kind == "FSDP" else kind):
        adapter.offload(accelerator)


@pytest.mark.parametrize("module", ["accelerate", "transformers"])
@pytest.mark.parametrize(("found", "match"), [("0.1", "found 0.1"), (None, "found none")])
def test_another_version(module, found, match, monkeypatch):
    real = importlib.metadata.version

    def version(package):
        if package != module:
            return real(package)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    if found is None:
        monkeypatch.setitem(sys.modules, module, None)  # neither installed nor on the path
    monkeypatch.setattr("offstage.integrations.packages.version", version)
    monkeypatch.delitem(sys.modules, f"offstage.integrations.{module}", raising=False)
    with refused(f"offstage.integrations.{module} expects .*{module}.*{match}.*pip install '{module}>="):
        importlib.import_module(f"offstage.integrations.{module}")


# Ranks


def sharded():
    hf.fsdp_on_the_cpu()
    return accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        reshard_after_forward=True,
        state_dict_type="SHARDED_STATE_DICT",
    )


def differences(got, expected):
    found = [name for name, weight in got.weights.items() if not torch.equal(weight, expected.weights[name])]
    return found + [n for n, (a, b) in enumerate(zip(got.norms, expected.norms, strict=True)) if not torch.equal(a, b)]


def on_ranks(kind, modes, folder):
    """The differences of each mode, whether it moved state, and what a refusal says."""

    def run(settings, steps=(0, 4), between=None):
        options = {"fsdp_plugin": sharded()} if kind == "FSDP2" else {}
        loop = Loop(settings, micro_batches=2, **options)
        if between is not None:
            between(loop)
        return loop.train(steps, scales=HITS_AND_MISSES)

    found = {"moved": True}
    for reference_of, settings in (("off", OFF), ("plain", None)):
        expected = run(settings).done()
        for name, mode in modes.items():
            got = run({**mode, "rule": "torch"} if reference_of == "plain" else mode).done()
            found[f"{reference_of}: {name}"] = differences(got, expected)
            found["moved"] = found["moved"] and got.receipt.total_bytes_fetched > 0
    saved = run(SMALL, (0, 2))
    saved.accelerator.save_state(folder)
    resumed = run(F, (2, 4), lambda loop: loop.accelerator.load_state(folder)).done()
    resumed.norms = saved.done().norms + resumed.norms
    expected = run(OFF).done()
    found["resumed"] = differences(resumed, expected)
    if kind == "DDP":
        try:
            run(FB)
        except offstage.ConfigError as error:
            found["refused"] = str(error)
    return found


@engine("accelerate", "DDP", "save and resume")
def test_ddp(ranks, tmp_path):
    for found in ranks.run(2, on_ranks, "DDP", {"plain": SMALL, "forward": F}, str(tmp_path)):
        assert "DistributedDataParallel" in found.pop("refused")
        assert found.pop("moved")
        assert {name: differs for name, differs in found.items() if differs} == {}


@engine("accelerate", "FSDP2", "save and resume")
def test_fsdp2(ranks, tmp_path):
    """`update_in_backward` too; `overlap_forward` is off there, and says so."""
    for found in ranks.run(2, on_ranks, "FSDP2", {"plain": SMALL, "both": FB}, str(tmp_path)):
        assert found.pop("moved")
        assert {name: differs for name, differs in found.items() if differs} == {}


def offloaded_before():
    got = {}
    for name, settings in {"off": OFF, "plain": SMALL, "both": FB}.items():
        prepare = functools.partial(_offloaded, settings)
        got[name] = Loop(None, micro_batches=2, fsdp_plugin=sharded(), prepare=prepare).train((0, 4)).done()
    return [(differences(one, got["off"]), one.receipt) for name, one in got.items() if name != "off"]


def _offloaded(settings, optimizer, model):
    return offstage.offload(optimizer, model, **settings)


@engine("accelerate", "FSDP2")
def test_fsdp2_of_an_optimizer_that_is_offloaded_already(ranks):
    """accelerate swaps the parameters in its groups."""
    for found in ranks.run(2, offloaded_before):
        assert [differs for differs, _ in found] == [[], []]
        assert all(receipt.total_bytes_fetched > 0 for _, receipt in found)
        assert any("FSDP2" in text for text in found[1][1].fallbacks)  # overlap_forward is off there
