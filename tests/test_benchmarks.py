# SPDX-License-Identifier: Apache-2.0
"""What benchmarks make of rows and of measured bytes. Their cases are run by `--size small`."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from benchmarks import fit, fit_jobs, plot_memory
from benchmarks.common import RESULTS
from offstage.planning.choices import Choice

GIB = 2**30


# fit #


@pytest.mark.parametrize(("least", "most"), [(3.2, 96.4), (9.0, 9.1)])
def test_limits_go_from_the_least_that_trains_to_everything(least, most):
    found = fit.limits_between(least * GIB, most * GIB, is_full=True)
    assert found == sorted(found)
    assert len(found) == fit.PEAKS
    assert fit.ROOM * least * GIB <= found[0] < fit.ROOM * least * GIB + fit.STEP_GIB * GIB
    assert all(size % int(fit.STEP_GIB * GIB) == 0 for size in found)


def test_the_last_limit_is_within_the_device():
    assert fit.limits_between(3 * GIB, 132.7 * GIB, is_full=True)[-1] <= 132.7 * GIB


def row(job, kind, ms, peak_gib, **more):
    return {"case": f"{job}_{kind}", "job": job, "kind": kind, "iteration_ms": ms, "peak_gib": peak_gib, **more}


def test_the_best_by_hand_is_the_fastest_that_fits():
    rows = [row("gpt", "resident", 500, 90), row("gpt", "half", 600, 40), row("gpt", "in_backward", 700, 39.9)]
    rows += [row("llama", "resident", 100, 20), {"case": "gpt_quarter", "error": "out of memory", "peak_gib": 1}]
    found = {one["case"]: one for one in rows}
    assert fit.best_by_hand("gpt", 90, found)["kind"] == "resident"
    assert fit.best_by_hand("gpt", 89, found)["kind"] == "half"
    assert fit.best_by_hand("gpt", 39, found) is None


def test_a_row_of_fit_says_what_it_must_reach():
    (case,) = [case for case in fit.CASES if case.name == "gpt_fit_4"]
    found = {one["case"]: one for one in (row("gpt", "resident", 500, 90), row("gpt", "torch_masters", 505, 99))}
    made = fit.compared(case, row("gpt", "fit_4", 507, 91, size="full", device_peak_gib=98.0), found)
    assert made["best_by_hand"] == "gpt_resident"
    assert made["must"]["ratio_to_best_by_hand"] == {"at_most": 1.05, "found": 1.014, "met": True}
    assert "ratio_to_torch_masters" not in made["must"]  # it does not fit
    made = fit.compared(case, row("gpt", "fit_4", 530, 101, size="full", device_peak_gib=100.0), found)
    assert not any(
        made["must"][name]["met"] for name in ("peak_gib", "ratio_to_best_by_hand", "ratio_to_torch_masters")
    )


def test_by_hand_there_are_many_settings_and_a_choice_for_every_layer():
    assert len(fit_jobs.BY_HAND) >= 12
    for setting in fit_jobs.BY_HAND.values():
        assert len(setting.choices(8)) in (0, 8)
    assert fit_jobs.BY_HAND["in_backward_mixed"].choices(32).count(Choice.OFFLOAD) == 7


def test_the_peak_outlives_resets(monkeypatch):
    """Statistics that others reset: the most is still known."""
    device = SimpleNamespace(now=3, most=3)

    def take(size):
        device.now += size
        device.most = max(device.most, device.now)

    def reset(*_):
        device.most = device.now

    statistics = SimpleNamespace(
        reset_peak_memory_stats=reset,
        max_memory_allocated=lambda: device.most,
        max_memory_reserved=lambda: 2 * device.most,
    )
    accelerator = SimpleNamespace(reset_peak_memory_stats=reset)
    monkeypatch.setattr(fit_jobs, "ON_GPU", True)
    monkeypatch.setattr(fit_jobs, "torch", SimpleNamespace(cuda=statistics, accelerator=accelerator))
    peak = fit_jobs.LifePeak()
    take(5)
    take(-4)
    accelerator.reset_peak_memory_stats(0)
    take(1)
    statistics.reset_peak_memory_stats()
    assert (peak.look(), peak.reserved, peak.resets) == (8, 16, 2)
    peak.close()
    assert statistics.reset_peak_memory_stats is accelerator.reset_peak_memory_stats is reset


# The figure of time and memory #


@pytest.fixture
def results(tmp_path) -> Path:
    """The committed rows of other systems, beside made-up rows of fit."""
    for question in ("peers", "host_weights", "memory_cap"):
        (tmp_path / f"{question}.jsonl").write_text((RESULTS / f"{question}.jsonl").read_text())
    about = {"size": "full", "machine": {"device": "a made-up GPU"}, "versions": {"torch": "0"}}
    rows = [row("gpt", "resident_checkpointed", 700, 42, config={}), row("gpt", "resident", 560, 92, config={})]
    times = ((900, 3.6), (750, 10), (650, 28), (565, 91))
    rows += [row("gpt", f"fit_{number}", *point) for number, point in enumerate(times, 1)]
    lines = [json.dumps({**one, **about}) for one in rows]
    lines.append(json.dumps({**rows[-1], **about, "size": "small", "iteration_ms": 1}))
    (tmp_path / "fit.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_the_figure_has_fit_and_every_other_system(results):
    path = plot_memory.draw(results, results / "figures")
    tree = ElementTree.fromstring(path.read_text())
    texts = " ".join(text for text in tree.itertext())
    for label in ("resident", "torchao", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3", "FSDP2", "a made-up GPU"):
        assert label in texts
    circles = [node.get("class") for node in tree.iter("{http://www.w3.org/2000/svg}circle")]
    assert circles.count("dot fit") == 4 + 1  # and the legend
    assert circles.count("dot hand") == 1 + 1
    assert "prefers-color-scheme: dark" in texts


def test_labels_lie_within_the_figure_and_not_on_each_other(results):
    source = plot_memory.draw(results, results / "figures").read_text()
    found = re.findall(r'<text class="label" x="([\d.]+)" y="([\d.]+)">([^<]*)<', source)
    boxes = [(float(x), float(y) - 12, float(x) + plot_memory.CHARACTER * len(text), float(y)) for x, y, text in found]
    assert len(boxes) == 6
    assert all(box[0] >= 0 and box[2] <= plot_memory.WIDTH for box in boxes)
    assert not any(plot_memory.overlap(one, other) for one in boxes for other in boxes if one is not other)


def test_without_rows_of_fit_there_is_no_figure(results):
    (results / "fit.jsonl").unlink()
    with pytest.raises(
        plot_memory.MissingRowsError, match=r"gpt_fit_1 .* found none\. Run python -m benchmarks\.fit gpt"
    ):
        plot_memory.draw(results, results)
    assert not list(results.glob("*.svg"))
