"""Services as processes on loopback, the models they load, and a `Verify` stream that a benchmark drives itself.

A benchmark sees only the output of the services: chunks, statistics and timings of a text, metrics over HTTP, verdicts.
"""

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Self, TypeVar
from urllib.request import urlopen

import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.harness import CACHE, WEIGHTS, Bench, Json, digest_of
from outrider.cli.processes import (
    DRAFT_SPINS,
    TARGET_SPINS,
    ServiceError,
    ServiceProcess,
    halves,
    processors,
    service_environment,
    terminated_as_interrupted,
)
from outrider.client import Client
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2

RULE = "block"
"""Named in each request: the default depends on whether it has a seed."""

APART, ANYWHERE, ONE_CORE = "a core each", "any core", "both on one core"
"""Places of the services: each on half of the processors, as `outrider serve` starts them where half is more than one;
where the system puts them; both on the same one."""

# Prompts are repeated, and other contenders run them each time.
NO_PREFIXES = ("--no-prefix-cache",)

# A layer adds to the residual stream through these.
OUTPUTS = ("self_attn.o_proj.", "mlp.down_proj.")
# Rows of these are units of a layer; an output (`OUTPUTS`) has a column for each.
_UNITS = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.", "mlp.gate_proj.", "mlp.up_proj.")
_LAYER = re.compile(r"^(?P<before>.*\blayers\.)(?P<index>\d+)\.(?P<after>.+)$")

_HTTP_START_S = 60.0
_START_S = 240.0  # a first start on a GPU compiles some ten kernels, and captures some twenty passes

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Models:
    name: str
    target: Path
    draft: Path

    def document(self) -> Json:
        config = json.loads((self.target / "config.json").read_text(encoding="utf-8"))
        return {
            "target": self.target.name,
            "draft": self.draft.name,
            "target_layers": config["num_hidden_layers"],
            "target_mib": round((self.target / WEIGHTS).stat().st_size / 2**20, 1),
            "draft_mib": round((self.draft / WEIGHTS).stat().st_size / 2**20, 1),
            "digests": [digest_of(self.target), digest_of(self.draft)],
        }


def models_of(bench: Bench, more: str = "") -> list[Models]:
    """The demo pair and the pair with a deepened target; with `--only`, one pair, also that with a widened target.

    The result describes them. Their names end with `more`.
    """
    given = bench.given
    makers = {"demo": lambda: given.target}
    makers |= {make.__name__: partial(make, given.target, given.factor, CACHE) for make in (deepened, widened)}
    names = [given.only] if given.only else ["demo", "deepened"]
    found = [Models(name + more, makers[name](), given.draft) for name in names]
    bench.document["models"] = {models.name: models.document() for models in found}
    return found


