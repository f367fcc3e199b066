# SPDX-License-Identifier: Apache-2.0
"""Before a run begins: what cannot be is refused with numbers, and a refusal leaves the disk as it was."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from offstage import ConfigError, OffloadConfig, OffstageError
from offstage.cli import main as cli
from offstage.cli.plan import parse, usage
from offstage.config import Placement, exact_size, parse_size
from offstage.memory import arena
from offstage.memory.claims import Outstanding
from offstage.planning.plan import Plan
from offstage.train import loop
from offstage.train.config import TrainConfig, build, load_config, to_toml
from offstage.train.determinism import explained_errors
from offstage.train.memory_needs import check_memory, needs_of
from offstage.train.parallel import Parallel
from offstage.train.progress import progress_for
from offstage.train.run_folder import RunFolder
from tests.support import stand_in
from tests.support.machines import machine
from tests.support.trainer import PLANS, TINY, train, values_of

CPU = Parallel(torch.device("cpu"))
HUGE = {"layers": 1, "hidden": 10**12}


def everything_in(folder):
    """All that is there, folders too."""
    return {str(path): None if path.is_dir() else path.read_bytes() for path in Path(folder).rglob("*")}


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("old") / "run"
    train(folder, run={"steps": 2})
    return folder


@pytest.fixture
def texts(tmp_path):
    """Two files, which have to be joined, with a few bytes in each."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_text("short")
    return str(tmp_path / "texts")


# Memory #


def test_a_model_that_the_host_cannot_hold(tmp_path, capsys, monkeypatch):
    """Amount, limit and remedy, before anything is allocated."""
    monkeypatch.chdir(tmp_path)
    words = [f"--model.{name}={value}" for name, value in HUGE.items()]
    assert cli.main(["train", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for part in (
        "Training 384,000,000,115,072 parameters in float32 (",
        "TiB of weights",
        "TiB of gradients",
        "TiB of state",
        "activations come on top) needs 5587.94 TiB",
        "of host memory; ",
        "To make room, use offload.state_dtype='bfloat16', or choose a smaller model",
        "`offstage plan` shows what fits",
    ):
        assert part in said, said
    assert everything_in(tmp_path) == {}


def test_a_model_of_transformers_that_the_host_cannot_hold(tmp_path, monkeypatch):
    """Counted from its configuration, on the meta device."""
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    (tmp_path / "config.json").write_text(json.dumps({**stand_in.LLAMA, "hidden_size": 10**6}))
    with pytest.raises(ConfigError, match=r"Training [\d,]{18,} parameters in float32 .* TiB of host memory; "):
        train(tmp_path / "run", model={"transformers": str(tmp_path), **dict.fromkeys(TINY)})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "lora"), [*((name, {}) for name in PLANS), ("half", {"rank": 4})])
def test_the_check_counts_what_the_run_takes(name, lora, tmp_path):
    """The planner's figures: of the weights, and of where the state really is."""
    config = build(values_of(tmp_path / "run", name, lora=lora))
    needs = needs_of(config, CPU)
    training = loop.Training(config, CPU, RunFolder(tmp_path), progress_for("quiet", first=False))
    try:
        params, plan = list(training.passes.model.parameters()), training.optimizer.plan
    finally:
        training.close()
    assert needs.weights == sum(param.nbytes for param in params)
    params = [param for param in params if param.requires_grad]
    assert needs.gradients == sum(param.nbytes for param in params)
    assert needs.parameters == sum(param.numel() for param in params)
    assert needs.host_state == plan.host_bytes
    window = plan.bytes_of(Placement.STREAMED) if plan.window == "all" else 0
    assert needs.device_state == plan.device_bytes + window


def test_ranks_and_stages_share_what_there_is():
    values = {"model": {"layers": 4}, "data": {"micro_batches": 2}, "parallel": {"stages": 2}}
    config = build(values_of("unused", **values))
    whole = needs_of(build(values_of("unused", model={"layers": 4})), CPU)
    shares = [
        needs_of(config, Parallel(torch.device("cpu"), rank=rank, ranks=4, stages=2, sharded=True)) for rank in range(4)
    ]
    assert shares[0] == shares[1] != shares[2] == shares[3]
    assert sum(share.weights for share in shares) == pytest.approx(whole.weights, rel=0.01)
    assert sum(share.host_state for share in shares) > 0
    assert " on one of 4 ranks (" in shares[0].on_device()


