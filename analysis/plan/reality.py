# SPDX-License-Identifier: Apache-2.0
"""What would the plan have said of the engine that a session recorded?

The plan comes from the model and the settings alone. ``recorded`` reads these from the session,
and ``differences`` puts the plan's figures beside the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.gpu.memory import measure
from analysis.plan import Plan, differences, plan, platforms
from analysis.plan.built import Classes, not_asked
from analysis.plan.differences import Figure
from analysis.plan.groups import Grouping, group
from analysis.plan.model import Model, State
from analysis.plan.settings import Settings
from analysis.plan.specs import block_size
from analysis.tables import facts as session_facts
from analysis.tables.metadata import text
from analysis.tables.session import Session


@dataclass(frozen=True)
class Reality:
    """A plan beside a session. ``session``: the session's id. ``figures``: in the order of the
    arithmetic. ``notes``: what the session does not record."""

    session: str
    plan: Plan
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]


def against(
    session: Session,
    model: Model,
    settings: Settings,
    *,
    folder: Path | None = None,
    average_len: int | None = None,
    worst_len: int | None = None,
    grouping: Grouping = group,
    ask: Classes = not_asked,
) -> Reality:
    """Plan this model with the session's settings, beside what the engine did.

    Args:
        session: the session.
        model: the model, from its configuration or as the session describes it.
        settings: the session's (``recorded.settings_of``), changed or not.
        folder: the folder with the model's weights; None where there is none.
        average_len: tokens of a usual sequence.
        worst_len: tokens of the longest sequence expected.
        grouping: makes the groups; by default ``groups.group``.
        ask: what vLLM's own classes make of the model; by default they are not asked.

    Raises:
        RuleError: a setting makes no sense, or vLLM cannot serve the model with these settings.
        SessionError: a table of the session cannot be read.

    """
    facts = session_facts.read(session)
    start_up = measure(session, facts).start_up
    notes = list(_states(model, settings))

    def planned(changed: Settings) -> Plan:
        return plan(
            model,
            changed,
            folder=folder,
            average_len=average_len,
            worst_len=worst_len,
            grouping=grouping,
            ask=ask,
        )

    found = planned(settings)
    has_weights = found.weights is not None
    if not has_weights and start_up is not None and start_up.weights_bytes is not None:
        gpus = settings.tensor_parallel * settings.pipeline_parallel
        found = planned(replace(settings, weight_bytes=start_up.weights_bytes * gpus))
        notes.append(
            "The weights are the session's own: name the model's folder or its config.json to "
            "predict them."
        )
    given = found.pool is None and bool(facts.pool_blocks)
    if given:
        found = planned(replace(settings, blocks=facts.pool_blocks))
        notes.append(
            "The session records no memory of a GPU. The plan takes the session's number of "
            "blocks, and predicts the figures that follow from it."
        )
    return Reality(
        session=text(session.metadata.get("session_id")) or session.directory.name,
        plan=found,
        figures=tuple(
            differences.figures(model, found, facts, start_up, has_weights=has_weights, given=given)
        ),
        notes=tuple(notes),
    )


def _states(model: Model, settings: Settings) -> Iterator[str]:
    """A note where the session of an engine on a CPU does not show the type of its states."""
    platform = settings.platform
    if platform.float32_states is not None or not any(isinstance(x, State) for x in model.cached):
        return
    precise = replace(settings, platform=replace(platform, float32_states=True))
    # Blocks too short for states in float32 show that the states had another type.
    if block_size(model, precise) == block_size(model, settings):
        yield (
            "The session does not record the type of its states. On a processor with AVX512-BF16 "
            f"vLLM keeps them in float32: --platform {platforms.BF16_CPU.name}."
        )
