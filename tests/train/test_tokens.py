# SPDX-License-Identifier: Apache-2.0
"""Tokens are those of the tokenizer, made once; a run that resumes has the same ones or is refused."""

import gzip
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from offstage.errors import ConfigError
from offstage.train import documents, loop, tokens
from offstage.train.config import DataSettings, build
from offstage.train.run_folder import RunFolder
from offstage.train.tokenizer import HuggingFaceEncoder, encoder_for
from offstage.train.tokens import corpus_for
from tests.support import stand_in
from tests.support.trainer import README, differences, losses_of, train

TEXTS = ["the first ünïcode\ndocument", "the second", "the third and the last"]
BEGIN, END = 0, 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """The folder of one with 300 tokens or fewer, which begins a text with a token of its own, as that of a Llama."""
    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator([Path(README).read_text()], trainer)
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    found.enable_truncation(5)  # some are saved with it
    folder = tmp_path_factory.mktemp("tokenizer")
    found.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return folder


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    return folder


def read(cache, say=lambda text: None, **settings) -> list[int]:
    cache.mkdir(exist_ok=True)
    corpus = corpus_for(DataSettings(**settings), cache, say)
    return corpus.read(0, len(corpus)).tolist()


def expected(folder: Path, texts=TEXTS) -> list[int]:
    plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain.no_truncation()
    return [token for text in texts for token in (*plain.encode(text).ids, END)]


# What the tokens are


def test_files_are_documents(tokenizer, texts, tmp_path):
    found = read(tmp_path / "run", paths=(str(texts),), tokenizer=str(tokenizer))
    assert found == expected(tokenizer)
    assert (found.count(BEGIN), found.count(END)) == (3, 3)
    file = str(tokenizer / "tokenizer.json")
    assert read(tmp_path / "run", paths=(str(texts),), tokenizer=file, eos_token="</s>") == found


def test_a_long_document_is_read_in_pieces(tokenizer, tmp_path, monkeypatch):
    """Within a bounded memory; its tokens are those of the whole where a tokenizer cuts words at lines too."""
    monkeypatch.setattr(documents, "PIECE", 16)
    monkeypatch.setattr(tokens, "_BATCH", 32)
    text = "".join(f"line {number} ö\n" for number in range(50)) + "x" * 40
    (tmp_path / "long.txt").write_text(text)
    pieces = [piece.text for piece in documents.Documents([str(tmp_path / "long.txt")], None, tmp_path / "run")]
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 16
    found = read(tmp_path / "run", paths=(str(tmp_path / "long.txt"),), tokenizer=str(tokenizer))
    assert (found.count(BEGIN), found.count(END), found[0], found[-1]) == (1, 1, BEGIN, END)
    assert HuggingFaceEncoder(tokenizer).decode(found[1:-1]).decode() == text


def as_file(folder: Path, kind: str, rows: list[dict]) -> Path:
    path = folder / f"rows{'' if '.gz' in kind else '[1]'}.{kind}"  # not a pattern, though the package takes those
    if kind == "saved":
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    elif kind == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif kind in ("csv", "tsv"):
        mark = {"csv": ",", "tsv": "\t"}[kind]
        path.write_text(f"n{mark}text\n" + "".join(f'{row["n"]}{mark}"{row["text"]}"\n' for row in rows))
    elif kind == "txt":
        path.write_text("".join(row["text"] + "\n" for row in rows))
    else:
        text = json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows)
        (gzip.open if kind.endswith("gz") else open)(path, "wb").write(text.encode())
    return path


def test_rows_of_every_format(tokenizer, tmp_path):
    """In the order of files and rows; those without text are left out, and said to be."""
    rows = [{"n": number, "text": text.replace("\n", " ")} for number, text in enumerate(["", *TEXTS])]
    said, kinds = [], ("json", "jsonl", "jsonl.gz", "csv", "tsv", "parquet", "txt", "saved")
    paths = tuple(str(as_file(tmp_path, kind, rows)) for kind in kinds)
    once = [row["text"] for row in rows[1:]]
    found = read(tmp_path / "run", said.append, paths=paths, column="text", tokenizer=str(tokenizer))
    assert found == expected(tokenizer, once) * len(kinds)
    assert said == [
        f"tokenized 24 documents: {len(found):,} tokens in {tmp_path}/run/{next((tmp_path / 'run').glob('*.bin')).name}"
        "; 8 without text were left out"
    ]
    assert bytes(read(tmp_path / "run", paths=paths[:1], column="text")) == "".join(f"{t}\0" for t in once).encode()