def test_what_other_ranks_have_claimed_counts(monkeypatch):
    """A rank that starts at the same time has taken nothing yet; the sum of both is too much."""
    config = build(values_of("unused"))
    needs = needs_of(config, CPU)
    need = needs.device_bytes + needs.host_state
    monkeypatch.setattr(arena, "mem_available", lambda: need * 3 // 2)
    monkeypatch.setattr(arena, "cgroup_limits", list)
    monkeypatch.setattr(arena, "own_outstanding", lambda: 0)
    monkeypatch.setattr(arena, "others_outstanding", list)
    with check_memory(config, CPU) as claim:
        assert claim.nbytes == need
    monkeypatch.setattr(arena, "others_outstanding", lambda: [Outstanding(123, need, frozenset())])
    with pytest.raises(ConfigError, match=r"claimed and not taken yet: .* by process 123"):
        check_memory(config, CPU)


def test_a_model_that_the_device_cannot_hold(monkeypatch):
    """An accelerator has its own limit: weights, gradients, and what stays of the state."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (4 << 30, 80 << 30))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 3 << 20)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda _: 1 << 20)
    parts = r"Training 2,701,560,320 parameters in bfloat16 \(5\.0 GiB of weights, 5\.0 GiB of gradients, .* of state"
    sum_of = r"needs 10\.\d GiB of device memory; cuda:0 has 4\.0 GiB free\. To make room, keep the layers' weights on"
    with pytest.raises(ConfigError, match=f"{parts}.*{sum_of}.*or divide it among more devices"):
        check_memory(build({"model": {"size": "2.7B"}}), Parallel(device))
    resident = build({"model": {"size": "1M"}, "offload": {"fraction": 0.0}})
    assert check_memory(resident, Parallel(device)).nbytes == 0  # nothing is on the host


def test_memory_that_is_gone_after_all():
    """What torch's allocator really says about the host's memory, as one message with a remedy."""
    for building, says in ((True, "ran out while the model was built"), (False, "Device memory ran out")):
        with (
            pytest.raises(OffstageError, match=rf"{says}: .*DefaultCPUAllocator.*`offstage plan` shows what fits"),
            explained_errors(TrainConfig(), building=building),
        ):
            torch.empty(1 << 55, dtype=torch.uint8)


# Nothing stays #

NEW = {
    "an unknown flag": ["--run.stps", "5"],
    "a contradiction": ["--offload.fraction=0", "--offload.window=1GiB"],
    "a limit without effect": ["--offload.device-peak=1GiB"],
    "no such data": ["--data.paths", "nowhere"],
    "too little data in files that are joined": ["--data.paths", "{texts}"],
    "nothing to evaluate": ["--data.eval-share=0.0001", "--run.eval-every=5"],
    "no such device": ["--run.device=xpu"],
    "too many stages": ["--parallel.stages=2", "--data.micro-batches=2"],
    "a budget without room for slots": ["--offload.device-budget=1KiB"],
    "a host budget": ["--offload.host-budget=10KiB"],
    "a model too large": [f"--model.{name}={value}" for name, value in HUGE.items()],
    "a model that cannot be": ["--model.width=33"],
    "no transformers": ["--model.transformers=llama"],
    "no tensorboard": ["--run.tensorboard"],
    "no rich": ["--run.progress=rich"],
    "no such tokenizer": ["--data.tokenizer=nowhere"],
    "no such layer for adapters": ["--lora.rank=4", "--lora.targets", "nothing"],
}
OLD = {
    "a new run in an old folder": ["--run.resume=false"],
    "another model": ["--model.hidden=128"],
    "other data": ["--data.paths", "{texts}", "--data.sequence=4"],
}


@pytest.mark.parametrize("case", [*NEW, *OLD])
def test_a_refusal_leaves_nothing(case, old, texts, tmp_path, capsys, monkeypatch):
    for package in ("transformers", "torch.utils.tensorboard", "rich.console"):
        monkeypatch.setitem(sys.modules, package, None)
    folder = tmp_path / "made" / "for" / "it"
    if case in OLD:
        shutil.copytree(old, folder)
        (folder / "of the user.txt").write_text("mine")
    settings = tmp_path / "settings.toml"
    values = values_of(folder)
    values["run"]["steps"] = 4
    settings.write_text(to_toml(build(values)))
    words = [word.format(texts=texts) for word in {**NEW, **OLD}[case]]
    if case == "no transformers":
        settings.write_text(to_toml(build({name: one for name, one in values.items() if name != "model"})))
    before = everything_in(tmp_path)
    assert cli.main(["train", "--config", str(settings), *words]) == 2
    assert capsys.readouterr().err.startswith("offstage: error: ")
    assert everything_in(tmp_path) == before


def test_a_run_that_began_stays(tmp_path, monkeypatch):
    """An error after the first step is no refusal."""

    def fail(self, *, last):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Training, "_after_step", fail)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run")
    assert {"config.toml", "run.json", "metrics.jsonl"} <= {path.name for path in (tmp_path / "run").iterdir()}


def test_tokens_stay(tmp_path):
    """A run that is refused after its data was prepared takes long to come so far again."""
    folder = RunFolder(tmp_path / "run")

    def refused() -> None:
        with folder.locked():
            for name in ("tokens-1.bin", "tokens-1.json", "corpus.lock", "wandb.json"):
                (folder.path / name).touch()
            raise OffstageError("refused")

    with pytest.raises(OffstageError, match="refused"):
        refused()
    assert {path.name for path in folder.path.iterdir()} == {"tokens-1.bin", "tokens-1.json"}


def test_a_lock_that_a_refused_run_removed_is_not_taken(tmp_path):
    """Of two that start at once, the second has opened the file that the first removes."""
    folder = RunFolder(tmp_path)
    with folder._lock.open("a") as opened:
        folder._take(opened)
        folder._lock.unlink()
        with pytest.raises(OffstageError, match="Another process is training"):
            folder._take(opened)


# A plan and its run #


@pytest.mark.parametrize(
    ("dtype", "offload"),
    [
        ("auto", {"device_budget": "64KiB", "chunk_bytes": "16KiB", "min_bytes": 0, "slots": 1}),
        ("bfloat16", {"fraction": 0.5, "chunk_bytes": "16KiB", "host_fraction": 0.5}),
    ],
)
def test_the_plan_of_a_file_is_the_plan_of_its_run(dtype, offload, tmp_path, capsys):
    values = values_of(tmp_path / "run", run={"steps": 1}, model={"dtype": dtype})
    values["offload"] = offload
    (tmp_path / "run.toml").write_text(to_toml(build(values)))
    (tmp_path / "here.json").write_text(machine(device_name="cpu").to_json())
    assert cli.main(["train", "--config", str(tmp_path / "run.toml")]) == 0
    made = Plan.from_json(json.dumps(json.loads((tmp_path / "run" / "run.json").read_text())["plan"]))
    said = capsys.readouterr().out
    words = [str(tmp_path / "run.toml"), "--machine", str(tmp_path / "here.json")]
    assert cli.main(["plan", *words, "--json"]) == 0
    planned = Plan.from_json(capsys.readouterr().out)
    assert [size.name for size in planned.sizes] == [size.name for size in made.sizes]
    assert [size.state_bytes for size in planned.sizes] == [size.state_bytes for size in made.sizes]
    assert planned.placements == made.placements
    assert planned.by_placement() == made.by_placement()
    assert (planned.slots, planned.window, planned.host_slots) == (made.slots, made.window, made.host_slots)
    assert planned.slot_bytes >= made.slot_bytes > 0.9 * planned.slot_bytes  # chunks end where pieces of 256 bytes do
    resolved = {"auto": "float32"}.get(dtype, dtype)
    assert f"parameters in {resolved} on cpu, state: {planned.by_placement()}" in said
    assert cli.main(["plan", *words]) == 0
    assert f"parameters in {resolved}\n" in capsys.readouterr().out


def test_the_format_is_that_of_the_machine(tmp_path):
    """auto on another machine, and on the command line that a plan prints."""
    (tmp_path / "run.toml").write_text('[model]\nsize = "1M"\n')
    (tmp_path / "gpu.json").write_text(machine().to_json())
    (tmp_path / "cpu.json").write_text(machine(device_name="cpu").to_json())
    found = {}
    for name in ("gpu", "cpu"):
        for model in (str(tmp_path / "run.toml"), "1M"):
            question = parse([model, "--machine", str(tmp_path / f"{name}.json")])
            told = "--model.dtype=bfloat16" in usage(question, question.answer())
            found[name, model == "1M"] = (question.dtype, told)
    assert found == {
        ("gpu", False): (torch.bfloat16, False),
        ("gpu", True): (torch.bfloat16, False),
        ("cpu", False): (torch.float32, False),
        ("cpu", True): (torch.bfloat16, True),
    }


# Sizes #


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0B"),
        (1000, "1000B"),
        (1536, "1.5KiB"),
        (64 << 20, "64MiB"),
        (8 << 30, "8GiB"),
        (8_584_364_032, "8186.6875MiB"),
        (10**9, "953.67431640625MiB"),
        (2**53 - 1, "8589934591.999999MiB"),
    ],
)
def test_sizes_are_written_with_units_and_read_back(nbytes, text):
    assert exact_size(nbytes) == text
    assert parse_size(text, "size") == nbytes


def test_settings_that_are_printed_have_units(tmp_path):
    config = build({"offload": {"device_budget": 3 << 30, "host_budget": 10**9, "min_bytes": 1000}})
    text = to_toml(config)
    assert '\ndevice_budget = "3GiB"\n' in text
    assert '\nhost_budget = "953.67431640625MiB"\nmin_bytes = "1000B"\n' in text
    (tmp_path / "run.toml").write_text(text)
    assert load_config(tmp_path / "run.toml", []) == config
    question = parse(["1B", "--machine", _here(tmp_path), "--budget", "5.3GiB", "--offload.host-budget=40000MB"])
    plan = question.answer()
    python, command = usage(question, plan).splitlines()
    assert "host_budget='38146.97265625MiB'" in python
    keywords = eval(f"dict({python.removeprefix('offstage.offload(optimizer, model, ').removesuffix(')')})")
    assert keywords["device_budget"].endswith(("MiB", "GiB"))
    assert "." not in keywords["device_budget"]
    assert load_config(None, command.split()[2:]).offload == OffloadConfig(**keywords)
    with pytest.raises(ConfigError, match=r"at least 16\.0 KiB; found 1\.0 KiB"):
        OffloadConfig(chunk_bytes=1024)


def _here(folder):
    (folder / "gpu.json").write_text(machine().to_json())
    return str(folder / "gpu.json")
