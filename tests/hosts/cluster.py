"""Two verifiers and two draft services on hosts of their own, mutual TLS between all of them, a client on another host.

Verifiers admit the certificates of draft services, and these admit clients'. The two of a kind share a name.
"""

import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import tests.cluster
from tests.certificates import Authority
from tests.cluster import Service, wait_until
from tests.fork_server import fork_server
from tests.metrics import Samples, parse
from tests.network import Network
from tests.slow_steps import STEP_SECONDS, slow_steps

VERIFIERS, DRAFTS, CLIENT = ("verifier-1", "verifier-2"), ("draft-1", "draft-2"), "client"
HOSTS: Mapping[str, str] = {
    **dict.fromkeys(VERIFIERS, "verifiers"),
    **dict.fromkeys(DRAFTS, "drafts"),
    CLIENT: "clients",
}
"""With the name that each shares with its like."""

PORT, METRICS = 50051, 9100
SILENCE_S, FAILOVER_S = 3.0, 30.0
"""Timeouts of the draft services: of an answer of a verifier, and of a sequence without one."""
SOON_S = 120.0

Request = tuple[str, dict[str, Any]]
"""Prompt and options."""


@dataclass
class Text:
    """A text as far as it has come."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    resumes: int = 0
    failovers: int = 0
    error: str = ""
    ended: bool = False

    def take(self, message: dict[str, Any]) -> None:
        self.token_ids += message.pop("token_ids", [])
        self.text += message.pop("text", "")
        for name, value in message.items():
            setattr(self, name, value)


class Cluster:
    """Services and client. A context manager. The client knows the draft services by their common name."""

    network: Network

    def __init__(self, folder: Path) -> None:
        self.services: dict[str, Service] = {}
        self._folder = folder
        self._step_seconds = folder / "step-seconds"
        self._running = ExitStack()
        self._authority = Authority(folder / "authority")
        self._certificates = {host: self._authority.issue(name, file=host) for host, name in HOSTS.items()}

    def __enter__(self) -> Self:
        with ExitStack() as running:
            names = {host: (name,) for host, name in HOSTS.items()}
            self.network = running.enter_context(Network(self._folder, names))
            self._cluster = running.enter_context(tests.cluster.Cluster())
            for host in (*VERIFIERS, *DRAFTS):
                self._start(host)
            for service in self.services.values():
                wait_ready(service)
            self._running = running.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        for service in self.services.values():
            service.kill()  # a frozen one does not react to other signals
        self._running.close()
        for host, service in self.services.items():
            print(f"--- {host}", *(line for line in service.log_lines() if '"info"' not in line), sep="\n")

    def _start(self, host: str) -> None:
        tls, at = self._tls(host, HOSTS[host]), self.network.address(host)
        flags = ["--listen", f"{at}:{PORT}", "--metrics-listen", f"{at}:{METRICS}"]
        flags += ["--tls-cert", tls["cert"], "--tls-key", tls["key"], "--tls-client-ca", tls["ca"]]
        start: dict[str, Any] = {"env": {STEP_SECONDS: str(self._step_seconds)}}
        start["namespaces"] = self.network.namespaces(host)
        if host in VERIFIERS:
            flags += ["--allow-client-san", "drafts"]
            self.services[host] = self._cluster.verifier(flags=flags, fault="slow_steps", **start)
        else:
            flags += ["--allow-client-san", "clients"]
            flags += ["--verifier", f"verifiers:{PORT}", "--verifier-tls-ca", tls["ca"]]
            flags += ["--verifier-tls-cert", tls["cert"], "--verifier-tls-key", tls["key"]]
            flags += ["--verifier-timeout", str(SILENCE_S), "--failover-timeout", str(FAILOVER_S)]
            self.services[host] = self._cluster.draft(flags=flags, **start)

    def _tls(self, host: str, name: str) -> dict[str, str]:
        """The fields of `TLS` for a host that calls hosts of a name."""
        own = self._certificates[host]
        return {"ca": str(self._authority.pem), "cert": str(own.cert), "key": str(own.key), "name": name}

    def restore(self) -> None:
        """Undo everything that happened to hosts and services."""
        for host in HOSTS:
            self.network.mend(host)
        for service in self.services.values():
            service.send(signal.SIGCONT)
            if service.returncode is not None:
                service.start_again()
                wait_ready(service)

    @contextmanager
    def writing(self, requests: Sequence[Request], step_seconds: float = 0.0) -> Iterator[list[Text]]:
        """Have all texts written at once, until the block ends without an error; meanwhile steps take so long."""
        tls = json.dumps(self._tls(CLIENT, "drafts"))
        arguments = [f"drafts:{PORT}", tls, json.dumps(requests)]
        texts = [Text() for _ in requests]

        def read(lines: Any) -> None:
            for line in lines:
                if line.startswith("["):
                    number, message = json.loads(line)
                    texts[number].take(message)
                else:
                    print("agent:", line, end="")

        agent = fork_server().fork("tests.hosts.agent", arguments, namespaces=self.network.namespaces(CLIENT))
        reader = threading.Thread(target=read, args=(agent.stdout,))
        reader.start()
        try:
            with slow_steps(self._step_seconds, step_seconds):
                yield texts
            assert agent.wait(SOON_S) == 0
        finally:
            agent.kill()
            agent.wait()
            reader.join()
            agent.stdout.close()  # type: ignore[union-attr]
        assert all(text.ended and not text.error for text in texts), texts

    def metrics(self, host: str) -> Samples:
        return parse(self.network.fetch(f"http://{self.network.address(host)}:{METRICS}/metrics"))

    def verifier_with_the_most_sequences(self) -> str:
        counts = dict.fromkeys(VERIFIERS, 0.0)
        for draft in DRAFTS:
            for labels, count in self.metrics(draft)["outrider_verifier_sequences"].items():
                address = dict(labels)["verifier"]
                (host,) = (host for host in VERIFIERS if f"{self.network.address(host)}:{PORT}" == address)
                counts[host] += count
        return max(counts, key=counts.__getitem__)

    def switches(self, reason: str) -> int:
        """How many sequences changed their verifier for that reason, as long as these draft services live."""
        found = [self.metrics(draft)["outrider_verifier_switches_total"] for draft in DRAFTS]
        return int(sum(each[(("reason", reason),)] for each in found))

    def settle(self) -> None:
        """Return when both draft services count both verifiers as healthy; texts are the trial of one that failed."""

        def settled() -> bool:
            known = [self.metrics(draft)["outrider_verifiers"] for draft in DRAFTS]
            ready, on_trial = ([each[(("status", status),)] for each in known] for status in ("ready", "recovering"))
            if ready == [len(VERIFIERS)] * len(DRAFTS):
                return True
            if [sum(counts) for counts in zip(ready, on_trial, strict=True)] == [len(VERIFIERS)] * len(DRAFTS):
                with self.writing([("def", {"max_new_tokens": 2, "seed": 1})] * 4):
                    pass
            time.sleep(0.5)  # each look at the metrics starts two processes
            return False

        wait_until(settled, SOON_S)


def wait_ready(service: Service) -> None:
    """Wait until its log says that it serves; the test is on another network, and cannot connect."""
    service.wait_listening()

    def serves() -> bool:
        service.check()
        return bool(service.logged("serving"))

    wait_until(serves, SOON_S)
