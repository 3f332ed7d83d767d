# SPDX-License-Identifier: Apache-2.0
"""Which methods are watched, and which are missing, on objects of vLLM's shape."""

from __future__ import annotations

from profilemate.hooks import targets
from profilemate.hooks.instances import hook
from profilemate.hooks.targets import attached_and_missing


class Elastic:
    """A pool that a plugin made, without a way to evict blocks by order."""

    def touch(self, blocks: list[int]) -> None: ...

    def reset_prefix_cache(self) -> bool:
        return True


def test_attached_and_missing() -> None:
    pool = Elastic()
    undo = hook(pool, "touch")
    found = attached_and_missing({targets.POOL: [pool]}, "0.23.0")
    assert found["attached"] == ["Elastic.touch"]
    # What is there and not watched is neither; partial blocks came later than this release.
    assert found["missing"]["Elastic.evict_blocks"] == "explicit evictions"
    assert "Elastic.reset_prefix_cache" not in found["missing"]
    assert "Elastic.cache_partial_block" not in found["missing"]
    later = attached_and_missing({targets.POOL: [pool]}, "0.24")
    assert "Elastic.cache_partial_block" in later["missing"]
    undo()
    assert attached_and_missing({targets.POOL: [pool]}, "0.23.0")["attached"] == []


def test_each_model_runner_has_its_own() -> None:
    class GPUModelRunner: ...

    first = attached_and_missing({targets.RUNNER: [GPUModelRunner()]}, "0.33.0")["missing"]
    second = attached_and_missing({targets.RUNNER_V2: [GPUModelRunner()]}, "0.33.0")["missing"]
    only_first = {name.rpartition(".")[2] for name in first.keys() - second.keys()}
    assert only_first == {"_determine_batch_execution_and_padding"}
