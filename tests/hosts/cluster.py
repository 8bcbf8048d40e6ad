"""Two verifiers and two draft services on hosts of their own, mutual TLS between all of them, a client on another host.

Each is who its certificate says: verifiers admit drafts, and drafts admit clients. Names stand for the two of a kind.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tests.cluster
from tests.certificates import Authority
from tests.cluster import Service, wait_until
from tests.fork_server import ForkServer
from tests.hosts.client import SOON_S, RemoteClient, Request
from tests.metrics import Samples
from tests.network import Network
from tests.slow_steps import STEP_SECONDS, slow_steps

VERIFIERS, DRAFTS, CLIENT = ("verifier-1", "verifier-2"), ("draft-1", "draft-2"), "client"
HOSTS: Mapping[str, str] = {
    **dict.fromkeys(VERIFIERS, "verifiers"),
    **dict.fromkeys(DRAFTS, "drafts"),
    CLIENT: "clients",
}
"""And the name that each shares with its like."""

PORT, METRICS = 50051, 9100
# What a verifier may owe an answer, and what a sequence or a request may be without one, in seconds.
SILENCE_S, PATIENCE_S = 3.0, 30.0


def wait_ready(service: Service) -> None:
    """Returns once it says that it serves; the test is on another network, and cannot ask."""
    service.wait_listening()

    def serves() -> bool:
        service.check()
        return bool(service.logged("serving"))

    wait_until(serves, SOON_S)


class Cluster:
    """All of it. A context manager. The client knows the draft services by their common name."""

    network: Network
    client: RemoteClient

    def __init__(self, folder: Path) -> None:
        self.services: dict[str, Service] = {}
        self._folder = folder
        self._step_seconds = folder / "step-seconds"
        self._running = ExitStack()
        self._authority = Authority(folder / "authority")
        self._certificates = {host: self._authority.issue(name, file=host) for host, name in HOSTS.items()}

    def __enter__(self) -> Cluster:
        with ExitStack() as running:
            names = {host: (name,) for host, name in HOSTS.items()}
            self.network = running.enter_context(Network(self._folder, names))
            fork_server = ForkServer(self.network.beside())
            running.callback(fork_server.close)
            self._cluster = running.enter_context(tests.cluster.Cluster(server=fork_server))
            for host in (*VERIFIERS, *DRAFTS):
                self.launch(host)
            entering = self.network.on(CLIENT)
            self.client = running.enter_context(RemoteClient(entering, f"drafts:{PORT}", self.tls(CLIENT, "drafts")))
            for service in self.services.values():
                wait_ready(service)
            self._running = running.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        for service in self.services.values():
            service.kill()  # one that is frozen hears nothing else
        self._running.close()
        for host, service in self.services.items():
            print(f"--- {host}", *(line for line in service.log_lines() if '"info"' not in line), sep="\n")

    def launch(self, host: str) -> None:
        """Starts a host's service."""
        tls, at = self.tls(host, HOSTS[host]), self.network.address(host)
        flags = ["--listen", f"{at}:{PORT}", "--metrics-listen", f"{at}:{METRICS}"]
        flags += ["--tls-cert", tls["cert"], "--tls-key", tls["key"], "--tls-client-ca", tls["ca"]]
        start: dict[str, Any] = {"env": {STEP_SECONDS: str(self._step_seconds)}, "network": self.network.file(host)}
        if host in VERIFIERS:
            flags += ["--allow-client-san", "drafts"]
            self.services[host] = self._cluster.verifier(flags=flags, fault="slow_steps", **start)
        else:
            flags += ["--allow-client-san", "clients"]
            flags += ["--verifier", f"verifiers:{PORT}", "--verifier-tls-ca", tls["ca"]]
            flags += ["--verifier-tls-cert", tls["cert"], "--verifier-tls-key", tls["key"]]
            flags += ["--verifier-timeout", str(SILENCE_S), "--failover-timeout", str(PATIENCE_S)]
            self.services[host] = self._cluster.draft(flags=flags, **start)

    def restore(self) -> None:
        """Undoes whatever happened to hosts and services."""
        for host in HOSTS:
            self.network.mend(host)
        for service in self.services.values():
            service.send(signal.SIGCONT)
            if service.returncode is not None:
                service.start_again()
                wait_ready(service)

    @contextmanager
    def slowly(self, seconds: float) -> Iterator[None]:
        """Each of the verifiers' passes takes so long meanwhile."""
        with slow_steps(self._step_seconds, seconds):
            yield

    def metrics(self, host: str) -> Samples:
        return self.client.scrape(f"http://{self.network.address(host)}:{METRICS}/metrics")

    def at(self, host: str) -> str:
        """`HOST:PORT` of its service."""
        return f"{self.network.address(host)}:{PORT}"

    def verifier_with_the_most_sequences(self) -> str:
        held = dict.fromkeys(VERIFIERS, 0.0)
        for draft in DRAFTS:
            for labels, count in self.metrics(draft)["outrider_verifier_sequences"].items():
                (host,) = (host for host in VERIFIERS if self.at(host) == dict(labels)["verifier"])
                held[host] += count
        return max(held, key=held.__getitem__)

    def switches(self, reason: str) -> int:
        """How many sequences went to another verifier for that reason, as long as these draft services live."""
        found = [self.metrics(draft)["outrider_verifier_switches_total"] for draft in DRAFTS]
        return int(sum(each[(("reason", reason),)] for each in found))

    def settle(self) -> None:
        """Return when both draft services count both verifiers as healthy; a text may be what tells them."""

        def settled() -> bool:
            known = [self.metrics(draft)["outrider_verifiers"][(("status", "ready"),)] for draft in DRAFTS]
            if known == [len(VERIFIERS)] * len(DRAFTS):
                return True
            for answer in [self.client.write(Request("def", {"max_new_tokens": 2, "seed": 1})) for _ in range(4)]:
                answer.wait()
            return False

        wait_until(settled, SOON_S)

    def tls(self, host: str, name: str) -> dict[str, str]:
        """The files of a host, as arguments of `TLS`; `name` is whom it would speak to."""
        own = self._certificates[host]
        return {"ca": str(self._authority.pem), "cert": str(own.cert), "key": str(own.key), "name": name}
