# SPDX-License-Identifier: Apache-2.0
"""A load as the data set ``custom`` of ``vllm bench serve``: a text for each prompt.

A text has to become so many tokens, block by block, and equal ones where prompts share a block. So
it is made of words that are one token each wherever they stand, and each text is taken apart by the
tokenizer again before it is written.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from analysis.errors import SessionError
from analysis.export.load import Load
from analysis.whatif.ids import Ints

_WORDS = 512
"""Different words that texts are made of, at most."""

_FEWEST = 8
"""With fewer, random blocks might be equal."""


def write(load: Load, file: BinaryIO, tokenizer: Path) -> None:
    """Write the load, in order of arrival and without times, which the format has not.

    Args:
        load: the requests.
        file: where they go.
        tokenizer: the model's tokenizer.json, or the folder that has it.

    Raises:
        SessionError: the tokenizer cannot be read, or its texts cannot be told beforehand.

    """
    known = _tokenizer(tokenizer)
    special = _special(known, tokenizer)
    texts = _texts(known, tokenizer)
    for number, ids in enumerate(load.ids):
        count = int(load.input_tokens[number])
        if count <= special:
            raise SessionError(
                f"{tokenizer} puts {special} tokens before each text, and a prompt has {count}; "
                "use --format timed-trace"
            )
        chosen = _chosen(ids, load.block_size, count, len(texts.words))[special:]
        text = texts.of(chosen)
        found = known.encode(text).ids
        # Equal words are equal tokens, and no token is two words.
        if len(found) != count or len(set(found[special:])) != len(set(chosen)):
            raise SessionError(
                f"{tokenizer} makes {len(found)} tokens of a text that was made for {count}; use "
                "--format timed-trace"
            )
        line = {"prompt": text, "output_tokens": int(load.output_tokens[number])}
        file.write(f"{json.dumps(line)}\n".encode())


def _chosen(ids: Ints, size: int, count: int, words: int) -> list[int]:
    """The words of a prompt, by number: those of each block follow from its id."""
    found: list[int] = []
    for each in ids.tolist():
        found += random.Random(each).choices(range(words), k=size)
    return found[:count]


def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_str(file.read_text())
    except OSError as error:
        raise SessionError(f"cannot read {file}: {error.strerror or error}") from None
    except Exception as error:
        what = " ".join(str(error).split())[:200]
        raise SessionError(f"{file} is no tokenizer that can be read: {what}") from None


def _special(known: Any, path: Path) -> int:
    """Tokens that come before each text."""
    bare, whole = (known.encode("a", add_special_tokens=special).ids for special in (False, True))
    before = len(whole) - len(bare)
    if whole[before:] != bare:
        raise SessionError(f"{path} puts tokens behind each text; use --format timed-trace")
    return before


@dataclass(frozen=True)
class _Texts:
    """Texts of ``words`` with ``between`` them, and ``before`` all."""

    before: str
    between: str
    words: list[str]

    def of(self, chosen: Iterable[int]) -> str:
        """The text of the words with these numbers."""
        return self.before + self.between.join(self.words[each] for each in chosen)


def _texts(known: Any, path: Path) -> _Texts:
    """Words that are one token each, wherever they stand."""
    letters = [chr(number) for number in range(ord("a"), ord("z") + 1)]
    whole = [
        word
        for number in known.get_vocab().values()
        if re.fullmatch(r"[a-z]{2,12}", word := known.decode([number]).strip())
    ]
    # Most tokenizers have a space within a word's token. Some put it before a text by themselves.
    for before, between, candidates in ((" ", " ", whole), ("", " ", whole), ("", "", letters)):
        every = _Texts(before, between, sorted(set(candidates)))
        sound = [
            word
            for number, word in enumerate(every.words)
            if _is_one_each(known, every.of([number] * 3))
        ]
        if len(sound) >= _FEWEST:
            return _Texts(before, between, sound[:: -(-len(sound) // _WORDS)])
    raise SessionError(
        f"{path} has too few words that are one token each; use --format timed-trace"
    )


def _is_one_each(known: Any, text: str) -> bool:
    """Whether a text of three equal words is three equal tokens."""
    found = known.encode(text, add_special_tokens=False).ids
    return len(found) == 3 and len(set(found)) == 1