def test_the_smallest_format_that_holds_all_tokens(tokenizer):
    encoder = encoder_for(DataSettings(tokenizer=str(tokenizer)))
    assert 256 < encoder.vocabulary <= 300
    sizes = {256: np.uint8, 257: np.uint16, 65_536: np.uint16, 65_537: np.uint32}
    for encoder.vocabulary, dtype in sizes.items():
        assert encoder.dtype == dtype


# The file


def test_it_is_made_once(tokenizer, texts, tmp_path):
    said = []
    for _ in range(2):
        read(tmp_path / "run", said.append, paths=(str(texts),), tokenizer=str(tokenizer))
    assert len(said) == 1
    assert sorted(path.suffix for path in (tmp_path / "run").iterdir()) == [".bin", ".json", ".lock"]


@pytest.mark.parametrize("damage", ["killed", "cut", "without its description"])
def test_it_is_made_again_if_it_is_not_whole(tokenizer, texts, tmp_path, damage):
    settings = {"paths": (str(texts),), "tokenizer": str(tokenizer)}
    whole = read(tmp_path / "run", **settings)
    (file,) = (tmp_path / "run").glob("*.bin")
    if damage == "killed":
        file.rename(file.with_suffix(".unfinished"))
    elif damage == "cut":
        os.truncate(file, 7)
    else:
        file.with_suffix(".json").write_text("{")
    assert read(tmp_path / "run", **settings) == whole
    assert not file.with_suffix(".unfinished").exists()


def test_files_that_change_while_they_are_read(tokenizer, texts, tmp_path, monkeypatch):
    encode = HuggingFaceEncoder.encode

    def late(self, batch):
        (texts / "0.txt").write_text("another text")
        return encode(self, batch)

    monkeypatch.setattr(HuggingFaceEncoder, "encode", late)
    with pytest.raises(ConfigError, match=r"stay as they are; found that some changed while they were read. Start"):
        read(tmp_path / "run", paths=(str(texts),), tokenizer=str(tokenizer))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["corpus.lock"]


def test_any_change_is_noticed(tmp_path):
    """Also one between the places that the fingerprint of bytes looks at."""
    found, text = set(), "a" * 600_000
    for content in (text, f"{text[:6000]}b{text[6001:]}"):
        (tmp_path / "line.txt").write_text(content)
        os.utime(tmp_path / "line.txt", ns=(0, len(found)))
        settings = DataSettings(paths=(str(tmp_path / "line.txt"),), column="text")
        found.add(corpus_for(settings, tmp_path).split(0.1)[0].fingerprint())
    assert len(found) == 2


# Runs


def test_a_run_with_a_tokenizer(tokenizer, tmp_path):
    """It resumes with the same bits, writes text, keeps the tokenizer, and notices other data but not another time."""
    text = tmp_path / "text.txt"
    text.write_text(Path(README).read_text())
    data = {"data": {"paths": (str(text),), "tokenizer": str(tokenizer)}}
    whole = train(tmp_path / "whole", "off", run={"steps": 4}, **data)
    train(tmp_path / "run", run={"steps": 4, "save_every": 2, "sample_every": 4, "sample_bytes": 5}, **data)
    (tmp_path / "run/checkpoints/step-00000004").rename(tmp_path / "elsewhere")
    os.utime(text, ns=(0, 1))  # the same text, read again
    resumed = train(tmp_path / "run", run={"steps": 4}, **data)
    assert differences(whole.checkpoint, resumed.checkpoint) == []
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "run")
    assert (tmp_path / "run/samples.txt").read_text().count("--- step") == 1
    kept = HuggingFaceEncoder(RunFolder(tmp_path / "run").tokenizer)
    assert kept.identity == HuggingFaceEncoder(tokenizer).identity
    text.write_text(Path(README).read_text().replace("GiB", "GIB", 1))  # as long, of one other token
    with pytest.raises(ConfigError, match=r"of other data: expected data='\w+' as when it was saved, found .* begin a"):
        train(tmp_path / "run", run={"steps": 6}, **data)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_while_the_data_is_prepared(tokenizer, tmp_path, monkeypatch, number, raised):
    """The run ends after what is encoded together, not after all data; later signals wait for a step."""
    encode = HuggingFaceEncoder.encode

    def told(self, batch):
        os.kill(os.getpid(), number)
        return encode(self, batch)

    monkeypatch.setattr(HuggingFaceEncoder, "encode", told)
    with pytest.raises(raised):
        train(tmp_path / "run", data={"tokenizer": str(tokenizer)})
    assert not list((tmp_path / "run").glob("tokens-*"))
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_model_with_too_small_a_vocabulary(tokenizer, tmp_path, monkeypatch):
    """It is refused before the data is read; a model of our own grows instead."""
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    (tmp_path / "config.json").write_text(json.dumps(stand_in.LLAMA))
    values = {
        "model": {"transformers": str(tmp_path / "config.json")},
        "data": {"paths": (README,), "tokenizer": str(tokenizer), "sequence": 16},
        "run": {"folder": str(tmp_path / "run"), "progress": "quiet"},
    }
    with pytest.raises(ConfigError, match=r"The data has \d+ different tokens; .* found vocab_size=256 in .*Raise"):
        loop.run(build(values))
    assert not list((tmp_path / "run").glob("tokens-*"))


