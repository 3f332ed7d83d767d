# SPDX-License-Identifier: Apache-2.0
"""Command lines with a secret somewhere in them: none of it may be left in what a session keeps."""

from __future__ import annotations

import json
import string
import time
import uuid
from collections import Counter
from pathlib import Path
from random import Random

from attacks.figure import Figure
from profilemate.record import known_options
from profilemate.record.redact import redact

PROGRAMS: tuple[list[str], ...] = (
    ["vllm", "serve"],
    ["vllm", "serve", "org/model"],
    ["/usr/bin/python3", "-u", "/venv/bin/vllm", "serve", "org/model"],
    ["python", "-m", "vllm.entrypoints.openai.api_server"],
    ["python", "serve.py"],
    ["python", "-c"],
    ["env"],
    [],
)
WORDS = (
    "--header",
    "-H",
    "-e",
    "--my-option",
    "--api-key",
    "--hf-token",
    "-p",
    "--",
    "-x",
    "token",
)
CHARACTERS = string.ascii_letters + string.digits
SAFE = [
    *("--dtype", "auto", "--max-model-len", "4096", "-tp", "2", "--enforce-eager"),
    *("--model", "org/model", "true"),
]


def run(count: int, seed: int, folder: Path) -> list[Figure]:
    """Redact ``count`` command lines."""
    found: Counter[str] = Counter()
    slowest = 0.0
    options = [
        f"--{name}"
        for names in (
            known_options.NUMBERS,
            known_options.FLAGS,
            known_options.CHOICES,
            known_options.NAMES,
            known_options.OBJECTS,
        )
        for name in sorted(names)
    ]
    options += [*known_options.SHORT, *WORDS * 5]
    for number in range(count):
        random = Random(f"{seed} {number}")
        secret = _secret(random)
        argv = _command(random, options, _spelled(random, secret))
        began = time.process_time()
        kept = redact(argv)
        slowest = max(slowest, time.process_time() - began)
        found["words of other lengths"] += len(kept) != len(argv)
        left = [word for word in kept if secret in word]
        if left:
            is_name = all(word.rpartition("=")[2] == secret or '"model"' in word for word in left)
            found["left as a name" if is_name else "left"] += 1
            print(f"{argv} -> {kept}")
    return [
        Figure("command lines", count),
        Figure("secrets that were left", found["left"], most=0),
        # A name may be anything that does not look like a key.
        Figure("in the place of a name", found["left as a name"], most=count / 10_000),
        Figure("command lines with other words", found["words of other lengths"], most=0),
        Figure("slowest", slowest * 1e3, "ms", most=100),
    ]


def _secret(random: Random) -> str:
    """A key or a password such as there are."""

    def letters(length: int, alphabet: str = CHARACTERS) -> str:
        return "".join(random.choices(alphabet, k=length))

    return random.choice(
        (
            lambda: "hf_" + letters(34),
            lambda: "sk-proj-" + letters(48, CHARACTERS + "-_"),
            lambda: "ghp_" + letters(36),
            lambda: "AKIA" + letters(16, string.ascii_uppercase + string.digits),
            lambda: letters(40, CHARACTERS + "/+"),
            lambda: "eyJ" + ".".join(letters(40, CHARACTERS + "-_") for _ in range(3)),
            lambda: letters(32, "0123456789abcdef"),
            lambda: str(uuid.UUID(int=random.getrandbits(128))),
            lambda: letters(43, CHARACTERS + "-_"),
            lambda: letters(6) + random.choice("@!%&=;#$") + letters(6) + random.choice("/:@?"),
        )
    )()


def _spelled(random: Random, secret: str) -> str:
    """The secret as some option has it."""
    nested = json.dumps({"api_key": secret})
    return random.choice(
        (
            secret,
            f"Bearer {secret}",
            f"Authorization: Bearer {secret}",
            f"TOKEN={secret}",
            f"https://{secret}@host/path",
            f"https://user:{secret}@host/path",
            f"s3://key:{secret}@bucket/path",
            f"https://host/path?token={secret}",
            f"user:{secret}@host",
            f'os.environ["TOKEN"]="{secret}"',
            f"--password={secret}",
            nested,
            json.dumps({"model": secret, "method": secret, secret: 1}),
            json.dumps({"extra": nested, "rope_scaling": [{"factor": secret}]}),
            json.dumps([secret]),
            f"{{{secret}",
        )
    )


def _command(random: Random, options: list[str], value: str) -> list[str]:
    """The value behind an option, or where none is expected, among other words."""
    argv = list(random.choice(PROGRAMS))
    argv += random.sample(SAFE, random.randint(0, 4))
    option = random.choice(options)
    if random.random() < 0.3:
        option = option[:2] + option[2:].replace("-", "_")
    if random.random() < 0.2:
        option += f".{random.choice(('model', 'mode', 'rope_scaling.factor', 'key', value))}"
    argv += random.choice(
        ([option, value], [f"{option}={value}"], [option, "1", value], [value], [option + value])
    )
    return argv + random.sample(SAFE, random.randint(0, 4))
