# SPDX-License-Identifier: Apache-2.0
"""The corpus is exactly the files' bytes, and batches are exactly its sequences: once per epoch, after any stop."""

import fcntl
import os
import resource
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offstage.errors import ConfigError
from offstage.train import corpus as corpus_module
from offstage.train.data import Batches, Corpus, Shuffle


@pytest.fixture
def text(tmp_path) -> Path:
    """1003 bytes of which any four in a row are the only ones of their kind."""
    path = tmp_path / "text"
    path.write_bytes(numbered(1003))
    return path


def numbered(size: int) -> bytes:
    return np.random.default_rng(0).integers(1, 256, size, dtype=np.uint8).tobytes()


def bytes_of(corpus) -> bytes:
    return corpus.read(0, len(corpus)).tobytes()


def write(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


# Corpus


def test_a_single_file_is_read_where_it_is(text, tmp_path):
    corpus = Corpus([text], cache=tmp_path / "run")
    assert corpus.path == text
    assert bytes_of(corpus) == numbered(1003)
    assert not (tmp_path / "run").exists()


def test_files_are_joined_in_order(tmp_path):
    folder = write(tmp_path / "data", b=b"second", a__z=b"first", a__y=b"really first", c=b"", d=b"last")
    other = write(tmp_path, other=b"other") / "other"
    corpus = Corpus([other, folder], cache=tmp_path / "run")
    assert bytes_of(corpus) == b"other\0really first\0first\0second\0\0last"


def test_a_file_named_twice_is_read_once(tmp_path):
    folder = write(tmp_path / "data", a=b"a", b=b"b")
    assert bytes_of(Corpus([folder, folder / "a"], cache=tmp_path / "run")) == b"a\0b"


def test_hidden_files_of_a_folder_are_left_out(tmp_path):
    folder = write(tmp_path / "data", a=b"a", b=b"b")
    write(folder, **{".git__config": b"no", ".hidden": b"no"})
    assert bytes_of(Corpus([folder], cache=tmp_path / "run")) == b"a\0b"
    assert bytes_of(Corpus([folder / ".hidden"])) == b"no"  # named, it is wanted


def test_a_run_does_not_read_what_it_writes(tmp_path):
    """`data.paths=["."]` with the run's folder inside: the second start finds the same data."""
    folder = write(tmp_path, a=b"a", b=b"b")
    for _ in range(2):
        assert bytes_of(Corpus([folder], cache=folder / "runs")) == b"a\0b"


def test_without_paths_it_is_the_standard_library(tmp_path):
    corpus = Corpus(cache=tmp_path)
    folder = Path(sysconfig.get_paths()["stdlib"])
    everything = bytes_of(corpus)
    for name in ("argparse.py", "json/decoder.py"):
        assert b"\0" + (folder / name).read_bytes() + b"\0" in everything
    assert len(corpus) > 5e6
    files = corpus_module.stdlib_files()
    assert not any({"site-packages", "test"} & set(file.relative_to(folder).parts) for file in files)


def test_what_was_joined_is_used_again(tmp_path):
    folder = write(tmp_path / "data", a=b"a" * 100, b=b"b" * 100)
    first = Corpus([folder], cache=tmp_path / "run").path
    before = first.stat()
    again = Corpus([folder], cache=tmp_path / "run").path
    assert again == first
    assert (again.stat().st_ino, again.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_change_is_seen(tmp_path):
    folder = write(tmp_path / "data", a=b"a" * 100, b=b"b" * 100)
    before = Corpus([folder], cache=tmp_path / "run")
    write(folder, b=b"c" * 100)
    os.utime(folder / "b", ns=(0, 1))  # however coarse the clock of the file system is
    after = Corpus([folder], cache=tmp_path / "run")
    assert bytes_of(after) == b"a" * 100 + b"\0" + b"c" * 100
    assert bytes_of(before) == b"a" * 100 + b"\0" + b"b" * 100  # who reads the old one goes on with it


@pytest.mark.parametrize("left", [b"", b"half of it"], ids=["emptied", "cut"])
def test_a_damaged_cache_is_written_again(tmp_path, left):
    folder = write(tmp_path / "data", a=b"a" * 100, b=b"b" * 100)
    Corpus([folder], cache=tmp_path / "run").path.write_bytes(left)
    assert bytes_of(Corpus([folder], cache=tmp_path / "run")) == b"a" * 100 + b"\0" + b"b" * 100


def test_a_join_that_was_killed_is_begun_again(tmp_path):
    folder = write(tmp_path / "data", a=b"a" * 100, b=b"b" * 100)
    whole = Corpus([folder], cache=tmp_path / "run").path
    whole.rename(whole.with_suffix(".unfinished"))  # as kill -9 leaves it
    whole.with_suffix(".unfinished").write_bytes(b"a")
    assert bytes_of(Corpus([folder], cache=tmp_path / "run")) == b"a" * 100 + b"\0" + b"b" * 100
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [whole.name, "corpus.lock"]


def join_beside_others(folder: str, cache: str) -> tuple[bytes, int]:
    corpus = Corpus([folder], cache=cache)
    return bytes_of(corpus), corpus.path.stat().st_ino


def test_ranks_share_one_file(ranks, tmp_path):
    folder = write(tmp_path / "data", **{f"file{number:03}": numbered(1000) for number in range(200)})
    expected = b"\0".join([numbered(1000)] * 200)
    answers = ranks.run(3, join_beside_others, str(folder), str(tmp_path / "run"))
    assert [text for text, _ in answers] == [expected] * 3
    assert len({inode for _, inode in answers}) == 1, "it was written more than once"


def test_joining_waits_for_the_lock(tmp_path, monkeypatch):
    folder = write(tmp_path / "data", a=b"a", b=b"b")
    held = []
    join = corpus_module._join

    def watched(*args):
        with open(tmp_path / "run/corpus.lock") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(True)
        join(*args)

    monkeypatch.setattr(corpus_module, "_join", watched)
    Corpus([folder], cache=tmp_path / "run")
    assert held == [True]


# Corpus: bad input


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"data.paths expects files and folders; .*/nothing is not there. Check"):
        Corpus([tmp_path / "nothing"])


def test_empty_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"data.paths expects files; the folders .* have none. Give other ones"):
        Corpus([tmp_path])


