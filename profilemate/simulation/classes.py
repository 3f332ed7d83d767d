# SPDX-License-Identifier: Apache-2.0
"""What do vLLM's own classes of a model keep in the cache, and how large are their weights?

vLLM builds the model on torch's meta device, which takes no memory. Each layer says what it keeps
(``get_kv_cache_spec``), and vLLM's ``get_kv_cache_configs`` makes the groups. The process seems to
be one of as many GPUs as are asked for. It runs in a process of its own (``asking``), as it changes
much in one: vLLM's checks of the processor answer as on the platform that is planned.
"""

from __future__ import annotations

import json
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

from analysis.plan.built import Built, Held
from analysis.plan.groups import Group, Layout
from profilemate.simulation.memory import SeveralSizesError, bytes_per_block, deciding
from profilemate.simulation.missing import stand_in, tolerated
from profilemate.simulation.words import said

AVX512_BF16 = ("cpu-avx512-bf16", "cpu-amx")
"""Platforms whose processor has it."""


@dataclass(frozen=True)
class Asked:
    """A model by the text of its ``config`` (JSON), and the settings by the names of ``Settings``.
    ``platform``: its name. ``batched_tokens``: of a step, where vLLM takes so many. ``sizes``: of
    blocks, the one that is asked for first; None for vLLM's own choice."""

    config: str
    platform: str = "gpu"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    kv_cache_dtype: str = "auto"
    state_dtype: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    batched_tokens: int | None = None
    prefix_caching: bool = True
    hybrid: bool = True
    sizes: tuple[int | None, ...] = (None,)

    @property
    def entries(self) -> dict[str, Any]:
        """The entries of the config.json."""
        found: dict[str, Any] = json.loads(self.config)
        return found


class RefusedError(Exception):
    """vLLM does not serve the model with these settings; the text says why."""


class NotKnownError(Exception):
    """vLLM cannot say here; the text says why, in one line."""


class NoVllmError(NotKnownError):
    """vLLM cannot be imported."""


def build(asked: Asked) -> Built:
    """What vLLM makes of the model.

    Raises:
        RefusedError: vLLM refuses the model or the settings.
        NoVllmError: vLLM cannot be imported.
        NotKnownError: vLLM does not know the model, or cannot build it here.

    """
    try:
        import vllm
    except Exception as error:
        raise NoVllmError(f"it cannot be imported: {line(error)}") from None
    try:
        _answer_as(asked.platform)
        return tolerated(lambda: _built(asked, str(vllm.__version__)))
    except (RefusedError, NotKnownError):
        raise
    except Exception as error:
        raise NotKnownError(f"{vllm.__version__} cannot build it here: {line(error)}") from None


def _built(asked: Asked, release: str) -> Built:
    name = _architecture(asked)
    made: list[_Stage] = []
    for stage in range(asked.pipeline_parallel):
        config = _config(asked)
        if not made:
            _begin(config)
        made.append(_stage(config, asked, stage))
    config = made[0].config
    layouts = [_layout(made, asked, size, release) for size in asked.sizes]
    if layouts[0] is None:
        raise NotKnownError(f"{release} makes no groups of its layers")
    specs = [spec for one in made for spec in one.specs.values()]
    return Built(
        release=release,
        architecture=name,
        layouts={
            size: layout
            for size, layout in zip(asked.sizes, layouts, strict=True)
            if layout is not None
        },
        kv_cache_dtype=str(config.cache_config.cache_dtype),
        max_model_len=int(config.model_config.max_model_len),
        batched_tokens=int(config.scheduler_config.max_num_batched_tokens),
        in_flight_batches=_batches(config),
        layers=len(specs),
        bytes_per_token=sum(_token_bytes(spec, config) for spec in specs),
        growing_bytes_per_token=sum(
            _token_bytes(spec, config) for spec in specs if _kind(spec) in ("full", "latent")
        ),
        held=tuple(one.held for one in made),
    )


