# SPDX-License-Identifier: Apache-2.0
"""The cases of ``truth`` as a plan sees them."""

from __future__ import annotations

from analysis.plan import config, platforms
from analysis.plan.model import Model
from analysis.plan.settings import Settings
from tests.plan.truth import MEMORY, Case, entries_of


def model_of(case: Case) -> Model:
    return config.model(entries_of(case), case.model)


def settings_of(case: Case, **other: object) -> Settings:
    return Settings(
        platform=platforms.named(case.platform),
        block_size=case.block_size,
        kv_cache_dtype=case.cache_dtype,
        tensor_parallel=case.tensor,
        pipeline_parallel=case.pipeline,
        prefix_caching=case.caching,
        hybrid=case.hybrid,
        kv_bytes=MEMORY,
        **other,  # type: ignore[arg-type]
    )
