# SPDX-License-Identifier: Apache-2.0
"""`offstage train --device-peak`: the bits of a run without it, a plan that is kept, used again, or refused."""

import json
import random
import re

import pytest
import torch

from offstage import ConfigError, FitPlan
from offstage.optimizer.optimizer import runtime_of
from offstage.train import loop
from offstage.train.config import build, load_config
from offstage.train.fitted_run import FittedRun
from offstage.train.memory_needs import check_host_weights, check_memory
from offstage.train.parallel import Parallel, started
from offstage.train.progress import progress_for
from offstage.train.report import write_report
from offstage.train.run_folder import RunFolder
from offstage.train.whole_model import begins_on_host
from tests.support.ranks import RankError
from tests.support.trainer import (
    SMALL,
    differences,
    losses_of,
    rows_of,
    train,
    train_and_be_killed,
    train_there,
    values_of,
)
from tests.train.test_hostile_runs import look, value_mutations

PEAK, TIGHT = "2MiB", "400KiB"
"""Room for everything, and for little beside the weights of the tiny model."""


def fitted_values(folder, peak=PEAK, **sections):
    """Settings of a small run that decides by itself."""
    values = values_of(folder, **sections)
    values["offload"] = {**SMALL, **sections.get("offload", {})}
    return {**values, "": {"device_peak": peak, **sections.get("", {})}}


def fitted(folder, peak=PEAK, **sections):
    return loop.run(build(fitted_values(folder, peak, **sections)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a limit, that nothing stopped."""
    return train(tmp_path_factory.mktemp("whole") / "run", "off")


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A run within a limit."""
    folder = tmp_path_factory.mktemp("old") / "run"
    fitted(folder, TIGHT, run={"save_every": 5})
    return folder


# Bits #


@pytest.mark.parametrize("peak", [PEAK, TIGHT])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_bits_of_a_run_without_a_limit(peak, micro_batches, tmp_path):
    data = {"data": {"micro_batches": micro_batches}, "run": {"save_every": 1}}  # saves are under way as it switches
    found = fitted(tmp_path / "fitted", peak, **data)
    plain = train(tmp_path / "plain", "off", **data)
    assert found.fitted is not None
    assert found.fitted.loop.micro_batches == micro_batches
    assert found.fitted.loop.clips
    assert differences(found.checkpoint, plain.checkpoint) == []
    assert losses_of(tmp_path / "fitted") == losses_of(tmp_path / "plain")


def test_weights_on_the_host(tmp_path):
    """Weights and gradients alone are larger than the limit, which only the first layers' activations fit beside."""
    model = {"layers": 6, "width": 64, "hidden": 128}
    found = fitted(tmp_path / "fitted", "1600KiB", model=model, run={"steps": 6})
    assert found.fitted.setting.hosted > 0
    again = fitted(tmp_path / "fitted", "1600KiB", model=model)
    assert json.loads((tmp_path / "fitted/run.json").read_text())["weights"]["layers"] == again.fitted.setting.hosted
    plain = train(tmp_path / "plain", "off", model=model, run={"steps": 6})
    plain = train(tmp_path / "plain", "off", model=model)
    assert differences(again.checkpoint, plain.checkpoint) == []


@pytest.mark.parametrize("optimizer", [{"clip": 0.0}, {"clip": 0.05}])
def test_with_and_without_clipping(optimizer, tmp_path):
    """The norm is looked at in any case: a step whose gradients are not finite is left out, as without a limit."""
    found = fitted(tmp_path / "fitted", TIGHT, optimizer=optimizer)
    plain = train(tmp_path / "plain", "off", optimizer=optimizer)
    assert differences(found.checkpoint, plain.checkpoint) == []
    norms = [row["grad_norm"] for row in rows_of(tmp_path / "fitted")]
    assert norms == [row["grad_norm"] for row in rows_of(tmp_path / "plain")]
    assert None not in norms


def test_adapters(tmp_path):
    found = fitted(tmp_path / "fitted", PEAK, lora={"rank": 2})
    plain = train(tmp_path / "plain", "off", lora={"rank": 2})
    assert found.fitted is not None
    assert differences(found.checkpoint, plain.checkpoint) == []


def test_killed_and_resumed(ranks, whole, tmp_path):
    """kill -9 while it measures, tries and later: the bits of runs that were not killed, with a limit and without."""
    for after in (2, 4, 3):
        values = fitted_values(tmp_path / "killed", TIGHT, run={"save_every": 1})
        with pytest.raises(RankError, match="died"):
            ranks.run(1, train_and_be_killed, values, after, 0.0)
    assert (tmp_path / "killed/fit_plan.json").exists()
    (killed,) = ranks.run(1, train_there, fitted_values(tmp_path / "killed", TIGHT))
    alone = fitted(tmp_path / "alone", TIGHT)
    assert killed.step == alone.step == whole.step == 12
    assert differences(killed.checkpoint, whole.checkpoint) == []
    assert differences(alone.checkpoint, whole.checkpoint) == []
    assert losses_of(tmp_path / "killed") == losses_of(whole.folder)


# The plan in the folder #


def test_the_plan_is_written_and_said(old, tmp_path, capsys):
    found = fitted(tmp_path / "run", TIGHT)
    said = capsys.readouterr().out
    written = FitPlan.from_json((tmp_path / "run/fit_plan.json").read_text())
    assert written == found.fitted
    assert written.limits.device == 400 * 1024
    assert written.predicted.device_bytes <= written.limits.device
    assert "device_peak 400.0 KiB: the first steps are measured" in said
    assert re.search(r"decided after step 2: .* of 400.0 KiB on the device", said)
    assert "considered" in said
    assert re.search(r"device_peak: .*predicted .*; measured [\d.]+ ms", said)
    about = json.loads((tmp_path / "run/run.json").read_text())
    assert about["fit"]["device_peak"] == 400 * 1024
    assert 'device_peak = "400KiB"' in (tmp_path / "run/config.toml").read_text()
    assert load_config(tmp_path / "run/config.toml", []).fit.peak_bytes == 400 * 1024


def resumed(folder, values):
    """A run of `values` that has begun: what decides in it, and whether that measures."""
    config = build(values)
    with started(config.parallel, torch.device("cpu")) as parallel:
        training = loop.Training(config, parallel, RunFolder(folder), progress_for("quiet", first=True))
        try:
            return training.fitted.plan, runtime_of(training.optimizer).hold_updates, training.optimizer.config
        finally:
            training.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"hidden": 96}}, r"another run \(model \{.*'hidden': 64.*now \{.*'hidden': 96"),
        ({"": {"device_peak": "1MiB"}}, r"another run \(device_peak 409600 then; now 1048576\)"),
        ({"": {"host_budget": "1GiB"}}, r"another run \(host_budget None then; now 1073741824\)"),
        ({"data": {"sequence": 8}}, r"another run \(micro-batch \[2, 16\] then; now \[2, 8\]\)"),
        ({"offload": {"chunk_bytes": "32KiB"}}, r"another run \(offload "),
    ],
)
def test_a_plan_of_another_run_is_not_used(old, changes, said, capsys):
    plan, measures, _ = resumed(old, fitted_values(old, TIGHT, **changes))
    assert plan is None
    assert measures
    assert re.search(said, (text := capsys.readouterr().out)), text
    assert "it is not used, and the run measures itself again" in text


