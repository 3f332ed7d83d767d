# SPDX-License-Identifier: Apache-2.0
"""What another platform changes, and how the platform of a machine or of a session is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis import open_session
from analysis.plan import config, plan, platforms, reality, recorded
from analysis.plan.platforms import AMX_CPU, BASIC_CPU, BF16_CPU, GPU, Platform
from analysis.plan.reality import Reality
from analysis.plan.settings import Settings
from tests.analysis.builder import SessionBuilder
from tests.analysis.graphs import set_up
from tests.analysis.invoke import invoke
from tests.plan.truth import CONFIGS

JAMBA = config.read(CONFIGS / "jamba-v0.1.json")
FULL, STATE = "FullAttentionSpec", "MambaSpec"


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("processor : 0\nflags : fpu avx512f avx512_bf16 amx_tile\n", "cpu-amx"),
        ("processor : 0\nflags : fpu avx512f avx512_bf16\n", "cpu-avx512-bf16"),
        ("processor : 0\nflags : fpu avx512f avx512_bf16x\n", "cpu-basic"),
        ("processor : 0\nFeatures : fp asimd bf16\n", "cpu-basic"),
        ("", "cpu-basic"),
    ],
)
def test_a_machine(tmp_path: Path, content: str, name: str) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(content)
    found = platforms.here(file)
    assert found.name == name
    assert found.about.endswith(", as this machine's")


def test_a_machine_that_lists_nothing(tmp_path: Path) -> None:
    assert platforms.here(tmp_path / "none").name == "cpu-basic"


@pytest.mark.parametrize(
    ("platform", "size"), [(GPU, 80), (BASIC_CPU, 128), (BF16_CPU, 256), (AMX_CPU, 256)]
)
def test_blocks_hold_a_state(platform: Platform, size: int) -> None:
    """Of 4,096 bytes a token: 311,296 bytes are 76, with 4 bytes a number 573,440 are 140."""
    found = plan(JAMBA, Settings(platform=platform))
    assert {one.block_size for one in found.layout.groups} == {size}
    assert {one.page_bytes for one in found.layout.groups} == {size * 4096}


@pytest.mark.parametrize(("platform", "sizes"), [(BASIC_CPU, [16]), (AMX_CPU, [32, 64, 128, 256])])
def test_blocks_of_latent_attention(platform: Platform, sizes: list[int]) -> None:
    """Without AMX there are no others than of 16 tokens, whatever is asked for."""
    model = config.read(CONFIGS / "deepseek-v3.json")
    found = plan(model, Settings(platform=platform, block_size=64))
    assert [one.block_size for one in found.by_block_size] == sizes
    assert found.layout.groups[0].block_size == (16 if platform is BASIC_CPU else 64)
    refused = [note for note in found.notes if note.startswith("Without AMX")]
    assert len(refused) == (platform is BASIC_CPU)


def test_no_batch_is_scheduled_ahead_on_a_cpu() -> None:
    """4,095 + 2,048 tokens = 6,143, in 48 blocks of 128, and one for where the window begins."""
    mistral = config.read(CONFIGS / "mistral-7b-v0.1.json")
    assert plan(mistral, Settings(platform=BASIC_CPU)).worst.blocks == 49


def beside(
    session: SessionBuilder, size: int, states: str | None, device: str = "cpu", **changes: Any
) -> Reality:
    """Jamba's session, with blocks of this size."""
    cache = {
        "block_size": [size] * 8,
        "blocks": 1000,
        "cache_dtype": "auto",
        "mamba_ssm_cache_dtype": states,
        "max_model_len": 4096,
    }
    kinds = [STATE] * 7 + [FULL]
    groups = [{"kind": kind, "block_size": size, "bytes_per_block": size * 16384} for kind in kinds]
    set_up(session, device=device, cache=cache, groups=groups)
    opened = open_session(session.folder)
    settings = replace(recorded.settings_of(opened), **changes)
    return reality.against(opened, JAMBA, settings)


def state_bytes(found: Reality) -> int:
    return found.plan.layout.groups[0].state_bytes


def test_states_are_those_of_the_engine(session: SessionBuilder) -> None:
    """Whatever its processor: another release keeps other types on the same one."""
    assert state_bytes(beside(session, 256, "float32")) == 573_440
    assert state_bytes(beside(session, 256, "auto")) == 311_296
    assert state_bytes(beside(session, 256, "float16")) == 311_296
    for dtype, precise in (("float32", True), ("auto", False)):
        platform = beside(session, 256, dtype).plan.settings.platform
        assert (platform.name, platform.float32_states) == ("cpu", precise)


def test_states_that_were_asked_for_on_a_gpu(session: SessionBuilder) -> None:
    found = beside(session, 144, "float32", device="cuda")
    assert (state_bytes(found), found.plan.settings.platform) == (573_440, GPU)


def test_another_platform_than_the_sessions(session: SessionBuilder) -> None:
    beside(session, 256, "float32")
    for platform, size in (("gpu", 80), ("cpu-basic", 96), ("cpu-amx", 160)):
        options = ("--platform", platform, "--block-size", 16, "--without-vllm", "--json")
        ended = invoke("plan", CONFIGS / "jamba-v0.1.json", "--session", session.folder, *options)
        assert json.loads(ended.stdout)["plan"]["layout"]["groups"][0]["block_size"] == size


@pytest.mark.parametrize(("size", "unknown"), [(128, False), (160, True)])
def test_older_sessions(session: SessionBuilder, size: int, unknown: bool) -> None:
    """Blocks of 128 tokens hold no state in float32; those of 160 hold either."""
    says = "The session does not record the type of its states."
    notes = beside(session, size, None).notes
    assert [note.startswith(says) for note in notes].count(True) == unknown
    asked = beside(session, size, None, platform=BF16_CPU)
    assert not any(note.startswith(says) for note in asked.notes)
