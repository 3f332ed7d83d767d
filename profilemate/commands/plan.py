# SPDX-License-Identifier: Apache-2.0
"""``profilemate plan``: how much KV cache a model will have, and where an engine differed."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from analysis.errors import RuleError
from profilemate.commands.options import AsJson, folder
from profilemate.commands.reporting import one_line
from profilemate.commands.waiting import waiting
from profilemate.config import SWITCH

if TYPE_CHECKING:
    from analysis.plan import Plan
    from analysis.plan.groups import Grouping
    from analysis.plan.model import Model
    from analysis.plan.reality import Reality
    from analysis.plan.settings import Settings


def _option(name: str, text: str, metavar: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False)


Whole = int | None
Text = str | None


def plan(
    model: Annotated[
        Text,
        typer.Argument(
            metavar="MODEL",
            help="A model's folder, its config.json, or the name of one that was downloaded from "
            "the Hugging Face Hub. Nothing is downloaded.",
            show_default=False,
        ),
    ] = None,
    session: Annotated[
        Path | None,
        typer.Option(
            "--session",
            metavar="SESSION",
            parser=folder,
            help="Plan what this session ran, beside what it did.",
            show_default=False,
        ),
    ] = None,
    platform: Annotated[
        Text,
        _option(
            "--platform",
            "What vLLM runs on: gpu (the default), cpu (like this machine's), cpu-basic, "
            "cpu-avx512-bf16, cpu-amx.",
            "NAME",
        ),
    ] = None,
    gpu: Annotated[Text, _option("--gpu", "A GPU's memory (80GiB) or name (H100).", "SIZE")] = None,
    cpu_memory: Annotated[
        Text, _option("--cpu-memory", "A CPU's memory, that of a NUMA node.", "SIZE")
    ] = None,
    utilization: Annotated[
        float | None, _option("--gpu-memory-utilization", "As vLLM's; 0.92 by default.", "SHARE")
    ] = None,
    max_model_len: Annotated[
        Whole, _option("--max-model-len", "As vLLM's; the model's by default.", "TOKENS")
    ] = None,
    block_size: Annotated[
        Whole, _option("--block-size", "As vLLM's; 16 by default, 128 on a CPU.", "TOKENS")
    ] = None,
    kv_cache_dtype: Annotated[
        Text, _option("--kv-cache-dtype", "As vLLM's: auto, fp8, bfloat16.", "TYPE")
    ] = None,
    dtype: Annotated[Text, _option("--dtype", "As vLLM's; the model's by default.", "TYPE")] = None,
    tensor_parallel: Annotated[
        Whole, _option("--tensor-parallel-size", "As vLLM's; 1 by default.", "GPUS")
    ] = None,
    pipeline_parallel: Annotated[
        Whole, _option("--pipeline-parallel-size", "As vLLM's; 1 by default.", "STAGES")
    ] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="As vLLM's; on by default. It matters to models that keep states.",
            show_default=False,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        Whole,
        _option("--max-num-batched-tokens", "As vLLM's. It matters to windows.", "TOKENS"),
    ] = None,
    no_hybrid: Annotated[
        bool,
        typer.Option(
            "--disable-hybrid-kv-cache-manager",
            help="As vLLM's: layers with a window keep all tokens.",
        ),
    ] = False,
    other_memory: Annotated[
        Text,
        _option(
            "--other-memory",
            "What activations, CUDA graphs and all that torch does not allocate take of a GPU.",
            "SIZE",
        ),
    ] = None,
    kv_memory: Annotated[
        Text,
        _option("--kv-cache-memory-bytes", "As vLLM's: the KV cache's memory on a GPU.", "SIZE"),
    ] = None,
    blocks: Annotated[
        Whole, _option("--num-gpu-blocks-override", "As vLLM's: the pool's blocks.", "BLOCKS")
    ] = None,
    weights: Annotated[
        Text, _option("--weights", "What the weights of the whole model take.", "SIZE")
    ] = None,
    parameters: Annotated[
        Text, _option("--parameters", "The model's parameters: 8030261248, 8.03e9, 8B.", "COUNT")
    ] = None,
    layers: Annotated[Whole, _option("--layers", "Without MODEL: its layers.", "COUNT")] = None,
    kv_heads: Annotated[
        Whole, _option("--kv-heads", "Without MODEL: its KV heads.", "COUNT")
    ] = None,
    head_size: Annotated[
        Whole, _option("--head-size", "Without MODEL: numbers in a head.", "COUNT")
    ] = None,
    sliding_window: Annotated[
        Whole, _option("--sliding-window", "Without MODEL: tokens that are kept.", "TOKENS")
    ] = None,
    average_len: Annotated[
        Whole, _option("--average-len", "Tokens of a usual sequence, answer included.", "TOKENS")
    ] = None,
    worst_len: Annotated[
        Whole, _option("--worst-len", "Tokens of the longest one; max-model-len else.", "TOKENS")
    ] = None,
    without_vllm: Annotated[
        bool,
        typer.Option("--without-vllm", help="Do not ask the vLLM that is installed, for speed."),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the arithmetic, and where each number is from.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a model's KV cache: blocks, tokens, sequences at once.

    From a model's config.json and a GPU's memory, as vLLM reckons at start-up. Where vLLM is
    installed, its own code makes the groups and the size of a block. With --session: what a
    recorded engine should have had, beside what it had, and where the difference comes from.

    \b
    Examples:
      profilemate plan ~/models/Llama-3.1-8B --gpu H100 --max-model-len 8192
      profilemate plan config.json --gpu 24GiB --kv-cache-dtype fp8 --explain
      profilemate plan config.json --platform cpu --kv-cache-memory-bytes 40GiB
      profilemate plan config.json --gpu 80GiB --tensor-parallel-size 2
                                   --average-len 1500 --worst-len 8192
      profilemate plan --layers 32 --kv-heads 8 --head-size 128 --parameters 8B
                       --max-model-len 8192 --gpu 80GiB
      profilemate plan --session ~/runs/session_20260131_120000_4711_c0ffee
      profilemate plan config.json --gpu 80GiB --json | jq .pool

    \b
    Exit codes:
      0   done
      2   no such model or session, one that cannot be read, or a wrong option
    """
    with one_line():
        from analysis.plan import platforms
        from analysis.plan.sizes import size
        from analysis.renderers import json
        from analysis.renderers.text import plan as text

        memory, source = _memory(gpu, cpu_memory)
        changes = {
            "platform": None if platform is None else platforms.named(platform),
            "gpu_bytes": memory,
            "gpu_source": source,
            "gpu_memory_utilization": utilization,
            "max_model_len": max_model_len,
            "block_size": block_size,
            "kv_cache_dtype": kv_cache_dtype,
            "tensor_parallel": tensor_parallel,
            "pipeline_parallel": pipeline_parallel,
            "prefix_caching": prefix_caching,
            "max_num_batched_tokens": max_num_batched_tokens,
            "hybrid": False if no_hybrid else None,
            "other_bytes": None if other_memory is None else size(other_memory),
            "weight_bytes": None if weights is None else size(weights),
            "kv_bytes": None if kv_memory is None else size(kv_memory),
            "blocks": blocks,
        }
        given = {name: value for name, value in changes.items() if value is not None}
        lengths = _Lengths(average_len, worst_len)
        numbers = {
            "layers": layers,
            "kv_heads": kv_heads,
            "head_size": head_size,
            "window": sliding_window,
        }
        count = None if parameters is None else _count(parameters)
        described = _model(model, dtype, count, numbers)
        with waiting("planning"):
            found = _found(session, described, given, lengths, _grouping(without_vllm))
        # A name that the terminal's encoding cannot show must not end it.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        if as_json:
            print(json.render(found))
        else:
            text.write(found, sys.stdout, explained=explain)