def test_empty_files(tmp_path):
    folder = write(tmp_path / "data", a=b"", b=b"")
    with pytest.raises(ConfigError, match=r"Expected text in .*data; found 2 files without a single byte. Give"):
        Corpus([folder], cache=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_nowhere_to_join(tmp_path):
    with pytest.raises(ConfigError, match=r"2 files have to be joined; expected a folder for the result, found none"):
        Corpus([write(tmp_path, a=b"a", b=b"b")])


def test_full_disk(tmp_path):
    """One clear message, and nothing is left that could be taken for data."""
    folder = write(tmp_path / "data", a=b"a" * 50_000, b=b"b" * 50_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))  # no file grows beyond this
    try:
        with pytest.raises(ConfigError, match=r"expected room for 97.7 KiB in .*/run, found: .* Free space there"):
            Corpus([folder], cache=tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["corpus.lock"]


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    folder = write(tmp_path / "data", a=b"a" * 10, b=b"b" * 10)

    def refuse(path, mode="r"):  # the user of the tests may be allowed to read everything
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied")
        return open(path, mode)

    monkeypatch.setattr(corpus_module, "open", refuse, raising=False)
    with pytest.raises(ConfigError, match=r"files that can be read; .*/data/b cannot: .*Permission denied. Mend that"):
        Corpus([folder], cache=tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["corpus.lock"]


def test_a_file_that_grows_while_it_is_read(tmp_path, monkeypatch):
    folder = write(tmp_path / "data", a=b"a" * 10, b=b"b" * 10)
    pieces = corpus_module._pieces
    monkeypatch.setattr(corpus_module, "_pieces", lambda file: [*pieces(file), b"more"])
    with pytest.raises(ConfigError, match=r"Expected 21 bytes in 2 files; found 29: some changed while"):
        Corpus([folder], cache=tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["corpus.lock"]


# Parts


@pytest.mark.parametrize(("share", "held_out"), [(0.0, 0), (0.05, 50), (0.5, 502)])
def test_split(text, share, held_out):
    corpus = Corpus([text])
    training, evaluation = corpus.split(share)
    assert len(evaluation) == held_out
    assert bytes_of(training) + bytes_of(evaluation) == numbered(1003)


def test_a_part_ends_where_it_ends(text):
    training, _ = Corpus([text]).split(0.5)
    assert training.read(490, 600).tobytes() == numbered(1003)[490:501]


def test_fingerprint(text, tmp_path):
    original = Corpus([text]).fingerprint()
    assert Corpus([text]).fingerprint() == original
    for changed in (numbered(1002), b"x" + numbered(1003)[1:], numbered(1003)[:-1] + b"x"):
        (tmp_path / "changed").write_bytes(changed)
        assert Corpus([tmp_path / "changed"]).fingerprint() != original
    training, evaluation = Corpus([text]).split(0.5)
    assert len({original, training.fingerprint(), evaluation.fingerprint()}) == 3


def test_fingerprint_of_much_data(tmp_path):
    """Samples reach from the first byte to the last."""
    sizes = 10_000_000
    data = np.zeros(sizes, dtype=np.uint8)
    found = set()
    for place in (None, 0, sizes // 2 + 78_000, sizes - 1):
        if place is not None:
            data[place] = 1
        data.tofile(tmp_path / "data")
        found.add(Corpus([tmp_path / "data"]).fingerprint())
        data[:] = 0
    assert len(found) == 4


# Shuffle


@given(size=st.integers(1, 1500), key=st.text(max_size=5))
@settings(max_examples=40, deadline=None)
def test_shuffle_is_a_permutation(size, key):
    shuffle = Shuffle(size, key)
    assert sorted(map(shuffle, range(size))) == list(range(size))


def test_shuffle_depends_on_its_key():
    orders = [tuple(map(Shuffle(1000, f"{seed} {epoch}"), range(1000))) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert orders[0] == tuple(map(Shuffle(1000, "0 0"), range(1000)))


def test_shuffle_looks_random():
    """Where a number lands says nothing about where it, or its neighbour, came from."""
    size = 20_000
    order = np.array([Shuffle(size, "key")(position) for position in range(size)], dtype=float)
    # Correlations of independent numbers are normal with a deviation of 1 / sqrt(size); 4 of them are 1 in 16,000.
    limit = 4 / size**0.5
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < limit
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < limit
    counts = np.histogram2d(np.arange(size), order, bins=20)[0]  # 50 expected in each of 400
    assert ((counts - 50) ** 2).sum() / 50 < 361 + 4 * (2 * 361) ** 0.5


def test_shuffle_of_more_than_memory_holds():
    size = 10**13
    shuffle = Shuffle(size, "key")
    found = {shuffle(position) for position in range(2000)}
    assert len(found) == 2000
    assert max(found) < size
    assert max(found) > 0.9 * size


# Batches


SEQUENCE = 10
NUM_SEQUENCES = 100  # of 1003 bytes; two are left over


def make(data, batch=4, seed=0, rank=0, world=1, sequence=SEQUENCE) -> Batches:
    return Batches(data, sequence, batch, seed, rank, world)


PLACES = {numbered(1003)[SEQUENCE * i : SEQUENCE * (i + 1) + 1]: i for i in range(NUM_SEQUENCES)}


def numbers(rows: torch.Tensor) -> list[int]:
    """Which sequences these are; fails for rows that are none."""
    return [PLACES[bytes(row.tolist())] for row in rows]


def test_shape_and_format(text):
    rows = make(Corpus([text]), batch=3).next()
    assert rows.shape == (3, SEQUENCE + 1)
    assert rows.dtype == torch.int64


def test_an_epoch_has_every_sequence_once(text):
    batches = make(Corpus([text]), batch=7)  # epochs end within batches
    assert batches.num_sequences == NUM_SEQUENCES
    seen = numbers(torch.cat([batches.next() for _ in range(3 * NUM_SEQUENCES // 7 + 1)]))
    epochs = [seen[NUM_SEQUENCES * i :][:NUM_SEQUENCES] for i in range(3)]
    assert all(sorted(epoch) == list(range(NUM_SEQUENCES)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != sorted(epochs[0])


def test_epoch_counts(text):
    batches = make(Corpus([text]), batch=25, world=2)
    assert batches.epoch == 0.0
    batches.next()
    assert batches.epoch == 0.5


def test_seeds(text):
    orders = [numbers(make(Corpus([text]), batch=100, seed=seed).next()) for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_order_depends_on_nothing_but_seed_and_epoch(text):
    """Fixed: a run that goes on with another version of this code goes on with the same data."""
    assert numbers(make(Corpus([text]), batch=5, seed=7).next()) == [79, 97, 91, 67, 70]


@pytest.mark.parametrize(("world", "batch", "micro_batches"), [(1, 12, 1), (2, 6, 1), (4, 3, 1), (1, 3, 4), (2, 3, 2)])
def test_a_step_has_the_same_sequences_for_any_number_of_ranks(text, world, batch, micro_batches):
    alone = make(Corpus([text]), batch=12)
    together = [make(Corpus([text]), batch=batch, rank=rank, world=world) for rank in range(world)]
    for _ in range(20):
        found = [row for one in together for _ in range(micro_batches) for row in numbers(one.next())]
        assert sorted(found) == sorted(numbers(alone.next()))


def test_ranks_have_different_sequences(text):
    found = [numbers(make(Corpus([text]), batch=10, rank=rank, world=4).next()) for rank in range(4)]
    assert len({number for one in found for number in one}) == 40


@given(before=st.integers(0, 60), world=st.sampled_from([1, 2, 4]))
@settings(max_examples=30, deadline=None)
def test_goes_on_exactly(tmp_path_factory, before, world):
    """From any step, by any number of ranks."""
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes(numbered(1003))
    batches = make(Corpus([path]), batch=8)
    for _ in range(before):
        batches.next()
    state = batches.state_dict()
    resumed = [make(Corpus([path]), batch=8 // world, rank=rank, world=world) for rank in range(world)]
    for one in resumed:
        one.load_state_dict(state)
    for _ in range(15):
        assert torch.equal(torch.cat([one.next() for one in resumed]), batches.next())
    assert all(one.state_dict() == batches.state_dict() for one in resumed)


def test_iterates(text):
    batches, same = make(Corpus([text])), make(Corpus([text]))
    for _, rows in zip(range(3), batches, strict=False):
        assert torch.equal(rows, same.next())


# Batches: bad input


def test_shorter_than_a_sequence(text):
    message = r"at least one sequence of 1003 bytes and its last target, 1004 in all; .*text has 1003. Give more"
    with pytest.raises(ConfigError, match=message):
        make(Corpus([text]), sequence=1003)
    assert make(Corpus([text]), sequence=1002).num_sequences == 1


def test_nothing_held_out(text):
    _, held_out = Corpus([text]).split(0.0)
    with pytest.raises(ConfigError, match=r"text from byte 1,003 to 1,003 has 0"):
        make(held_out)


def test_no_such_rank(text):
    with pytest.raises(ConfigError, match="from 0 to world - 1 = 1; found 2"):
        make(Corpus([text]), rank=2, world=2)


@pytest.mark.parametrize("changed", ["seed", "sequence", "data"])
def test_a_position_in_other_data_is_refused(text, tmp_path, changed):
    state = make(Corpus([text])).state_dict()
    other = write(tmp_path, other=numbered(1003)[:-1] + b"x") / "other"
    arguments = {"seed": {"seed": 1}, "sequence": {"sequence": 11}, "data": {}}[changed]
    batches = make(Corpus([other if changed == "data" else text]), **arguments)
    batches.next()
    before = batches.state_dict()
    with pytest.raises(ConfigError, match=rf"is of other data: expected {changed}=.* as when it was saved, found .*"):
        batches.load_state_dict(state)
    assert batches.state_dict() == before
