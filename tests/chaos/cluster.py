"""A verifier, a draft service, and one more behind a link that breaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.cluster import Cluster, Service, wait_healthy
from tests.proxy import Proxy

SLOTS, QUEUE = 44, 16
"""Of the verifier: fewer than there are streams, so that some wait and some are refused."""

KV_CACHE_MB = 10
"""Of the verifier: some 1,700 positions, fewer than that many sequences need, so that some are preempted."""

SLOW_CLIENT_S = 3.0
"""How long either service waits for a reader that does not read."""


@dataclass(frozen=True)
class ChaosCluster:
    """All of them; the frail draft service reaches the verifier by `link`."""

    verifier: Service
    draft: Service
    frail: Service
    link: Proxy

    @property
    def services(self) -> tuple[Service, Service, Service]:
        return self.verifier, self.draft, self.frail


@contextmanager
def chaos_cluster() -> Iterator[ChaosCluster]:
    """Start all of them, and wait until they serve."""
    limits = f"--max-sequences {SLOTS} --max-waiting {QUEUE} --kv-cache-mb {KV_CACHE_MB}"
    with Cluster(f"--slow-client-timeout {SLOW_CLIENT_S}", fault="impatient_keepalive") as cluster:
        verifier = cluster.verifier(flags=limits)
        with Proxy(verifier.address) as link:
            services = ChaosCluster(verifier, cluster.draft(verifier), cluster.draft(link.address), link)
            wait_healthy(*services.services)
            yield services
