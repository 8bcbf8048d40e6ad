"""The plan of a simulation: clients and faults, drawn from the seed before it begins."""

import random
from dataclasses import dataclass, field

from protos.outrider.v1 import draft_service_pb2, sampling_pb2
from tests.simulation.clients import ClientPlan
from tests.simulation.models import VOCABULARY, DraftHabits

MAX_TOKENS = 64  # of a sequence
POLICIES = (
    draft_service_pb2.SPECULATION_POLICY_UNSPECIFIED,
    draft_service_pb2.SPECULATION_POLICY_FIXED,
    draft_service_pb2.SPECULATION_POLICY_HEURISTIC,
    draft_service_pb2.SPECULATION_POLICY_ADAPTIVE,
)
TOKENWISE, BLOCK, COUPLED = (
    sampling_pb2.ACCEPTANCE_RULE_TOKENWISE,
    sampling_pb2.ACCEPTANCE_RULE_BLOCK,
    sampling_pb2.ACCEPTANCE_RULE_COUPLED,
)
KINDS = ("calm", "one", "one", "wild", "wild", "full", "steps")
FAULTS = ("die", "vanish", "freeze", "cut", "drain", "lose", "hang")


@dataclass
class Plan:
    """The plan of one seed.

    Attributes:
        kind: "calm": no faults; "one": faults of one verifier of several, and every text is whole; "wild": any faults;
            "full": small limits; "steps": passes that fail.
        faults: time, fault, verifier, duration.
        poisoned: requests whose rounds break every pass.
    """

    seed: int
    kind: str
    verifiers: int
    latency: float
    blocks: int
    max_sequences: int
    max_waiting: int
    linger: float
    habits: DraftHabits
    draft_sequences: int
    clients: list[ClientPlan] = field(default_factory=list)
    faults: list[tuple[float, str, int, float]] = field(default_factory=list)
    poisoned: set[str] = field(default_factory=set)
    broken_steps: float = 0.0


def draw_plan(seed: int) -> Plan:
    chance = random.Random(seed)
    kind = chance.choice(KINDS)
    plan = Plan(
        seed=seed,
        kind=kind,
        verifiers=1 if kind == "calm" else chance.randint(2 if kind == "one" else 1, 3),
        latency=chance.choice((2e-4, 1e-3, 2e-2)),
        blocks=chance.choice((20, 40, 100)),
        max_sequences=chance.choice((2, 4, 8)) if kind == "full" else 32,
        max_waiting=chance.choice((0, 2)) if kind == "full" else 64,
        linger=chance.choice((0.0, 0.02)),
        habits=DraftHabits(right=chance.choice((0.3, 0.8, 1.0))),
        draft_sequences=chance.choice((2, 6)) if kind == "full" else 64,
    )
    if chance.random() < 0.4:
        plan.habits.raises, plan.habits.nonsense = chance.choice((0.0, 0.2)), chance.choice((0.0, 0.1))
        plan.habits.late, plan.habits.hangs = chance.choice((0.0, 0.1)), chance.choice((0.0, 0.05))
    prefix = [chance.randrange(1, VOCABULARY) for _ in range(12)]
    for number in range(chance.randint(1, 8)):
        plan.clients.append(_draw_client(chance, plan, number, prefix))
    span = 0.2 + max(client.at for client in plan.clients)
    if kind in ("one", "wild"):
        for _ in range(chance.randint(1, 4 if kind == "one" else 8)):
            which = plan.verifiers - 1 if kind == "one" else chance.randrange(plan.verifiers)
            lasts = chance.choice((0.05, 1.0, 5.0, 45.0))
            plan.faults.append((chance.uniform(0.0, 1.5 * span), chance.choice(FAULTS), which, lasts))
        plan.faults.sort()
    if kind == "steps":
        plan.broken_steps = chance.choice((0.0, 0.02, 0.2))
        plan.poisoned = {client.name for client in plan.clients if chance.random() < 0.3}
    return plan


def _draw_client(chance: random.Random, plan: Plan, number: int, prefix: list[int]) -> ClientPlan:
    own = [chance.randrange(1, VOCABULARY) for _ in range(chance.randint(0, 6))]
    temperature, rule = chance.choice(((0.0, TOKENWISE), (0.0, BLOCK), (1.0, COUPLED), (1.0, TOKENWISE), (1.0, BLOCK)))
    message = draft_service_pb2.GenerateRequest(
        request_id=f"r{number}",
        token_ids=draft_service_pb2.TokenIds(ids=prefix[: chance.choice((1, 4, 8, 12))] + own),
        sampling=sampling_pb2.SamplingParams(temperature=temperature, rule=rule, seed=chance.getrandbits(32)),
        max_new_tokens=chance.choice((1, 2, 4, 12, 40)),
        n=chance.choice((1, 1, 1, 3)) if plan.kind != "full" else 1,
        ignore_eos=chance.random() < 0.3,
        stop=["ab", "cde"] if chance.random() < 0.3 else [],
        speculation=draft_service_pb2.SpeculationParams(
            gamma=chance.choice((0, 1, 4, 8)), policy=chance.choice(POLICIES), report_rounds=chance.random() < 0.2
        ),
    )
    client = ClientPlan(chance.uniform(0.0, chance.choice((0.0, 0.2, 2.0))), message)
    if plan.kind in ("wild", "full", "steps") and chance.random() < 0.4:
        client.timeout = chance.choice((0.05, 0.5, 20.0))
    if plan.kind != "calm" and chance.random() < 0.15:
        client.cancel_after = chance.uniform(0.0, 0.3)
    if chance.random() < 0.2:
        client.reads_slowly = chance.choice((0.01, 0.3) if plan.kind in ("calm", "one") else (0.01, 0.3, 50.0))
    return client
