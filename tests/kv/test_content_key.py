# SPDX-License-Identifier: Apache-2.0
"""Content ids that sessions have in common: by the same secret, and by nothing else."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tests
from profilemate import config
from profilemate.record import content_secret
from tests.kv.recording import Tables, hooks_only, make_tables, only_session
from tests.kv.transcript import transcript
from tests.support.scheduler import RequestMaker, build_scheduler, tokens, write_model

SECRET = b"0123456789abcdefHunter2Canary"
OTHER = b"another secret of some length"

Play = Callable[..., Tables]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path / "content.key", SECRET)


def key_file(path: Path, secret: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(secret)
    path.chmod(mode)
    return path


@pytest.fixture
def play(model: Path, hooks_on: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs requests through a scheduler of its own, into a session of its own."""

    def run(
        variables: Mapping[str, Any],
        *kinds: Mapping[str, Any],
        block_size: int = 16,
        folder: Path | None = None,
        of_model: Path = model,
        **arguments: Any,
    ) -> Tables:
        sessions = folder or tmp_path / f"sessions{len(list(tmp_path.iterdir()))}"
        with hooks_only(sessions), pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, str(value))
            make = RequestMaker(block_size)
            scheduler = build_scheduler(of_model, 80, block_size=block_size, **arguments)
            _take_images(scheduler)
            for number, fields in enumerate(kinds or ({},)):
                transcript(scheduler, [(0, make(f"r{number}", tokens(1, 70), 40, **fields))])
        session = max(sessions.glob("session_*"), key=os.path.getmtime)
        return make_tables(session, tmp_path / f"tables{len(list(tmp_path.iterdir()))}")

    return run


def _take_images(scheduler: Any) -> None:
    """Give a text model's scheduler room for what an encoder makes of images."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    scheduler.max_num_encoder_input_tokens = 64
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=64)


COLUMNS = ("hash_ids", "output_hash_ids", "bare_hash_ids", "prefix_ids")


def ids(tables: Tables) -> set[int]:
    """All content and prefix ids of a session."""
    return {
        number
        for row in tables.requests().values()
        for column in COLUMNS
        for number in row[column] or []
    }


def full(tables: Tables, request: str = "r0") -> list[Any]:
    """Of a request of 70 tokens and 40 more: its full blocks and those of its answer, and its
    prefixes."""
    row = tables.requests()[request]
    return [*row["hash_ids"][:-1], *row["output_hash_ids"], *row["prefix_ids"]]


def test_two_processes_with_one_secret(model: Path, key: Path, tmp_path: Path) -> None:
    """Python's own hashes differ from one process to the other; the contents' ids do not, those
    of the answer's blocks included. Without the secret nothing is alike."""
    asked = {"a": str(key), "b": str(key), "c": "", "d": ""}
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.pop("PYTHONHASHSEED", None)
    for names in ("ab", "cd"):
        children = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.kv.one_process"),
                    *(str(model), str(tmp_path / name), asked[name], "5"),
                ],
                cwd=Path(tests.__file__).parent.parent,
                env=environment,
            )
            for name in names
        ]
        assert [child.wait() for child in children] == [0, 0]
    a, b, c, d = (
        make_tables(only_session(tmp_path / name), tmp_path / f"tables-{name}") for name in asked
    )
    first, second = (one.requests()["first"] for one in (a, b))
    assert len(first["output_hash_ids"]) == 2
    assert first["hash_ids"][:2] == second["hash_ids"][:2]
    assert first["output_hash_ids"] == second["output_hash_ids"]
    assert first["prefix_ids"] == second["prefix_ids"]
    # What no other request can have is of one session, too.
    assert not {row["hash_ids"][2] for row in a.requests().values()} & ids(b)
    assert a.metadata["contents_key"] == b.metadata["contents_key"]
    assert len(bytes.fromhex(a.metadata["contents_key"])) == 8
    assert a.metadata["contents_apart_because"] is None
    assert not ids(a) & ids(c)
    assert c.metadata["contents_key"] is None
    assert c.metadata["contents_apart_because"] == (
        "VLLM_PROFILING_CONTENT_KEY is not set to a file's absolute path or to 'deployment'"
    )
    once = {number for row in c.requests().values() for number in row["hash_ids"][2:]}
    assert (ids(c) - once).isdisjoint(ids(d))


