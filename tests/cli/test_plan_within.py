# SPDX-License-Identifier: Apache-2.0
"""`offstage plan --device-peak`: what `fit` would decide for an estimated loop, one line for each limit."""

import json
import re
from pathlib import Path

import pytest

from offstage import ConfigError, FitPlan
from offstage.cli import main as cli
from offstage.cli.plan import parse
from offstage.planning.choices import Choice
from offstage.train.config import load_config
from tests.support.machines import desktop

GIB = 2**30
PEAKS = [f"{size}GiB" for size in (6, 8, 10, 12, 16, 20, 23)]


def said(capsys, *words):
    """The exit status of `offstage plan`, and all it wrote."""
    status = cli.main(["plan", *words])
    found = capsys.readouterr()
    return status, found.out + found.err


def plans(*words):
    found = parse(words).within
    assert found is not None
    return found.answers()


@pytest.mark.parametrize("model", ["1B", "llama-3.2-3b"])
def test_more_room_is_never_slower(model):
    """Where the CPU updates, up to 3% more than predicted is allowed for: a setting without it may take its place."""
    answers = plans(model, "--machine=rtx4090", "--batch=4", "--sequence=1024", "--device-peak", *PEAKS)
    refused = [isinstance(one, ConfigError) for one in answers]
    assert refused == sorted(refused, reverse=True), "less was enough"
    found = [one for one in answers if isinstance(one, FitPlan)]
    assert len(found) >= 5
    assert [one.limits.device for one in found] == sorted(one.limits.device for one in found)
    for one in found:
        assert one.predicted.device_bytes <= one.limits.device
        assert one.predicted.host_bytes <= one.limits.host
    times = [one.predicted.iteration_ms * (1.03 if one.setting.host_share else 1.0) for one in found]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1], "no limit mattered"


def test_rows(capsys):
    """Sorted, each once; a limit that is too low says so in its own row."""
    status, text = said(capsys, "7B", "--machine=rtx4090", "--device-peak", "22GiB", "2GiB", "16GiB", "16GiB")
    assert status == 0
    rows = re.findall(r"^ +([\d.]+) GiB +(-|[\d,.]+ ms).*  (.+)$", text, re.MULTILINE)
    assert [(peak, took == "-") for peak, took, _ in rows] == [("2.0", True), ("16.0", False), ("22.0", False)]
    assert "device_peak=2.0 GiB is not enough" in rows[0][2]
    assert "weights of" in rows[1][2]


def test_one_limit_shows_the_whole_plan_and_what_was_estimated(capsys):
    status, text = said(capsys, "2.7B", "--machine=h200", "--device-peak=24GiB")
    assert status == 0
    for part in (
        "2.7B for NVIDIA H200: 2,701,560,320 parameters in bfloat16",
        "of 24.0 GiB at the peak",
        "considered",
        "estimated  the loop: 8 sequences of 2,048 tokens per micro-batch (--batch, --sequence, assumed)",
        "estimated  times of layers: 537 TFLOP/s: 54%, as measured on an H200, of 989",
        "lower it with --host-budget",
        "offstage.fit(model, optimizer, device_peak='24GiB')",
    ):
        assert part in text, part
    *_, command = text.splitlines()
    config = load_config(None, command.split()[2:])
    assert (config.model.size, config.fit.peak_bytes) == ("2.7B", 24 * GIB)
    assert (config.data.batch, config.data.sequence) == (8, 2048)


def test_the_estimate_is_near_what_was_measured():
    """The reference workload: 8 x 2048 tokens, every block checkpointed, state resident or streamed (README)."""
    (found,) = plans("2.7B", "--machine=h200", "--device-peak=138GiB", "--workload.clips=true")
    by_name = {}
    for one in found.considered:
        by_name.setdefault((one.predicted.setting.resident > 0, one.predicted.setting.choices[0]), one.predicted)
    resident, streamed = by_name[True, Choice.RECOMPUTE], by_name[False, Choice.RECOMPUTE]
    assert resident.device_bytes / GIB == pytest.approx(42.4, rel=0.1)
    assert streamed.device_bytes / GIB == pytest.approx(12.1, rel=0.1)
    assert resident.iteration_ms == pytest.approx(678, rel=0.15)
    assert streamed.iteration_ms == pytest.approx(1280, rel=0.15)