def _batches(config: Any) -> int:
    """How many batches may be in flight at once."""
    return int(config.max_in_flight_tokens // config.scheduler_config.max_num_batched_tokens)


def _architecture(asked: Asked) -> str:
    """The name of the class that vLLM has for the model."""
    from vllm.model_executor.models import ModelRegistry

    names = asked.entries.get("architectures")
    names = names if isinstance(names, list) else []
    known = next((name for name in names if name in ModelRegistry.models), None)
    if known is None:
        shown = ", ".join(map(str, names))[:100] or "none"
        raise NotKnownError(f"it has no class for the architectures of the config.json ({shown})")
    found = ModelRegistry.models[known]
    if hasattr(found, "load_model_cls"):
        # Else vLLM looks at the class in a process of its own, for half a minute.
        ModelRegistry.register_model(known, found.load_model_cls())
    return str(known)


def _config(asked: Asked) -> Any:
    """vLLM's configuration, as its command line makes it.

    Raises:
        RefusedError: vLLM refuses it.

    """
    from vllm.engine.arg_utils import EngineArgs

    folder = Path(tempfile.mkdtemp())
    entries, cache_dtype = _plain(asked)
    (folder / "config.json").write_text(json.dumps(entries))
    arguments = {
        "model": str(folder),
        "dtype": asked.dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": asked.sizes[0],
        "max_model_len": asked.max_model_len,
        "max_num_batched_tokens": asked.batched_tokens,
        "tensor_parallel_size": asked.tensor_parallel,
        "pipeline_parallel_size": asked.pipeline_parallel,
        "kv_cache_dtype": cache_dtype,
        "mamba_ssm_cache_dtype": asked.state_dtype,
        "enable_prefix_caching": asked.prefix_caching,
        "disable_hybrid_kv_cache_manager": not asked.hybrid,
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return EngineArgs(**given).create_engine_config()
    except (ValueError, NotImplementedError) as error:
        said = line(error)
        if "max_num_batched_tokens" in said and asked.batched_tokens is not None:
            # It was no more than our guess of a default that vLLM makes larger for this model.
            return _config(replace(asked, batched_tokens=None))
        if _is_of_here(said):
            raise NotKnownError(said) from None
        raise RefusedError(said) from None


_OF_HERE = ("cpu", "cuda", "triton", "quantization", "trust_remote_code", "transformers", "tokeniz")
"""Words of refusals that speak of this machine, and not of the model and its settings."""


def _is_of_here(said: str) -> bool:
    return any(word in said.lower() for word in _OF_HERE)


def _plain(asked: Asked) -> tuple[dict[str, Any], str]:
    """The entries without quantized weights, whose kernels are not there for every CPU, and the
    type of the cache, which may depend on how they are quantized."""
    entries = asked.entries
    # No code of a model's is run.
    entries.pop("auto_map", None)
    found = [entries.pop(key, None) for key in ("quantization_config", "compression_config")]
    inner = entries.get("text_config")
    if isinstance(inner, dict):
        found += [inner.pop("quantization_config", None)]
    quantized = next((each for each in found if isinstance(each, dict)), None)
    if quantized is None or asked.kv_cache_dtype != "auto":
        return entries, asked.kv_cache_dtype
    from analysis.plan.quantized import cache_dtype

    return entries, cache_dtype(quantized) or "auto"


def _begin(config: Any) -> None:
    """Let vLLM have its groups of processes, of this one alone."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        parallel_state,
    )
    from vllm.model_executor.model_loader import utils

    with set_current_vllm_config(config):
        meeting = f"file://{tempfile.mkdtemp()}/meeting"
        init_distributed_environment(1, 0, meeting, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    if getattr(parallel_state, "_EP", None) is None:
        # It is only made for a model with experts.
        parallel_state._EP = parallel_state.get_tp_group()
    with suppress(ImportError):
        from vllm.v1.worker import workspace

        workspace.init_workspace_manager(torch.device("meta"))
    # Only for loading weights once more, and a third of the time that building a model takes.
    utils.record_metadata_for_reloading = lambda model: None


@dataclass
class _Stage:
    """A stage of the pipeline: vLLM's configuration, its settings of the cache before vLLM fitted
    the size of a block to the layers, what these keep, and their weights."""

    config: Any
    asked_cache: dict[str, Any]
    model: Any
    specs: dict[str, Any]
    held: Held = field(default_factory=Held)


def _stage(config: Any, asked: Asked, stage: int) -> _Stage:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    def model_on(device: Any) -> Any:
        config.compilation_config.static_forward_context.clear()
        with device, set_default_torch_dtype(config.model_config.dtype):
            return initialize_model(config)

    with _as_gpu(asked, stage), set_current_vllm_config(config):
        try:
            try:
                model = model_on(torch.device("meta"))
            except (RuntimeError, NotImplementedError) as error:
                if "meta" not in str(error):
                    raise
                model = model_on(_meta_for_large())
        except AssertionError as error:
            if asked.tensor_parallel > 1:
                raise RefusedError(
                    f"--tensor-parallel-size {asked.tensor_parallel}: {line(error)}"
                ) from None
            raise
        if asked.platform == "gpu":
            _with_flash_attention(config)
        before = vars(config.cache_config).copy()
        return _Stage(config, before, model, _specs(config), _held(model))


_LARGE = 1 << 22
"""Numbers of a tensor. Smaller ones may take memory."""


def _meta_for_large() -> Any:
    """A device for models that read a few numbers while they are built: those of small tensors are
    there, and large tensors take no memory."""
    import torch
    from torch.utils._device import DeviceContext

    class _Device(DeviceContext):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = dict(kwargs or {})
            if func not in sized or given.get("device") is not None:
                return func(*args, **given)
            shape = args[0] if args and isinstance(args[0], (tuple, list)) else args
            numbers = [one for one in given.get("size", shape) if isinstance(one, int)]
            device = "meta" if prod(numbers) >= _LARGE else "cpu"
            return func(*args, **given | {"device": device})

    sized = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
    return _Device(torch.device("cpu"))


def _with_flash_attention(config: Any) -> None:
    """Give attention layers the backend that they have on CUDA."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    for layer in config.compilation_config.static_forward_context.values():
        backend = getattr(layer, "attn_backend", None)
        name = backend.get_name() if backend is not None and not backend.is_mla() else ""
        if name.startswith("CPU"):
            layer.attn_backend = FlashAttentionBackend


def _specs(config: Any) -> dict[str, Any]:
    """What each layer keeps, with the block size that the configuration has now."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    current_platform.update_block_size_for_backend(config)
    size = config.cache_config.block_size
    for backend in current_platform._find_non_ssm_backends(config):
        if not backend.supports_block_size(size):
            raise ValueError(f"--block-size {size}: {backend.get_name()} does not read such blocks")
    found: dict[str, Any] = get_kv_cache_spec(config)
    return found


def _held(model: Any) -> Held:
    """Numbers and bytes of a stage's weights on one GPU, by what they are for."""
    ends: set[int] = set()
    experts: set[int] = set()
    for module in model.modules():
        kind = type(module).__name__
        if "Embedding" in kind or "LMHead" in kind:
            ends |= {id(one) for one in module.parameters(recurse=False)}
        if "MoE" in kind or "Experts" in kind:
            experts |= {id(one) for one in module.parameters(recurse=False) if one.dim() >= 3}
    sums = dict.fromkeys(("ends", "experts", "dense"), 0)
    size = 0
    for one in model.parameters():
        where = "ends" if id(one) in ends else "experts" if id(one) in experts else "dense"
        sums[where] += one.numel()
        size += one.numel() * one.element_size()
    return Held(total_bytes=size, **sums)


def _layout(made: Sequence[_Stage], asked: Asked, size: int | None, release: str) -> Layout | None:
    """The groups with blocks of this size; None where vLLM refuses a size that was not asked for.

    Raises:
        RefusedError: vLLM refuses the layers with the size that was asked for.

    """
    is_first = size == asked.sizes[0]
    try:
        if not is_first:
            for stage, one in enumerate(made):
                vars(one.config.cache_config).update(one.asked_cache)
                one.config.cache_config.block_size = size
                one.config.cache_config.user_specified_block_size = True
                with _as_gpu(asked, stage):
                    one.specs = _specs(one.config)
        return _grouped(made, asked, release)
    except (NotImplementedError, ValueError, AssertionError) as error:
        if is_first:
            raise RefusedError(line(error)) from None
        return None


def _grouped(made: Sequence[_Stage], asked: Asked, release: str) -> Layout:
    from vllm.v1.core import kv_cache_utils

    config = made[0].config
    # The order that FlashAttention and the CPU's kernels ask for.
    config.cache_config.kv_cache_layout = "LBNHC" if asked.platform == "gpu" else "LBHNC"
    if not any(one.specs for one in made):
        return Layout((), (0,) * len(made), "")
    empty = next((stage for stage, one in enumerate(made) if not one.specs), None)
    if empty is not None:
        raise RefusedError(
            f"--pipeline-parallel-size {asked.pipeline_parallel}: no layer of stage {empty} keeps "
            "anything in the KV cache; plan with fewer stages"
        )
    found = []
    for stage in range(len(made)):
        specs = [dict(one.specs) for one in made]
        memory = deciding(stage, len(made))
        found.append(kv_cache_utils.get_kv_cache_configs(config, specs, memory))
    try:
        sizes = bytes_per_block(found)
    except SeveralSizesError as error:
        raise NotKnownError(str(error)) from None
    return Layout(
        groups=tuple(
            _group(parts, made, config)
            for parts in zip(*(one.kv_cache_groups for one in found[0]), strict=True)
        ),
        bytes_per_block=sizes,
        decided_by=f"vLLM {release}",
    )


def _group(parts: Sequence[Any], made: Sequence[_Stage], config: Any) -> Group:
    """A group as all stages have it together."""
    spec = next(part.kv_cache_spec for part in parts if part.layer_names)
    # A group of layers of several sizes has a spec for each.
    each = getattr(spec, "kv_cache_specs", None)
    one = next(iter(each.values())) if each else spec
    kind, size = _kind(one), int(one.block_size)
    # The layers of one group may keep different amounts: then these are means.
    layers = len(each) if each else 1
    page = int(spec.page_size_bytes) // layers
    plain = sum(map(_page, each.values())) // layers if each else _page(one)
    needed = ceil(spec.max_memory_usage_bytes(config) / spec.page_size_bytes)
    fixed = kind in ("state", "cross")
    group = Group(
        kind=kind,
        layers=sum(len(part.layer_names) for part in parts),
        block_size=size,
        page_bytes=page,
        token_bytes=0 if kind == "state" else plain // size,
        state_bytes=plain if kind == "state" else 0,
        window=getattr(one, "sliding_window", None) if kind == "window" else None,
        states=needed if fixed else 0,
    )
    if kind == "chunked":
        group = replace(group, window=int(one.attention_chunk_size))
    longest = config.model_config.max_model_len
    if group.blocks(longest, config.max_in_flight_tokens) != needed:
        raise NotKnownError(
            f"a sequence of {longest:,} tokens takes {needed:,} blocks of {type(one).__name__}, by "
            "a rule that plan does not know"
        )
    return group


def _page(spec: Any) -> int:
    """Bytes of a block of one layer without what makes it as large as other layers'."""
    plain = getattr(spec, "unpadded_page_size_bytes", None) or spec.real_page_size_bytes
    return int(plain)


_KINDS = (
    ("MambaSpec", "state"),
    ("CrossAttentionSpec", "cross"),
    ("ChunkedLocalAttentionSpec", "chunked"),
    ("SlidingWindowSpec", "window"),
    ("MLAAttentionSpec", "latent"),
    ("FullAttentionSpec", "full"),
)
"""vLLM's classes of what a layer keeps; those that another one is a kind of come first."""


def _kind(spec: Any) -> Any:
    names = {one.__name__ for one in type(spec).__mro__}
    for name, kind in _KINDS:
        if name in names:
            return kind
    raise NotKnownError(f"its layers keep a {type(spec).__name__}, which plan does not know")


def _token_bytes(spec: Any, config: Any) -> int:
    """Bytes of one token of a layer on all GPUs that share it; those of a copy count once."""
    if _kind(spec) in ("state", "cross"):
        return 0
    # Where there are fewer heads than GPUs, several GPUs hold the same head.
    heads = 1 if _kind(spec) == "latent" else config.model_config.get_total_num_kv_heads()
    shards = getattr(spec, "max_tp_shards", None) or max(heads, 1)
    gpus = min(config.parallel_config.tensor_parallel_size, shards)
    return int(_page(spec) // spec.block_size * gpus)


@contextmanager
def _as_gpu(asked: Asked, stage: int) -> Iterator[None]:
    """As the first GPU of this stage, which is all that sizes depend on."""
    from vllm.distributed import parallel_state

    tensor, pipeline = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    kept = [vars(tensor).copy(), vars(pipeline).copy()]
    tensor.world_size = asked.tensor_parallel
    pipeline.world_size, pipeline.rank_in_group = asked.pipeline_parallel, stage
    pipeline.rank, pipeline.ranks = stage, list(range(asked.pipeline_parallel))
    try:
        yield
    finally:
        vars(tensor).update(kept[0])
        vars(pipeline).update(kept[1])


def _answer_as(platform: str) -> None:
    """Let vLLM answer as on this platform, whatever the processor here. It stays so: the process
    plans for one platform."""
    import torch
    from vllm.config import vllm as vllm_config
    from vllm.platforms import current_platform
    from vllm.platforms.interface import Platform
    from vllm.v1.attention import selector

    here = type(current_platform)
    bf16, amx = platform in AVX512_BF16, platform == "cpu-amx"
    torch.cpu._is_avx512_bf16_supported = lambda: bf16
    torch.cpu._is_amx_tile_supported = lambda: amx
    # The backend that another processor got.
    selector._cached_get_attn_backend.cache_clear()
    if platform == "gpu":
        # Of what is asked here CUDA's platform leaves all to the base class.
        for name in ("check_and_update_config", "update_block_size_for_backend"):
            setattr(here, name, classmethod(getattr(Platform, name).__func__))
        vllm_config.HAS_TRITON = True
        _take_sparse_attention(here)
        with suppress(ImportError):
            from vllm.v1.attention.backend import MultipleOf
            from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

            # As most of CUDA's backends for latent attention, and none of a CPU's.
            CPUMLABackend.get_supported_kernel_block_sizes = staticmethod(
                lambda kv_cache_spec=None: [MultipleOf(16)]
            )
            CPUMLABackend.supports_block_size = classmethod(lambda cls, size: not size % 16)
        if not torch.cuda.is_available():
            # Some classes make streams for their kernels.
            torch.cuda.Stream = torch.cuda.Event = stand_in("Stream")
            torch.accelerator.empty_cache = lambda: None


def _take_sparse_attention(here: Any) -> None:
    """Let a platform that has no sparse attention name the backend that CUDA has for it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    choose = here.get_attn_backend_cls.__func__

    def chosen(cls: Any, *given: Any, **named: Any) -> Any:
        if any(getattr(one, "use_sparse", False) for one in (*given, *named.values())):
            return AttentionBackendEnum.FLASHMLA_SPARSE.get_path()
        return choose(cls, *given, **named)

    here.get_attn_backend_cls = classmethod(chosen)


def line(error: BaseException) -> str:
    """The error's text in one line."""
    text = said(error)
    if not text:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
        text = f"{type(error).__name__}{where}"
    return text if len(text) <= 250 else f"{text[:247]}..."