def test_another_secret_model_or_block_size(play: Play, key: Path, tmp_path: Path) -> None:
    given = {config.CONTENT_KEY: key}
    first = play(given)
    again = play(given)
    assert full(again) == full(first)
    others = [
        play({config.CONTENT_KEY: key_file(tmp_path / "other.key", OTHER)}),
        play(given, of_model=write_model(tmp_path / "same-but-elsewhere")),
        play(given, block_size=32),
        play({**given, "PYTHONHASHSEED": 1}),
        play({**given, "PYTHONHASHSEED": 2}),
        play(given, enable_prefix_caching=False),
    ]
    everyone = [first, *others]
    for place, one in enumerate(everyone):
        for other in everyone[:place]:
            assert not ids(one) & ids(other)
    names = [one.metadata["contents_key"] for one in everyone]
    assert len(set(names)) == len(names)
    assert None not in names


def test_a_seed_of_pythons_that_is_given_alike(play: Play, key: Path) -> None:
    given = {config.CONTENT_KEY: key, "PYTHONHASHSEED": 7}
    first, again = play(given), play(given)
    assert full(first) == full(again)
    assert first.metadata["contents_key"] == again.metadata["contents_key"]


def test_adapters_salts_and_images_are_apart_in_each_session_alike(play: Play, key: Path) -> None:
    """An adapter's number is of one process: the same adapter has another one elsewhere."""
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import PlaceholderRange

    def kinds(number: int) -> list[dict[str, Any]]:
        place = PlaceholderRange(offset=4, length=8)
        return [
            {},
            {"cache_salt": "a"},
            {"cache_salt": "b"},
            {"lora_request": LoRARequest("mine", number, "/adapters/mine")},
            {"lora_request": LoRARequest("other", 9, "/adapters/other")},
            {"mm_features": [_image("cat", place)]},
            {"mm_features": [_image("dog", place)]},
        ]

    given = {config.CONTENT_KEY: key}
    # Blocks of 32 tokens: every second prefix has an id of its own.
    first, again = (play(given, *kinds(number), block_size=32) for number in (1, 2))
    rows, others = first.requests(), again.requests()
    for request in rows:
        assert full(first, request) == full(again, request)
        assert rows[request]["tenant"] == others[request]["tenant"]
        assert rows[request]["bare_hash_ids"] == others[request]["bare_hash_ids"]
    contents = [set(full(first, request)) for request in rows]
    for place, one in enumerate(contents):
        for other in contents[:place]:
            assert not one & other
    assert rows["r1"]["bare_hash_ids"] == rows["r0"]["hash_ids"][:2]
    assert rows["r1"]["tenant"] != rows["r2"]["tenant"]


def _image(name: str, place: Any) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=name, mm_position=place, mm_hash=name
    )


def test_hashes_that_are_of_one_process(play: Play, key: Path) -> None:
    """By xxhash vLLM begins with random bytes, so nothing can be compared; the reason says what to
    do."""
    given = {config.CONTENT_KEY: key}
    first = play(given, prefix_caching_hash_algo="xxhash")
    assert first.metadata["contents_key"] is None
    assert "PYTHONHASHSEED" in first.metadata["contents_apart_because"]
    assert not first.metadata["content_ids_shared"]
    again = play(given, prefix_caching_hash_algo="xxhash")
    assert not set(full(first)) & set(full(again))


def test_a_deployments_own_secret(play: Play, tmp_path: Path) -> None:
    """It is made by the first session in the folder, for each deployment."""
    folder = tmp_path / "shared"
    named = {config.CONTENT_KEY: "deployment", config.DEPLOYMENT: "chat/prod"}
    first, again = play(named, folder=folder), play(named, folder=folder)
    other = play({**named, config.DEPLOYMENT: "chat/test"}, folder=folder)
    elsewhere = play(named, folder=tmp_path / "elsewhere")
    assert full(first) == full(again)
    assert first.metadata["deployment"] == "chat/prod"
    for one in (other, elsewhere):
        assert not ids(first) & ids(one)
    (keys,) = folder.glob(".content-keys-*")
    assert keys.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in keys.iterdir()] == [0o600] * 2