@dataclass(frozen=True)
class _Lengths:
    """Tokens of a usual sequence and of the longest one, as far as they were given."""

    average: int | None
    worst: int | None


def _found(
    folder: Path | None,
    described: tuple[Model, Path | None] | None,
    given: Mapping[str, Any],
    lengths: _Lengths,
    grouping: Grouping,
) -> Plan | Reality:
    """The plan, beside the session where one was named."""
    from analysis import open_session
    from analysis.plan import plan, reality
    from analysis.plan.settings import Settings

    asked: dict[str, Any] = {
        "average_len": lengths.average,
        "worst_len": lengths.worst,
        "grouping": grouping,
    }
    if folder is None:
        if described is None:
            raise RuleError("name a model, or give --layers, --kv-heads and --head-size")
        model, weights = described
        return plan(model, _changed(Settings(), given), folder=weights, **asked)
    session = open_session(folder)
    model, weights = described or reality.model_of(session)
    settings = _changed(reality.settings_of(session), given)
    return reality.against(session, model, settings, folder=weights, **asked)


def _changed(settings: Settings, given: Mapping[str, Any]) -> Settings:
    """The settings with those that were given.

    Raises:
        RuleError: the memory that was given is none of the platform's.

    """
    found = replace(settings, **given)
    device = found.platform.device
    if given.get("gpu_bytes") and (device == "CPU") != (found.gpu_source == "--cpu-memory"):
        option = "--cpu-memory" if device == "CPU" else "--gpu"
        raise RuleError(f"the plan is for a {device}: give its memory with {option}")
    if "platform" in given:
        # The type that another platform settled on.
        return replace(found, state_dtype=None)
    return found


