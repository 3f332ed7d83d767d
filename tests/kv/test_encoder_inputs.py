# SPDX-License-Identifier: Apache-2.0
"""What steps give to the encoder of a multimodal model, by vLLM's own scheduler.

The model is a text model. So each request is given its images by hand, as the processor of a
multimodal model would do, and the scheduler is given room for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from profilemate.hooks.kv import steps
from tests.kv.recording import hooks_only, make_tables, only_session
from tests.support.scheduler import RequestMaker, build_scheduler, step, tokens

pytestmark = pytest.mark.usefixtures("hooks_on")

ENCODER_TOKENS = 64
"""The most that the encoder computes in a step."""


def build(model: Path) -> Any:
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    scheduler = build_scheduler(model, 100, max_num_batched_tokens=128)
    scheduler.max_num_encoder_input_tokens = ENCODER_TOKENS
    scheduler.encoder_cache_manager = EncoderCacheManager(1024)
    return scheduler


def with_images(request: Any, *images: tuple[str, int, int]) -> Any:
    """Give a request images of (name, place in the prompt, tokens)."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    request.mm_features = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
        for name, offset, length in images
    ]
    return request


def recorded(model: Path, folder: Path, *requests: Any) -> tuple[list[Any], list[Any]]:
    """Of each step the items and tokens of its row, and the items in the scheduler's output."""
    with hooks_only(folder):
        scheduler = build(model)
        for request in requests:
            scheduler.add_request(request)
        items = []
        while scheduler.has_unfinished_requests():
            output = step(scheduler)
            items.append(sum(map(len, output.scheduled_encoder_inputs.values())))
    rows = make_tables(only_session(folder), folder / "tables").rows("scheduler_steps.csv")
    busy = [row for row in rows if row["scheduled_tokens"]]
    return [(row["encoder_items"], row["encoder_tokens"]) for row in busy], items


def test_items_and_their_tokens_by_step(model: Path, tmp_path: Path) -> None:
    make = RequestMaker()
    images = ("a", 2, 40), ("b", 50, 20), ("c", 80, 30)
    first = with_images(make("first", tokens(1, 120), 3), *images)
    # The encoder has computed this one for the first request.
    second = with_images(make("second", tokens(2, 100), 2), ("a", 5, 40))
    rows, items = recorded(model, tmp_path, first, second)
    assert [count for count, _ in rows] == items
    # 60 of 64 tokens in the first step; the third image has to wait for the next one.
    assert rows[:2] == [(2, 60), (1, 30)]
    assert all(row == (0, 0) for row in rows[2:])
    assert len(rows) > 3


def test_only_embeddings_count_as_tokens(model: Path, tmp_path: Path) -> None:
    import torch

    request = with_images(RequestMaker()("r", tokens(1, 50), 1), ("a", 2, 40))
    # As of models that put separators between the tokens of an image.
    embedded = [place % 4 != 0 for place in range(40)]
    request.mm_features[0].mm_position.__dict__["is_embed"] = torch.tensor(embedded)
    rows, _ = recorded(model, tmp_path, request)
    assert rows[0] == (1, 30)


def test_tokens_that_are_not_known(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that counts them in another way costs the tokens, and nothing else."""
    request = with_images(RequestMaker()("r", tokens(1, 50), 1), ("a", 2, 40))
    monkeypatch.setattr(steps, "_tokens_of_item", lambda *_: {}["gone"])
    rows, items = recorded(model, tmp_path, request)
    assert rows[0] == (1, None)
    assert items[0] == 1
