# SPDX-License-Identifier: Apache-2.0
"""`offstage plan` for machines and models that are not here, and what it says where nothing fits."""

import json
import re
import shlex
from pathlib import Path

import pytest

from offstage.cli import main as cli
from offstage.cli.plan import parse
from offstage.planning.presets import MACHINES

ROOT = Path(__file__).parents[2]


def said(capsys, *words):
    """The exit status of `offstage plan`, and all it wrote."""
    status = cli.main(["plan", *words])
    found = capsys.readouterr()
    return status, found.out + found.err


def test_the_reference_machine_is_as_measured():
    *_, row = (ROOT / "benchmarks/results/plans.jsonl").read_text().splitlines()
    measured, made = json.loads(row)["measured_machine"], MACHINES["h200"].machine()
    rates = [name for name in measured if name.endswith("_gb_per_s") and name != "host_update_gb_per_s"]
    assert len(rates) == 5
    for name in (*rates, "device_bytes", "host_bytes", "threads"):
        assert getattr(made, name) == pytest.approx(measured[name], rel=0.02), name
    assert made.host_update_gb_per_s[16] == pytest.approx(measured["host_update_gb_per_s"]["16"], rel=0.02)


@pytest.mark.parametrize("name", ["rtx4090", "h200"])
def test_a_machine_by_name_says_where_its_figures_are_from(name, capsys):
    status, text = said(capsys, "--model", "gpt2", "--machine", name)
    assert status == 0
    assert text.startswith(f"gpt2 for {MACHINES[name].device}: 124,439,808 parameters")
    assert f"{name}: {'measured with one device' if name == 'h200' else 'assumed, not measured'}" in text
    assert f"{MACHINES[name].gb_per_s:,.0f} ({MACHINES[name].source})" in text


def test_every_machine_can_be_planned_for():
    for name, preset in MACHINES.items():
        question = parse(["gpt2", "--machine", name])
        assert question.answer().prediction.exposed_ms > 0
        assert 2 * question.machine.link_duplex_gb_per_s <= question.machine.dram_gb_per_s + 1e-9
        assert preset.source in question.about_machine()


def test_devices_of_one_server_have_their_part_of_the_host():
    one, all_of_them = (parse(["gpt2", "--machine=h100-80g", f"--devices={n}"]) for n in (1, 8))
    assert (one.world.ranks_per_host, all_of_them.world.ranks_per_host) == (1, 8)
    assert 8 * one.machine.threads == all_of_them.machine.threads == 112
    assert 8 * one.machine.host_bytes == all_of_them.machine.host_bytes
    assert parse(["gpt2", "--machine=rtx4090", "--devices=8"]).world.ranks_per_host == 1


@pytest.mark.parametrize(
    "words",
    [
        "--model=llama-3.1-8b --machine=rtx4090",  # weights and gradients do not fit the device
        "llama-2-13b --machine h200 --workload.other-bytes 2GiB",  # the state does not fit the host
        "llama-2-7b --machine=rtx4090 --workload.other-bytes=6GiB",  # with split masters, and weights on the host
    ],
)
def test_what_would_fit_fits(words, capsys):
    status, text = said(capsys, *words.split())
    assert status != 0
    (listed,) = re.findall(r"would fit.*?: (--.*)\.$", text.strip())
    for remedy in listed.split(", or "):
        assert said(capsys, *words.split(), *shlex.split(remedy))[0] == 0, remedy
    assert ("activations are not counted" in text) == ("other-bytes" not in words)


def test_nothing_is_promised_where_nothing_fits(capsys):
    status, text = said(capsys, "gpt2", "--machine=rtx3090", "--workload.other-bytes=1TiB")
    assert status == 2
    assert "would fit" not in text


def test_state_that_need_not_leave(capsys):
    text = said(capsys, "--model=gpt2", "--machine=rtx4090")[1]
    assert "all state would fit on the device, at a peak of 1.9 GiB" in text
    assert "all state would fit" not in said(capsys, "--model=gpt2", "--machine=rtx4090", "--budget=1GiB")[1]


def test_unknown_names(capsys):
    status, text = said(capsys, "--model", "llama-3.1-8", "--machine", "rtx4090")
    assert (status, "Did you mean llama-3.1-8b?" in text, "mixtral-8x7b" in text) == (2, True, True)
    status, text = said(capsys, "gpt2", "--machine", "h100")
    assert (status, "Did you mean h100-80g?" in text, "gh200" in text) == (2, True, True)
    assert "Did you mean a100-40g or a100-80g?" in said(capsys, "gpt2", "--machine", "a100")[1]