def test_json_is_read_back(capsys):
    words = ("1B", "--machine=rtx4090", "--json", "--device-peak")
    assert cli.main(["plan", *words, "12GiB"]) == 0
    one = FitPlan.from_json(capsys.readouterr().out)
    assert [one] == plans(*words, "12GiB")
    assert FitPlan.from_json(one.to_json()) == one
    assert cli.main(["plan", *words, "1GiB", "12GiB", "20GiB"]) == 0
    refused, *others = json.loads(capsys.readouterr().out)
    assert refused["limits"]["device"] == GIB
    assert "is not enough" in refused["refused"]
    assert FitPlan.from_json(json.dumps(others[0])) == one
    assert len(others) == 2


def test_a_training_run_has_its_own_limits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(
        'device_peak = "12GiB"\nhost_budget = "60GiB"\n[model]\nsize = "1B"\n[data]\nbatch = 2\nsequence = 512\n'
        'micro_batches = 3\n[optimizer]\nclip = 0.0\n[offload]\nmaster_weights = "split"\n'
    )
    (found,) = plans("run.toml", "--machine=rtx4090")
    assert (found.limits.device, found.limits.host) == (12 * GIB, 60 * GIB)
    assert (found.loop.micro_batches, found.loop.input_elements, found.loop.clips) == (3, 1024, False)
    assert (plans("run.toml", "--machine=rtx4090", "--device-peak=9GiB")[0].limits.device) == 9 * GIB
    text = said(capsys, "run.toml", "--machine=rtx4090")[1]
    assert "offstage train --config=run.toml --device-peak=12GiB --offload.master-weights=split" in text
    assert "assumed)" not in text
    assert parse(["run.toml", "--machine=rtx4090", "--budget=12GiB"]).within is None


def test_times_that_were_measured(tmp_path, monkeypatch):
    """Of a machine in a file: layers and head have parts of the given times."""
    monkeypatch.chdir(tmp_path)
    Path("node.json").write_text(desktop().to_json())
    times = ("--workload.forward-ms=100", "--workload.backward-ms=190")
    (found,) = plans("1B", "--machine=node.json", "--device-peak=16GiB", *times)
    assert found.loop.compute_ms == pytest.approx(290)
    assert found.loop.forward_ms < 100
    (faster,) = plans("1B", "--machine=node.json", "--device-peak=16GiB", "--tflops=100")
    (slower,) = plans("1B", "--machine=node.json", "--device-peak=16GiB", "--tflops=50")
    assert slower.loop.compute_ms == pytest.approx(2 * faster.loop.compute_ms)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("1B --device-peak eight", "--device-peak expects a number of bytes or a size such as '8GiB'"),
        ("1B --device-peak 0", "device_peak expects more than 0 bytes"),
        ("1B --device-peak 90GiB", "at most the 23.6 GiB of GeForce RTX 4090; found 90GiB"),
        ("1B --device-peak 8GiB --budget 8GiB", "--budget=8GiB plans the state alone"),
        ("1B --device-peak 8GiB --weights host", "contradicts offload.weights='host'"),
        ("1B --device-peak 8GiB --offload.overlap-forward", "contradicts offload.overlap_forward=True"),
        ("1B --device-peak 8GiB --devices 2", "plans for one device, as fit() decides for one; found 2 ranks"),
        ("1B --device-peak 8GiB --batch 0", "--batch expects a whole number of at least 1; found 0"),
        ("1B --device-peak 8GiB --tflops 0", "--tflops expects more than 0; found 0"),
        ("1B --device-peak 8GiB --tflops 9 --workload.forward-ms 9", "both say how fast the device is"),
        ("1B --device-peak 8GiB --workload.forward-ms 9", "found forward 9 ms and backward 0 ms"),
        ("1B --device-peak 8GiB --host-budget 1GiB", "The host has 1.0 GiB for this job"),
        ("1B --device-peak 1GiB", "device_peak=1.0 GiB is not enough"),
        ("1B --batch 2", "--batch=2 is for plans with --device-peak"),
        ("--device-peak 8GiB 1B", "expects a model; found none"),
    ],
)
def test_bad_input(words, message, capsys):
    status, text = said(capsys, *words.split(), "--machine=rtx4090")
    assert status == 2
    assert text.count("\n") == 1
    assert message in text


def test_this_machine_has_no_rate_of_compute(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_measured", lambda **_: desktop())
    status, text = said(capsys, "1B", "--device-peak=8GiB")
    assert (status, "Give --workload.forward-ms and --workload.backward-ms" in text) == (2, True)


def test_shapes_without_layers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("shapes.json").write_text(json.dumps({"weight": [64, 64], "bias": [64]}))
    status, text = said(capsys, "shapes.json", "--machine=rtx4090", "--device-peak=1GiB")
    assert (status, "expects a model with layers" in text) == (2, True)