def test_a_deployment_without_an_id(
    play: Play, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = play({config.CONTENT_KEY: "deployment"})
    reason = "the deployment has no id; set VLLM_PROFILING_DEPLOYMENT"
    assert found.metadata["contents_apart_because"] == reason
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "profilemate: " in line]
    assert reason in line
    assert found.metadata["deployment"] is None


@pytest.mark.parametrize(
    ("secret", "mode", "said"),
    [
        (b"x" * 15, 0o600, "has 15 bytes; 16 are the least"),
        (b"x" * 15 + b"\n\r\n", 0o600, "has 15 bytes"),
        (b"", 0o600, "has 0 bytes"),
        (b"x" * 70_000, 0o600, "more than 65,536 bytes"),
        (SECRET, 0o604, "others may read or change"),
        (SECRET, 0o640, "others may read or change"),
        (SECRET, 0o620, "others may read or change"),
        (SECRET, 0o602, "others may read or change"),
    ],
)
def test_secrets_that_are_none(tmp_path: Path, secret: bytes, mode: int, said: str) -> None:
    path = key_file(tmp_path / "key", secret, mode)
    with pytest.raises(content_secret.SecretError, match=said):
        content_secret.read(config.read({config.CONTENT_KEY: str(path)}), None)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, said in (
        (tmp_path / "pipe", "is no plain file"),
        (tmp_path, "is no plain file"),
        (tmp_path / "gone", "No such file"),
        (Path("/proc/self/mem"), "^/proc/self/mem: "),  # It opens, and cannot be read.
    ):
        with pytest.raises(content_secret.SecretError, match=said):
            content_secret.read(config.read({config.CONTENT_KEY: str(path)}), None)


def test_whose_file_it_may_be(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own, or root's, which the user's group may read."""
    check = content_secret._check
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for owner, mode in ((1000, 0o600), (1000, 0o400), (0, 0o440), (0, 0o400)):
        check(key, _info(owner, mode))
    for owner, mode in ((1000, 0o440), (0, 0o444), (0, 0o460), (1001, 0o600)):
        with pytest.raises(content_secret.SecretError):
            check(key, _info(owner, mode))


def _info(owner: int, mode: int) -> Any:
    return SimpleNamespace(st_mode=stat.S_IFREG | mode, st_uid=owner)


def test_a_line_end_is_no_part_of_the_secret(tmp_path: Path) -> None:
    plain = key_file(tmp_path / "plain", SECRET)
    ended = key_file(tmp_path / "ended", SECRET + b"\r\n")
    first, second = (
        content_secret.read(config.read({config.CONTENT_KEY: str(path)}), None)
        for path in (plain, ended)
    )
    assert first == second


def test_the_secret_in_the_variable_itself_is_not_repeated() -> None:
    """Whoever puts it there by mistake finds it in no log."""
    read = config.read({config.CONTENT_KEY: "Hunter2CanaryHunter2"})
    assert read.content_key == ""
    (problem,) = read.problems
    assert "Hunter2" not in problem


def test_the_secret_is_in_no_file(
    play: Play, key: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor is what is made of it, once the tables are complete."""
    from profilemate import collector

    sessions = tmp_path / "sessions"
    tables = play({config.CONTENT_KEY: key}, folder=sessions)
    session = only_session(sessions)
    made = json.loads((session / "journal" / "session.json").read_bytes())["contents"]
    assert made != SECRET.hex()
    assert (session / "journal" / "session.json").stat().st_mode & 0o777 == 0o600
    said = capfd.readouterr()
    content = _contents(session) + _contents(tables.folder) + said.out.encode() + said.err.encode()
    for spelled in (SECRET, SECRET.hex().encode(), b"Hunter2"):
        assert spelled not in content
    collector.finalize(session)
    assert made.encode() not in _contents(session)
    assert bytes.fromhex(made) not in _contents(session)


def _contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_collector_that_was_killed_keeps_the_ids(play: Play, key: Path, tmp_path: Path) -> None:
    """finalize needs no secret: what the ids are made with is in the journal."""
    from profilemate import collector

    sessions = tmp_path / "sessions"
    tables = play({config.CONTENT_KEY: key}, folder=sessions)
    key.unlink()
    session = only_session(sessions)
    collector.finalize(session)
    assert Tables(session).bytes_of() == tables.bytes_of()
