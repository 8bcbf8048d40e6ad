"""The services of a tiny pair."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import Cluster, Service, wait_healthy
from tests.exactness import pairs, sampling

BY_TORCH = "layers_by_torch"


class PairServices:
    """A tiny pair on disk, its verifier, and draft services, which start on first use and stay."""

    def __init__(self, cluster: Cluster, folder: Path, *, seed: int, markov: bool) -> None:
        self.target = pairs.write_target(folder / "target", seed=seed, markov=markov)
        self.drafts = {kind: pairs.write_draft(folder / kind, self.target, kind) for kind in pairs.HEADS}
        self.drafts["parallel"] = pairs.write_parallel_draft(folder / "parallel", self.target)
        self.verifier = cluster.verifier(model=self.target, flags=sampling.FLAGS)
        self._cluster = cluster
        self._running: dict[tuple[str, str, str | None], Service] = {}

    def draft(self, kind: str = "sharpened", flags: str = "", fault: str | None = None) -> Service:
        """Return the draft service with this draft, these flags and this fault. By torch, its verifier is so too."""
        key = kind, flags, fault
        if key not in self._running:
            verifier = self.verifier
            if fault == BY_TORCH:
                verifier = self._cluster.verifier(model=self.target, fault=BY_TORCH, flags=sampling.FLAGS)
                wait_healthy(verifier)
                assert verifier.logged("verification")[0]["verify_path"] == "torch"
            self._running[key] = self.start_draft(*key, verifier)
            wait_healthy(self._running[key])
        return self._running[key]

    def start_draft(
        self, kind: str, flags: str = "", fault: str | None = None, verifier: Service | None = None
    ) -> Service:
        return self._cluster.draft(
            verifier or self.verifier,
            model=self.drafts[kind],
            fault=fault,
            flags=(*sampling.DRAFT_FLAGS, *flags.split()),
        )

    @contextmanager
    def with_verifier(self, *flags: str) -> Iterator[Service]:
        """Start a verifier with these flags and a draft service in front of it; stop both after the block."""
        verifier = self._cluster.verifier(model=self.target, flags=(*sampling.FLAGS, *flags))
        draft = self.start_draft("sharpened", verifier=verifier)
        wait_healthy(verifier, draft)
        yield draft
        draft.end()
        verifier.end()

    @contextmanager
    def with_fault(
        self, fault: str, kind: str = "sharpened", flags: str = "", *, in_verifier: bool = False
    ) -> Iterator[Service]:
        """Start a draft service with a fault in it, or in a verifier of its own; stop both after the block."""
        verifier = self.verifier
        if in_verifier:
            verifier = self._cluster.verifier(model=self.target, fault=fault, flags=sampling.FLAGS)
        draft = self.start_draft(kind, flags, None if in_verifier else fault, verifier)
        wait_healthy(verifier, draft)
        yield draft
        draft.end()
        if in_verifier:
            verifier.end()