def _memory(gpu: str | None, cpu: str | None) -> tuple[int | None, str | None]:
    """The memory that was given, and what it is of."""
    from analysis.plan.sizes import cpu_memory, gpu_memory

    if gpu is not None and cpu is not None:
        raise RuleError("--gpu and --cpu-memory are for different platforms; give one or the other")
    if gpu is not None:
        return gpu_memory(gpu)
    return (None, None) if cpu is None else cpu_memory(cpu)


def _model(
    name: str | None, dtype: str | None, parameters: int | None, numbers: Mapping[str, int | None]
) -> tuple[Model, Path | None] | None:
    """The model that is meant and where its weights are; None where none is named."""
    from analysis.plan import config, local
    from analysis.plan import numbers as plain
    from analysis.plan.model import Parameters
    from analysis.plan.sizes import element_bytes

    given = [option for option, value in numbers.items() if value is not None]
    if name is None:
        if not given:
            return None
        return plain.model(**numbers, dtype=dtype or "bfloat16", parameters=parameters), None
    if given:
        option = given[0].replace("_", "-").replace("window", "sliding-window")
        raise RuleError(f"--{option} describes a model in MODEL's place; give one or the other")
    path = local.find(name)
    model = config.read(path, name=name)
    if dtype not in (None, "auto"):
        element_bytes(str(dtype), "--dtype")
        model = replace(model, dtype=str(dtype), sources={**model.sources, "dtype": "--dtype"})
    if parameters is not None:
        sources = {**model.sources, "parameters": "--parameters"}
        # What is given counts, whatever the files in the folder say.
        return replace(model, parameters=Parameters(0, 0, parameters), sources=sources), None
    return model, path if path.is_dir() else None


def _count(text: str) -> int:
    """The number of parameters that a text states: 8030261248, 8.03e9, 8B, 70b, 125M."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?(?:e\d{1,2})?) ?([kmbt]?)", text.strip().lower())
    scale = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
    count = round(float(match[1]) * scale[match[2]]) if match else 0
    if not 0 < count <= 10**14:
        raise RuleError(f"--parameters {text!r} is no number of parameters; write 8030261248 or 8B")
    return count


def _grouping(without_vllm: bool) -> Grouping:
    """Who makes the groups: the vLLM that is installed, or the arithmetic here."""
    from analysis.plan.groups import Layout, group
    from analysis.plan.specs import Stage

    if without_vllm or importlib.util.find_spec("vllm") is None:
        return group
    from profilemate.simulation import groups as vllm_groups

    # The vLLM that is imported then serves nobody, so there is nothing to record.
    os.environ[SWITCH] = "0"
    refused = False

    def asked(stages: Sequence[Stage]) -> Layout:
        nonlocal refused
        if not refused:
            try:
                return vllm_groups.group(stages)
            except vllm_groups.NoVllmError as error:
                refused = True
                print(f"profilemate: vLLM is not asked: {error}", file=sys.stderr)
        return group(stages)

    return asked
