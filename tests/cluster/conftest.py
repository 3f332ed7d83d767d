# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine's loopback, each with a processor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass
class Nodes:
    """``address``: of the first node, to which a driver connects."""

    address: str
    cluster: Any

    def add(self, **more: Any) -> Any:
        return self.cluster.add_node(**{**SMALL, **more})

    def kill(self, node: Any) -> None:
        self.cluster.remove_node(node, allow_graceful=False)


SMALL = {
    "num_cpus": 1,
    "object_store_memory": 100_000_000,
    "include_dashboard": False,
    # Ray replaces 127.0.0.1 by an address that others can reach.
    "node_ip_address": "127.0.0.2",
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """The first node."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # A process of Ray's that has nothing to do ends after so long, and takes its imports along.
        patch.setenv("RAY_idle_worker_killing_time_threshold_ms", "60000")
        pytest.importorskip("ray")
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args=SMALL)
        try:
            yield Nodes(cluster.address, cluster)
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> Iterator[None]:
    """The nodes have profilemate's code, and not that of the tests."""
    from ray import cloudpickle

    from tests.cluster import work

    cloudpickle.register_pickle_by_value(sys.modules[work.__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[work.__name__])