def test_a_plan_of_another_machine_is_not_used(old, monkeypatch, capsys):
    monkeypatch.setattr("offstage.train.fitted_run.machine", lambda device: {"cpus": 4096, "device": "cpu"})
    assert resumed(old, fitted_values(old, TIGHT))[:2] == (None, True)
    assert re.search(r"another run \(machine .*cpus.* then; now \{'cpus': 4096", capsys.readouterr().out)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"predicted": 3}', "\udcff"])
def test_a_damaged_plan_is_not_used(old, text, tmp_path, capsys):
    (tmp_path / "fit_plan.json").write_text(text, errors="replace")
    (tmp_path / "run.json").write_text((old / "run.json").read_text())
    assert resumed(tmp_path, fitted_values(tmp_path, TIGHT))[:2] == (None, True)
    assert "fit_plan.json could not be read" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["overrides", "choices"])
def test_an_edited_plan_is_not_used(old, place, tmp_path, capsys):
    plan = json.loads((old / "fit_plan.json").read_text())
    if place == "overrides":
        plan["overrides"]["colour"] = "red"
    else:
        plan["predicted"]["setting"]["choices"].pop()
    (tmp_path / "fit_plan.json").write_text(json.dumps(plan))
    (tmp_path / "run.json").write_text((old / "run.json").read_text())
    assert resumed(tmp_path, fitted_values(tmp_path, TIGHT))[:2] == (None, True)
    assert "a choice for each of 2 layers" in capsys.readouterr().out


def test_a_plan_that_fit_refuses_is_not_used(old, tmp_path, capsys):
    """Of a model that has other parameters under the same settings, as a folder of transformers may have."""
    plan = json.loads((old / "fit_plan.json").read_text())
    (tmp_path / "fit_plan.json").write_text(json.dumps({**plan, "num_params": 7}))
    (tmp_path / "run.json").write_text((old / "run.json").read_text())
    assert resumed(tmp_path, fitted_values(tmp_path, TIGHT))[:2] == (None, True)
    assert "fit_plan.json does not fit (plan was made for 7 parameters" in capsys.readouterr().out


