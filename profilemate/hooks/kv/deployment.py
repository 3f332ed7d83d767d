# SPDX-License-Identifier: Apache-2.0
"""The id that the processes of one deployment share, on whatever hosts they run."""

from __future__ import annotations

import ipaddress
import os
from typing import Any

from profilemate.config import Config
from profilemate.hooks.kv.facts import fact
from profilemate.record.claim import ensure_name


def deployment_of(settings: Config, vllm_config: Any) -> str | None:
    """The user's name for it; else what vLLM tells all hosts alike; None where it is on one host,
    or not known.

    Engines that are data-parallel over several hosts know the same address and port of the first
    one, and so do workers of one engine that is on several hosts. Workers that Ray starts have the
    session's name.
    """
    if settings.deployment:
        return settings.deployment
    parallel = vllm_config.parallel_config
    engines = _address(
        fact(lambda: str(parallel.data_parallel_master_ip)),
        fact(lambda: int(parallel.data_parallel_rpc_port)),
    )
    if engines is not None:
        return engines
    if (fact(lambda: int(parallel.nnodes)) or 1) > 1:
        return _address(
            fact(lambda: str(parallel.master_addr)), fact(lambda: int(parallel.master_port))
        )
    if "ray" in str(fact(lambda: parallel.distributed_executor_backend)).lower():
        return ensure_name(os.environ)
    return None


def _address(host: str | None, port: int | None) -> str | None:
    """An address that other hosts can reach; None for one that each host takes for itself."""
    if not host or port is None or host == "localhost":
        return None
    try:
        if ipaddress.ip_address(host).is_loopback:
            return None
    except ValueError:
        # A host's name.
        pass
    return f"{host}:{port}"
