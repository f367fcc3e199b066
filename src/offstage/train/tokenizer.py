# SPDX-License-Identifier: Apache-2.0
"""`Encoder`: text to tokens and back, by a tokenizer of Hugging Face or byte by byte.

A document is the tokens that the tokenizer puts before a text (those of a Llama begin with one), those of the text, and
the token that ends it. A long text is encoded in pieces, so that memory stays bounded.
"""

from __future__ import annotations

import abc
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offstage import ConfigError
from offstage.train.config import DataSettings
from offstage.train.extras import optional
from offstage.train.model_sizes import BYTES

Tokens = npt.NDArray[np.unsignedinteger[Any]]

FILE = "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What a tokenizer's folder may have besides `FILE`, for programs that read the folder."""


class Encoder(abc.ABC):
    """Text to numbers in ``range(vocabulary)``."""

    vocabulary: int
    identity: str
    """Differs between encoders that give different tokens."""
    before: tuple[int, ...]
    """The tokens at the beginning of a document."""
    end: int
    """The token at the end of a document."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest that holds every token."""
        return np.min_scalar_type(self.vocabulary - 1)

    @abc.abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The tokens of each text, and nothing before or after them."""

    @abc.abstractmethod
    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text of these tokens; it may begin or end within a character."""


class ByteEncoder(Encoder):
    """UTF-8, with a zero byte at the end of a document."""

    vocabulary, identity, before, end = BYTES, "bytes", (), 0

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [text.encode("utf-8", "surrogatepass") for text in texts]

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(tokens)


class HuggingFaceEncoder(Encoder):
    """A tokenizer.json, by the package that made it."""

    def __init__(self, path: str | Path, eos_token: str | None = None) -> None:
        """`path`: the file, or its folder, which also names the token that ends a document unless `eos_token` does."""
        given = Path(path).expanduser()
        self.file = given / FILE if given.is_dir() else given
        tokenizers = optional("tokenizers", f"data.tokenizer={str(path)!r}")
        try:
            content = self.file.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except OSError as error:
            raise ConfigError(
                f"data.tokenizer expects a {FILE}, or a folder that has one; found {error.strerror or error} at "
                f"{self.file}. transformers writes it: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)."
            ) from error
        except Exception as error:  # the package raises no narrower one
            raise ConfigError(
                f"data.tokenizer expects a {FILE} that the package tokenizers {tokenizers.__version__} reads; found "
                f"in {self.file}: {error}. Give another file, or upgrade the package."
            ) from error
        self._tokenizer.no_truncation()  # a file may be saved with either, for inputs of one length
        self._tokenizer.no_padding()
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values()) + 1
        self.eos_token = _named_in(self.file.parent) if eos_token is None else eos_token
        self.end = self._end(ids)
        added = self._tokenizer.encode("", add_special_tokens=True).ids
        self.before = tuple(added[:-1] if added[-1:] == [self.end] else added)
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        self.identity = f"tokenizers {tokenizers.__version__} {digest} {self.end}"

    def _end(self, ids: dict[str, int]) -> int:
        if self.eos_token in ids:
            return ids[self.eos_token]
        special = [one.content for one in self._tokenizer.get_added_tokens_decoder().values() if one.special]
        found = "no name for it beside the file" if self.eos_token is None else f"{self.eos_token!r}, which is none"
        raise ConfigError(
            f"Documents are separated by a token of {self.file}; found {found}. Give data.eos_token, such as one of "
            f"its special tokens: {', '.join(special[:10]) or 'it has none'}."
        )

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> bytes:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text.encode("utf-8", "surrogatepass")

    def copy_to(self, folder: Path) -> None:
        """Write what `AutoTokenizer.from_pretrained(folder)` of transformers loads."""
        folder.mkdir(exist_ok=True)
        if folder.resolve() == self.file.resolve().parent:
            return  # a resumed run was given its own copy
        shutil.copyfile(self.file, folder / FILE)
        for name in _BESIDE:
            if (self.file.parent / name).is_file():
                shutil.copyfile(self.file.parent / name, folder / name)
        if not (folder / _BESIDE[0]).exists():
            about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos_token}
            (folder / _BESIDE[0]).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def encoder_for(settings: DataSettings) -> Encoder:
    """The one that `settings` name."""
    if settings.tokenizer is None:
        return ByteEncoder()
    return HuggingFaceEncoder(settings.tokenizer, settings.eos_token)


def _named_in(folder: Path) -> str | None:
    """The token that ends a text, if a file of the tokenizer's folder names it."""
    for name in _BESIDE[:2]:
        try:
            found = json.loads((folder / name).read_bytes()).get("eos_token")
        except (OSError, ValueError, AttributeError):  # not there, or not what it should be: then it names none
            continue
        token = found.get("content") if isinstance(found, dict) else found
        if isinstance(token, str):
            return token
    return None