def test_an_unused_plan_goes_when_the_run_begins(old, tmp_path):
    """Another limit, and killed before it has decided: the old plan is not taken for the new limit's."""
    fitted(tmp_path, TIGHT, run={"steps": 4})
    fitted(tmp_path, PEAK, run={"steps": 5})  # one step: it has not decided
    assert not (tmp_path / "fit_plan.json").exists()
    fitted(tmp_path, PEAK, run={"steps": 12})
    assert FitPlan.from_json((tmp_path / "fit_plan.json").read_text()).limits.device == 2 * 2**20


# Refusals #


def test_too_little(tmp_path):
    with pytest.raises(ConfigError, match=r"device_peak=100.0 KiB is not enough: .* takes 2\d\d.\d KiB on the device"):
        fitted(tmp_path / "run", "100KiB")
    assert not (tmp_path / "run").exists()


def test_several_ranks_are_refused(ranks, tmp_path):
    with pytest.raises(RankError, match=r"device_peak=2MiB decides for one device.*found 2 ranks"):
        ranks.run(2, train_there, fitted_values(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_cpu_beside_an_accelerator_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="device_peak brings weights to this machine's accelerator"):
        check_host_weights(build(fitted_values(tmp_path)), Parallel(torch.device("cpu")))


def test_more_than_the_device_has(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (2**20, 2**20))
    with pytest.raises(
        ConfigError, match=r"device_peak=2.0 MiB expects a device with so much memory; cuda:0 has 1.0 MiB"
    ):
        check_memory(build(fitted_values(tmp_path)), Parallel(torch.device("cuda:0")), 256)


@pytest.mark.parametrize(("peak", "on_host"), [("2MiB", False), ("16KiB", True)])
def test_a_model_that_is_larger_than_the_limit_is_made_on_the_host(peak, on_host, tmp_path):
    config = build(fitted_values(tmp_path, peak))
    assert begins_on_host(config, torch.device("cuda:0"), 256) is on_host
    assert not begins_on_host(config, torch.device("cpu"), 256)


def test_no_replan_by_others(tmp_path):
    config = build(fitted_values(tmp_path))
    with started(config.parallel, torch.device("cpu")) as parallel:
        training = loop.Training(config, parallel, RunFolder(tmp_path), progress_for("quiet", first=True))
        try:
            for changes in ({"fraction": 0.5}, {"device_peak": "1GiB"}, {}):
                with pytest.raises(ConfigError, match=r"This optimizer is run by fit\(\), which decides"):
                    training.optimizer.replan(**changes)
            with runtime_of(training.optimizer).deciding():
                training.optimizer.replan(fraction=0.5)
            assert training.optimizer.config.fraction == 0.5
        finally:
            training.close()


# The report #


def test_the_report_of_a_run_that_has_not_decided(tmp_path):
    fitted(tmp_path, PEAK, run={"steps": 1})
    assert "it ended while measuring" in write_report(tmp_path).read_text()


def test_the_report_of_a_run_without_a_limit(whole):
    assert "Decided within device_peak" not in write_report(whole.folder).read_text()


@pytest.mark.parametrize(
    "change", [{"predicted": None}, {"limits": {"device": "x", "host": 1}}, {"overrides": {"a": [[]]}}]
)
def test_the_report_of_a_strange_plan(old, change, tmp_path):
    for name in ("run.json", "config.toml", "metrics.jsonl"):
        (tmp_path / name).write_text((old / name).read_text())
    (tmp_path / "fit_plan.json").write_text(json.dumps({**json.loads((old / "fit_plan.json").read_text()), **change}))
    assert "fit_plan.json could not be read" in write_report(tmp_path).read_text()


@pytest.mark.parametrize("seed", range(3))
def test_the_report_of_any_plan(old, seed, tmp_path):
    """Values in all places of fit_plan.json are replaced: a page is written, with the plan or without."""
    for name in ("run.json", "config.toml", "metrics.jsonl"):
        (tmp_path / name).write_text((old / name).read_text())
    for changed in value_mutations((old / "fit_plan.json").read_text(), random.Random(seed)):
        (tmp_path / "fit_plan.json").write_text(changed)
        assert look(tmp_path) is not None


def test_decides_nothing_once_closed(tmp_path):
    config = build(fitted_values(tmp_path))
    with started(config.parallel, torch.device("cpu")) as parallel:
        training = loop.Training(config, parallel, RunFolder(tmp_path), progress_for("quiet", first=True))
        assert isinstance(training.fitted, FittedRun)
        assert runtime_of(training.optimizer).watcher is not None
        training.close()
        assert runtime_of(training.optimizer).watcher is None