# Bad input


def bad(tmp_path: Path, tokenizer: Path) -> dict[str, tuple[dict, str]]:
    files = {
        "broken.jsonl": '{"text": "a"}\n{"text": broken\n',
        "numbers.jsonl": '{"text": "a"}\n{"text": 3}\n',
        "empty.jsonl": "",
        "notes.md": "# Notes",
        "other.json": "[1]",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "latin.txt").write_bytes("ü".encode("latin-1"))
    (tmp_path / "several").mkdir()
    (tmp_path / "several/dataset_dict.json").write_text("{}")
    at = {name: {"paths": (str(tmp_path / name),), "column": "text"} for name in (*files, "several")}
    whole, alone = {"tokenizer": str(tokenizer)}, {"tokenizer": str(tmp_path / "alone.json")}
    (tmp_path / "alone.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    return {
        "not JSON": (at["broken.jsonl"], r"files that the package datasets .* reads; found in .*broken.jsonl: .*Mend"),
        "not text": (at["numbers.jsonl"], r"'text' expects text; found int in row 1 of .*numbers.jsonl. Give another"),
        "nothing": (at["empty.jsonl"], r"Expected text in data.paths; found none in 1 files. Give other ones"),
        "no rows": (at["notes.md"], r"whose names end in .json, .*; found .*notes.md. Leave it out of data.paths"),
        "several": (at["several"], r"expects one dataset; .*several has several: .*Give the folder of one, such as"),
        "another column": (
            {**at["broken.jsonl"], "paths": (str(as_file(tmp_path, "jsonl", [{"n": 1}])),)},
            r"'text' expects a column of that name; row 0 of .*jsonl has n. Give one of these",
        ),
        "not UTF-8": (
            {**whole, "paths": (str(tmp_path / "latin.txt"),)},
            r"in UTF-8; .*latin.txt has other bytes near",
        ),
        "no tokenizer": ({"tokenizer": str(tmp_path)}, r"a tokenizer.json, or a folder that has one; found No such .*"),
        "another JSON": (
            {"tokenizer": str(tmp_path / "other.json")},
            r"that the package tokenizers .* reads; found in",
        ),
        "no end": (alone, r"separated by a token of .*; found no name for it beside the file. Give .*: <s>, </s>\."),
        "another end": ({**alone, "eos_token": "<eot>"}, r"found '<eot>', which is none. Give data.eos_token, such"),
    }


BAD = ["not JSON", "not text", "nothing", "no rows", "several", "another column", "not UTF-8", "no tokenizer"]
BAD += ["another JSON", "no end", "another end"]


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, tmp_path, tokenizer):
    settings, message = bad(tmp_path, tokenizer)[name]
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "run", **settings)
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {"corpus.lock"}


@pytest.mark.parametrize(
    ("package", "section", "settings", "extra"),
    [
        ("tokenizers", "data", {"tokenizer": "folder"}, "hf"),
        ("datasets", "data", {"column": "text", "paths": ("a.jsonl",)}, "datasets"),
        ("torch.utils.tensorboard", "run", {"track": ("tensorboard",)}, "tensorboard"),
        ("wandb", "run", {"track": ("wandb",)}, "wandb"),
    ],
)
def test_missing_package(package, section, settings, extra, tmp_path, monkeypatch):
    """One message before anything is made."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"expects the package .*Run `pip install 'offstage\[{extra}\]'`, or leave"):
        train(tmp_path / "run", **{section: settings})
    assert not (tmp_path / "run").exists()