def deepened(source: Path, factor: int, folder: Path) -> Path:
    """The model of `source` with `factor` times its layers, in a folder of its own below `folder`; made once.

    The added layers are copies whose output projections are zero. They do the work of a layer and change no logit, bit
    for bit: the model costs as much as a larger one and writes the same text. The name of its folder holds a digest of
    the source, so that a model trained again is deepened again. Raises ValueError for layers not named as Llama's.
    """

    def change(config: Json, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        config["num_hidden_layers"] *= factor
        if isinstance(config.get("layer_types"), list):
            config["layer_types"] = [kind for kind in config["layer_types"] for _ in range(factor)]
        return _deepened_weights(weights, factor)

    return _changed(source, f"x{factor}", factor, folder, change)


def widened(source: Path, factor: int, folder: Path) -> Path:
    """The model of `source` with `factor` times the MLP units and, at most, heads; otherwise as `deepened`.

    The number of heads must divide the hidden size. The added units are copies, and their columns of the output
    projections are zero. So they do their work and change the logits by rounding alone. The products of a layer have
    the size of a large model's; those of a deepened model remain small.
    """

    def change(config: Json, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        more = max(n for n in range(1, factor + 1) if hidden % (n * heads) == 0)
        config["head_dim"] = config.get("head_dim") or hidden // heads
        config["num_key_value_heads"] = more * (config.get("num_key_value_heads") or heads)
        config["num_attention_heads"] = more * heads
        config["intermediate_size"] *= factor
        return {name: _widened_weight(name, each, more, factor) for name, each in weights.items()}

    return _changed(source, f"wide{factor}", factor, folder, change)


def _changed(
    source: Path,
    suffix: str,
    factor: int,
    folder: Path,
    change: Callable[[Json, dict[str, Tensor]], dict[str, Tensor]],
) -> Path:
    """The folder of a changed model; `change` gets configuration and weights, and returns the new weights."""
    if factor < 1:
        raise ValueError(f"factor is {factor}; it must be at least 1")
    out = folder / f"{source.name}-{suffix}-{digest_of(source)}"
    if (out / WEIGHTS).is_file():
        return out
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights, layers = load_file(source / WEIGHTS), config.get("num_hidden_layers", 0)
    outputs = {f"layers.{index}.{output}" for index in range(layers) for output in OUTPUTS}
    if not layers or not all(any(output in name for name in weights) for output in outputs):
        raise ValueError(f"a layer lacks {' or '.join(OUTPUTS)}; only models with Llama's layers can be changed")
    weights = change(config, weights)
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.name not in (WEIGHTS, "config.json"):
            shutil.copyfile(file, out / file.name)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # Last, and under its name only when whole: a folder with weights is complete.
    save_file(weights, out / f"{WEIGHTS}.part", metadata={"format": "pt"})
    (out / f"{WEIGHTS}.part").rename(out / WEIGHTS)
    return out


def _deepened_weights(weights: dict[str, Tensor], factor: int) -> dict[str, Tensor]:
    deep: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        found = _LAYER.match(name)
        if found is None:
            deep[name] = tensor
            continue
        for copy in range(factor):
            is_zero = copy > 0 and found["after"].startswith(OUTPUTS)
            layer = f"{found['before']}{int(found['index']) * factor + copy}"
            deep[f"{layer}.{found['after']}"] = torch.zeros_like(tensor) if is_zero else tensor.clone()
    return deep


def _widened_weight(name: str, tensor: Tensor, heads: int, units: int) -> Tensor:
    """A weight or bias in a model with so many times the heads and MLP units."""
    found = _LAYER.match(name)
    after = found["after"] if found else ""
    factor = heads if after.startswith("self_attn.") else units
    if after.startswith(_UNITS):
        return torch.cat([tensor] * factor)
    if after.startswith(OUTPUTS) and after.endswith(".weight"):
        return torch.cat([tensor, tensor.new_zeros(len(tensor), (factor - 1) * tensor.size(1))], 1)
    return tensor


def _start(
    service: str,
    model: Path,
    *more: str,
    dtype: str = "bfloat16",
    device: str = "cpu",
    threads: int = 1,
    max_sequences: int,
    cores: Collection[int] | None = None,
    command: Sequence[str] = (),
    tree: Path | None = None,
) -> ServiceProcess:
    flags = {"--model": model, "--listen": "127.0.0.1:0", "--dtype": dtype, "--device": device, "--threads": threads}
    flags["--max-sequences"] = max_sequences
    arguments = [*command, service, *(str(part) for flag in flags.items() for part in flag), *more]
    environment = service_environment(threads, spins=TARGET_SPINS if service == "verifier_service" else DRAFT_SPINS)
    if tree is not None:  # without PYTHONSAFEPATH, Python looks into the working directory first
        environment |= {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    return ServiceProcess.launch(arguments, env=environment, cores=cores)


@contextmanager
def verifier(target: Path, *more: str, max_sequences: int) -> Iterator[str]:
    with (
        terminated_as_interrupted(),
        _start("verifier_service", target, *NO_PREFIXES, *more, max_sequences=max_sequences) as service,
    ):
        service.wait_healthy(_START_S)
        yield service.address


@contextmanager
def one_process(target: Path, draft: Path, *, dtype: str) -> Iterator[Client]:
    """Both services in one process, without a network between them; yields a client. γ is fixed by default."""
    command = ("benchmarks.one_process", str(target))
    flags = ("--speculation", "fixed", *NO_PREFIXES)
    with (
        terminated_as_interrupted(),
        _start("draft_service", draft, *flags, dtype=dtype, max_sequences=2, command=command) as service,
    ):
        service.wait_healthy(_START_S)
        with Client(service.address) as client:
            yield client


@dataclass(eq=False)
class Services:
    """Both services of a pair and a client, as a context manager that stops them.

    For a main thread: inside it SIGTERM interrupts, or else the services would outlive a benchmark that is stopped.
    """

    target_model: Path
    draft_model: Path
    _: KW_ONLY
    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int = 1  # of the verifier; the draft has one
    place: str = APART
    max_sequences: int = 2
    verifier_flags: Sequence[str] = NO_PREFIXES
    draft_flags: Sequence[str] = NO_PREFIXES
    distant: bool = False  # whether `proxy`, which can delay bytes, stands between the two
    command: Sequence[str] = ()  # before a service's name on its command line
    tree: Path | None = None  # the source tree of both; None: this one

    verifier: ServiceProcess = field(init=False)
    draft: ServiceProcess = field(init=False)
    client: Client = field(init=False)
    proxy: Any = field(init=False, default=None)
    _open: ExitStack = field(init=False, default_factory=ExitStack)
    _metrics: dict[ServiceProcess, str] = field(init=False, default_factory=dict)

    @property
    def how(self) -> Json:
        return {"dtype": self.dtype, "threads": self.threads, "place": self.place}

    def __enter__(self) -> Self:
        one = frozenset([min(processors())]) if self.place == ONE_CORE else None
        first, second = (halves(self.threads) if self.place == APART else None) or (one, one)
        with ExitStack() as opening:
            opening.enter_context(terminated_as_interrupted())
            self.verifier = self._started(opening, "verifier_service", first, *self.verifier_flags)
            address = self.verifier.wait_listening()
            if self.distant:
                from tests.proxy import Proxy

                self.proxy = opening.enter_context(Proxy(address))
                address = self.proxy.address
            # A run that names no speculation policy has a fixed γ.
            flags = ("--verifier", address, "--speculation", "fixed", *self.draft_flags)
            self.draft = self._started(opening, "draft_service", second, *flags)
            for service in (self.verifier, self.draft):
                service.wait_healthy(_START_S)
                self._metrics[service] = _metrics_address(service)  # now: only the end of a long log is kept
            self.client = opening.enter_context(Client(self.draft.address))
            self._open = opening.pop_all()
        return self

    def _started(self, opening: ExitStack, name: str, cores: Collection[int] | None, *flags: str) -> ServiceProcess:
        model, threads = (self.target_model, self.threads) if name == "verifier_service" else (self.draft_model, 1)
        service = _start(
            name, model, "--metrics-listen", "127.0.0.1:0", *flags, dtype=self.dtype, device=self.device,
            threads=threads, max_sequences=self.max_sequences, cores=cores, command=self.command, tree=self.tree,
        )  # fmt: skip
        return opening.enter_context(service)

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def metrics_of(self, service: ServiceProcess) -> dict[str, float]:
        """The metrics of one of the two: each sample by its name, summed over labels."""
        with urlopen(self._metrics[service], timeout=10.0) as answer:
            shown = answer.read().decode()
        sums: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(shown):
            for sample in family.samples:
                sums[sample.name] += sample.value
        return dict(sums)


def _metrics_address(service: ServiceProcess) -> str:
    for line in service.log_lines():
        if line.startswith("{") and (entry := json.loads(line)).get("event") == "metrics":
            return str(entry["address"])
    raise ServiceError(f"{service.name} does not say where it serves its metrics", service.log_lines())


@contextmanager
def http_server(command: Sequence[str], url: str) -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own, once `/health` answers.

    Raises:
        ServiceError: it ended, or did not answer in time; with the end of its log.
    """
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, text=True)
        try:
            deadline = time.monotonic() + _HTTP_START_S
            while not _is_healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise ServiceError(f"no server answers at {url}: {' '.join(log.read().splitlines()[-3:])}")
                time.sleep(0.05)
            yield process
        finally:
            process.terminate()
            process.wait()


def _is_healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def await_(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine, always on the same event loop: asyncio gRPC needs one that does not change."""
    return _runner().run(coroutine)


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


class VerifyStream:
    """One sequence at a verifier. After each verdict, `commit` its tokens."""

    def __init__(self, call: Any, prompt: Sequence[int]) -> None:
        self.length = len(prompt)
        self._call = call
        self._hash = PrefixHash(prompt)
        self._round, self._seen = 0, 0

    @classmethod
    async def open(
        cls, stub: Any, prompt: Sequence[int], new_tokens: int, *, joined: bool = False, **sampling: Any
    ) -> Self:
        """Opens a sequence that ignores end-of-sequence ids; the stub belongs to a channel of `grpc.aio`.

        With `joined` a verdict may hold several tokens of a `Decode`: so the draft service asks for them.
        """
        stream = cls(stub.Verify(timeout=600.0), prompt)
        opening = verifier_service_pb2.OpenSequence(
            prompt_token_ids=prompt,
            sampling=sampling_pb2.SamplingParams(**sampling),
            max_new_tokens=new_tokens,
            ignore_eos=True,
            joined_verdicts=joined,
        )
        await stream._send(open=opening)
        await stream._call.read()
        return stream

    async def propose(self, tokens: Sequence[int], *, coupled: bool = False) -> None:
        """Proposes tokens with q = 1 each; under `coupled` without q."""
        sure = speculation_pb2.TokenDistribution(point_mass=speculation_pb2.PointMass())
        q = [] if coupled else [sure for _ in tokens]
        await self._send(proposal=speculation_pb2.Proposal(token_ids=tokens, distributions=q, **self._next_round()))

    async def decode(self, tokens: int) -> None:
        await self._send(decode=verifier_service_pb2.Decode(num_tokens=tokens, **self._next_round()))

    async def verdict(self) -> speculation_pb2.Verdict:
        while True:
            reply: verifier_service_pb2.VerifyResponse = await self._call.read()
            if reply.WhichOneof("kind") == "verdict":
                self._seen = reply.verdict.round
                return reply.verdict

    def commit(self, tokens: Sequence[int]) -> None:
        self._hash.extend(tokens)
        self.length += len(tokens)

    def cancel(self) -> None:
        self._call.cancel()

    def _next_round(self) -> Json:
        self._round += 1
        digest = self._hash.digest()
        return {"round": self._round, "base_length": self.length, "prefix_hash": digest, "seen_round": self._seen}

    async def _send(self, **kind: Any) -> None:
        await self._call.write(verifier_service_pb2.VerifyRequest(sequence_id="benchmark", **kind))
