# SPDX-License-Identifier: Apache-2.0
"""``profilemate plan``: how much KV cache a model will have, and where an engine differed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from analysis.errors import RuleError
from profilemate.commands import plan_classes, plan_deployment, plan_groups, plan_model
from profilemate.commands.shared.options import AsJson
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.stdout import show
from profilemate.commands.shared.values import folder

if TYPE_CHECKING:
    from analysis.plan import Plan
    from analysis.plan.model import Model
    from analysis.plan.reality import Reality
    from analysis.plan.settings import Settings


def _option(name: str, text: str, metavar: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False)


Whole = int | None
Text = str | None


@dataclass(frozen=True)
class PlanOptions:
    model: Annotated[
        Text,
        typer.Argument(
            metavar="MODEL",
            help="A model's folder, its config.json, or the name of a model that was downloaded "
            "from the Hugging Face Hub. profilemate downloads nothing.",
            show_default=False,
        ),
    ] = None
    session: Annotated[
        Path | None,
        typer.Option(
            "--session",
            metavar="SESSION",
            parser=folder,
            help="Plan what this session's engine should have had, and compare it with what it "
            "had.",
            show_default=False,
        ),
    ] = None
    sized_by: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="SESSION",
            parser=folder,
            help="Size the next deployment by this session's requests: GPUs for a rate.",
            show_default=False,
        ),
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            metavar="RATE",
            parser=plan_deployment.rate,
            help="With --from: requests of the busiest time, 20/s or 1200/min. Default: the "
            "session's own rate and multiples of it.",
            show_default=False,
        ),
    ] = None
    max_num_seqs: Annotated[
        Whole, _option("--max-num-seqs", "With --from: as in vLLM. Default: as recorded.", "COUNT")
    ] = None
    platform: Annotated[
        Text,
        _option(
            "--platform",
            "What vLLM runs on: gpu (the default), cpu (like this machine's), cpu-basic, "
            "cpu-avx512-bf16, cpu-amx.",
            "NAME",
        ),
    ] = None
    gpu: Annotated[Text, _option("--gpu", "A GPU's memory (80GiB) or name (H100).", "SIZE")] = None
    cpu_memory: Annotated[
        Text, _option("--cpu-memory", "A CPU's memory, that of a NUMA node.", "SIZE")
    ] = None
    utilization: Annotated[
        float | None, _option("--gpu-memory-utilization", "As in vLLM. Default: 0.92.", "SHARE")
    ] = None
    max_model_len: Annotated[
        Whole, _option("--max-model-len", "As in vLLM. Default: the model's.", "TOKENS")
    ] = None
    block_size: Annotated[
        Whole, _option("--block-size", "As in vLLM. Default: 16, on a CPU 128.", "TOKENS")
    ] = None
    kv_cache_dtype: Annotated[
        Text, _option("--kv-cache-dtype", "As in vLLM: auto, fp8, bfloat16.", "TYPE")
    ] = None
    dtype: Annotated[Text, _option("--dtype", "As in vLLM. Default: the model's.", "TYPE")] = None
    tensor_parallel: Annotated[
        Whole, _option("--tensor-parallel-size", "As in vLLM. Default: 1.", "GPUS")
    ] = None
    pipeline_parallel: Annotated[
        Whole, _option("--pipeline-parallel-size", "As in vLLM. Default: 1.", "STAGES")
    ] = None
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="As in vLLM. Default: on. It matters for models that keep states.",
            show_default=False,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        Whole,
        _option(
            "--max-num-batched-tokens", "As in vLLM. It matters for sliding windows.", "TOKENS"
        ),
    ] = None
    no_hybrid: Annotated[
        bool,
        typer.Option(
            "--disable-hybrid-kv-cache-manager",
            help="As in vLLM: layers with a sliding window keep all tokens.",
        ),
    ] = False
    other_memory: Annotated[
        Text,
        _option(
            "--other-memory",
            "Memory of a GPU for activations, CUDA graphs and everything outside torch.",
            "SIZE",
        ),
    ] = None
    kv_memory: Annotated[
        Text,
        _option("--kv-cache-memory-bytes", "As in vLLM: memory of a GPU's KV cache.", "SIZE"),
    ] = None
    blocks: Annotated[
        Whole, _option("--num-gpu-blocks-override", "As in vLLM: blocks of the pool.", "BLOCKS")
    ] = None
    weights: Annotated[Text, _option("--weights", "Memory of all weights.", "SIZE")] = None
    parameters: Annotated[
        Text,
        _option("--parameters", "How many parameters: 8030261248, 8.03e9, 8B.", "COUNT"),
    ] = None
    layers: Annotated[Whole, _option("--layers", "Without MODEL: how many layers.", "COUNT")] = None
    kv_heads: Annotated[
        Whole, _option("--kv-heads", "Without MODEL: KV heads of a layer.", "COUNT")
    ] = None
    head_size: Annotated[
        Whole, _option("--head-size", "Without MODEL: size of a head.", "COUNT")
    ] = None
    sliding_window: Annotated[
        Whole,
        _option("--sliding-window", "Without MODEL: tokens that each layer keeps.", "TOKENS"),
    ] = None
    average_len: Annotated[
        Whole,
        _option("--average-len", "Tokens of an average sequence, prompt and answer.", "TOKENS"),
    ] = None
    worst_len: Annotated[
        Whole,
        _option(
            "--worst-len", "Tokens of the longest sequence. Default: --max-model-len.", "TOKENS"
        ),
    ] = None
    without_vllm: Annotated[
        bool,
        typer.Option("--without-vllm", help="Do not import the installed vLLM. This is faster."),
    ] = False
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the arithmetic, and each number's source.")
    ] = False
    as_json: AsJson = False


def plan(options: PlanOptions) -> int:
    """Plan a model's KV cache: blocks, tokens, sequences at once.

    Takes a model's config.json and a GPU's memory, and calculates as vLLM does at start-up. Where
    vLLM is installed, its own code makes the groups and the size of a block. --session compares
    the plan with what a recorded engine had, and says where each difference comes from. --from
    says how many GPUs a rate of requests like a session's needs.

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
      profilemate plan --from ~/runs/session_20260131_120000_4711_c0ffee
                       --rate 20/s

    \b
    Exit codes:
      0   done
      2   no such model or session, it cannot be read, or a wrong option
    """
    from analysis.renderers.text import deployment as deployment_text
    from analysis.renderers.text import plan as text

    plan_deployment.check(options)
    if options.sized_by is not None:
        with status("sizing"):
            sized = plan_deployment.sized(options, options.sized_by)
        show(sized, deployment_text.write, as_json=options.as_json)
        return 0
    changes = _changes(options)
    model = plan_model.chosen(
        options.model,
        {
            "layers": options.layers,
            "kv_heads": options.kv_heads,
            "head_size": options.head_size,
            "window": options.sliding_window,
        },
        dtype=options.dtype,
        parameters=options.parameters,
    )
    with status("planning"):
        found = _planned(options, model, changes)
    show(found, partial(text.write, explained=options.explain), as_json=options.as_json)
    return 0


def _changes(options: PlanOptions) -> dict[str, Any]:
    """The planner's settings that the options name."""
    from analysis.plan import platforms
    from analysis.plan.sizes import size

    gpu_bytes, gpu_source = _memory(options)
    platform = None if options.platform is None else platforms.named(options.platform)
    settings = {
        "platform": platform,
        "gpu_bytes": gpu_bytes,
        "gpu_source": gpu_source,
        "gpu_memory_utilization": options.utilization,
        "max_model_len": options.max_model_len,
        "block_size": options.block_size,
        "kv_cache_dtype": options.kv_cache_dtype,
        "tensor_parallel": options.tensor_parallel,
        "pipeline_parallel": options.pipeline_parallel,
        "prefix_caching": options.prefix_caching,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "hybrid": False if options.no_hybrid else None,
        "other_bytes": None if options.other_memory is None else size(options.other_memory),
        "weight_bytes": None if options.weights is None else size(options.weights),
        "kv_bytes": None if options.kv_memory is None else size(options.kv_memory),
        "blocks": options.blocks,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _planned(
    options: PlanOptions, model: tuple[Model, Path | None] | None, changes: dict[str, Any]
) -> Plan | Reality:
    """The plan, beside the session where one is named."""
    from analysis import open_session
    from analysis.plan import plan, reality, recorded
    from analysis.plan.settings import Settings

    vllm = plan_groups.installed(without_vllm=options.without_vllm)

    def asked(described: Model) -> dict[str, Any]:
        entries = plan_model.entries_of(described)
        return {
            "average_len": options.average_len,
            "worst_len": options.worst_len,
            "grouping": plan_groups.grouping(vllm),
            "ask": plan_classes.asking(entries, vllm, dtype=options.dtype),
        }

    if options.session is None:
        if model is None:
            raise RuleError("name a model, or give --layers, --kv-heads and --head-size")
        described, weights = model
        settings = _changed(Settings(), changes)
        return plan(described, settings, folder=weights, **asked(described))
    session = open_session(options.session)
    described, weights = model or recorded.model_of(session)
    settings = _changed(recorded.settings_of(session), changes)
    return reality.against(session, described, settings, folder=weights, **asked(described))


def _changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The settings with those that the options name.

    Raises:
        RuleError: the memory that an option names is none of the platform's.

    """
    found = replace(settings, **changes)
    device = found.platform.device
    if changes.get("gpu_bytes") and (device == "CPU") != (found.gpu_source == "--cpu-memory"):
        option = "--cpu-memory" if device == "CPU" else "--gpu"
        raise RuleError(f"the plan is for a {device}: give its memory with {option}")
    if "platform" in changes:
        # The session's type of states is that of another platform.
        return replace(found, state_dtype=None)
    return found


def _memory(options: PlanOptions) -> tuple[int | None, str | None]:
    """The memory that an option names, in bytes, and what it is of."""
    from analysis.plan.sizes import cpu_memory, gpu_memory

    if options.gpu is not None and options.cpu_memory is not None:
        raise RuleError("--gpu and --cpu-memory are for different platforms; give one or the other")
    if options.gpu is not None:
        return gpu_memory(options.gpu)
    return (None, None) if options.cpu_memory is None else cpu_memory(options.cpu_memory)
