"""Log-probabilities of prompts, and p and q of drafted tokens, through both services and the client."""

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import grpc
import pytest
import torch

from draft_service.failover import FailoverStream
from draft_service.sequence import Sequence
from kernels.verify import Rule
from outrider.cli.processes import ServiceProcess
from outrider.client import AsyncClient, Chunk, Client, Completion, Event, Options, PromptLogprobs, Started
from outrider.rpc.errors import RequestError
from outrider.service.wire import PROMPT_POSITIONS
from protos.outrider.v1 import sampling_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Cluster, wait_healthy, wait_until
from tests.draft_service.calls import request
from tests.draft_service.oracle import encode, logits
from tests.draft_service.records import record
from tests.draft_service.verifiers import Switches, matched, status_of
from tests.exactness.mutants.conditions import POISON
from tests.proxy import Proxy, Way

TEXT = "def area(radius):\n    return 3.14 * radius ** 2\n\n\n" * 14
IDS = encode(TEXT)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """Transformers' own log-probabilities, `[T, V]`."""
    return torch.log_softmax(logits(IDS).double(), -1)


@pytest.fixture(scope="module")
def client(draft_address: str) -> Iterator[Client]:
    with Client(draft_address) as made:
        yield made


def assert_scores(completion: Completion, expected: torch.Tensor, top: int) -> None:
    assert [each.token.token_id for each in completion.prompt_logprobs] == IDS[1:]
    rows, scores = expected[:-1], completion.prompt_logprobs
    own = rows.gather(1, torch.tensor(IDS[1:])[:, None])
    for found, wanted in (
        ([[each.token.raw] for each in scores], own),
        ([[one.raw for one in each.top] for each in scores], rows.topk(top).values),
    ):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted, rtol=0.0, atol=TOLERANCE)
    for each in scores:
        assert each.token.raw == each.token.adjusted
        assert all(one.raw == each.token.raw for one in each.top if one.token_id == each.token.token_id)


def test_they_come_once_before_all_text_and_change_none(client: Client, expected: torch.Tensor) -> None:
    """With several samples and penalties, sampled, from text."""
    options = {"n": 3, "seed": 5, "max_new_tokens": 12, "repetition_penalty": 1.2, "gamma": 3}
    events: list[Event] = list(client.generate(TEXT, prompt_logprobs=2, **options))  # type: ignore[arg-type]
    kinds = [type(event) for event in events]
    assert kinds[0] is Started
    parts = [event for event in events if isinstance(event, PromptLogprobs)]
    assert kinds[1 : 1 + len(parts)] == [PromptLogprobs] * len(parts)
    assert kinds.index(Chunk) == 1 + len(parts)
    assert len(parts) >= -(-(len(IDS) - 1) // PROMPT_POSITIONS) > 1
    completion = Completion.of(events)
    assert_scores(completion, expected, 2)
    plain = client.complete(TEXT, **options)  # type: ignore[arg-type]
    assert plain.prompt_logprobs == ()
    assert [each.token_ids for each in plain.samples] == [each.token_ids for each in completion.samples]
    again = client.complete(TEXT, prompt_logprobs=2, max_new_tokens=1, logprobs=1)
    assert_scores(again, expected, 2)
    assert again.usage.cached_tokens == 0, "although the prefix is cached now"
    assert len(again.logprobs) == 1


def test_the_other_samples_wait_for_them(client: Client, draft_address: str) -> None:
    """Their prefix is cached, and the first sample scores its prompt in two steps. On the wire, as the client drops
    positions that come twice.
    """
    prompt = (IDS * 4)[:900]
    client.complete(prompt, max_new_tokens=1)
    message = request(prompt, n=3, max_new_tokens=2, prompt_logprobs=sampling_pb2.LogprobsParams())
    with grpc.insecure_channel(draft_address) as channel:
        responses = [
            each for each in DraftServiceStub(channel).Generate(message, timeout=60) if each.WhichOneof("event")
        ]
    kinds = [each.WhichOneof("event") for each in responses]
    parts = [each.prompt_logprobs for each in responses if each.HasField("prompt_logprobs")]
    assert kinds[: 1 + len(parts)] == ["started", *["prompt_logprobs"] * len(parts)]
    assert kinds.count("finished") == 3
    assert [part.first_position for part in parts] == list(accumulate((len(p.logprobs) for p in parts[:-1]), initial=1))
    assert [each.token.token_id for part in parts for each in part.logprobs] == prompt[1:]


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_a_prompt_of_one_token_has_none(client: Client, drafter: str) -> None:
    completion = client.complete([IDS[0]], prompt_logprobs=1, n=2, max_new_tokens=3, drafter=drafter)
    assert completion.prompt_logprobs == ()
    assert len(completion.samples) == 2


@pytest.mark.slow
def test_concurrent_prompts_in_a_small_pool_have_their_scores_once() -> None:
    """Twelve sequences, of which few fit; two thirds of them are scored."""
    prompts = [random.Random(i).choices(range(5, 1900), k=60 + 9 * i) for i in range(12)]
    with Cluster("--max-sequence-tokens 256") as cluster:
        verifier = cluster.verifier(flags="--kv-cache-mb 3 --max-batch-tokens 40")
        service = cluster.draft(verifier, flags="--kv-cache-mb 32")
        wait_healthy(verifier, service)

        def complete(number: int) -> Completion:
            options: Options = {"max_new_tokens": 90, "ignore_eos": True, "seed": number}
            if number % 3 < 2:
                options["prompt_logprobs"] = number % 4
            with Client(service.address) as client:
                return client.complete(prompts[number], **options)

        for _ in range(5):  # the machine's speed decides how many run at once
            with ThreadPoolExecutor(len(prompts)) as threads:
                found = list(threads.map(complete, range(len(prompts))))
            for number, (prompt, completion) in enumerate(zip(prompts, found, strict=True)):
                scores = completion.prompt_logprobs
                if number % 3 == 2:
                    assert scores == ()
                    continue
                assert [each.token.token_id for each in scores] == prompt[1:]
                rows = torch.log_softmax(logits(prompt).double(), -1)[range(len(scores)), prompt[1:]]
                assert [each.token.raw for each in scores] == pytest.approx(rows.tolist(), abs=TOLERANCE)
            if verifier.count("outrider_preemptions_total"):
                return
    pytest.fail("no sequence was preempted")


# ------------------------------------------------------------------------------------------------------------ failover


@pytest.fixture(scope="module")
def small_steps() -> Iterator[ServiceProcess]:
    """A verifier that scores a prompt in more pieces than may be unread."""
    with Cluster("--max-batch-tokens 4") as cluster:
        verifier = cluster.verifier()
        verifier.wait_healthy()
        yield verifier


@pytest.mark.parametrize("cut", [1, 40])
async def test_a_new_verifier_scores_again_and_no_position_comes_twice(
    cut: int, small_steps: ServiceProcess, expected: torch.Tensor
) -> None:
    """The connection is cut once, after so many of some 84 parts."""
    sequence: Sequence = record(Rule.COUPLED, seed=7, prompt=IDS, max_new_tokens=3, top_prompt_logprobs=2)
    parts: list[sampling_pb2.PromptLogprobs] = []
    at_cut: list[int] = []

    async def collect(part: sampling_pb2.PromptLogprobs) -> None:
        parts.append(part)
        if switches.reasons and not at_cut:
            at_cut.append(len(parts))
        if len(parts) == cut:
            proxy.cut()
            proxy.heal()

    sequence.on_prompt_logprobs = collect
    switches = Switches()
    with Proxy(small_steps.address) as proxy:
        async with matched(proxy, switches=switches, silence=20.0) as verifiers:  # the machine may be busy
            stream = FailoverStream(verifiers, sequence, timeout=60.0)
            try:
                # A part has some 210 bytes, and messages of health checks count too.
                proxy.stall_after(2000 + 220 * cut, Way.DOWN)
                await stream.open()
                sequence.decode(3)
                await stream.send()
                while sequence.left:
                    sequence.commit(await stream.verdict())
                await stream.close()
            finally:
                stream.cancel()
    assert len(switches.reasons) == sequence.counts.message.num_failovers == 1
    assert len(at_cut) == 1, "parts came after the cut"
    position = 1
    for part in parts:
        assert part.first_position == position
        for each in part.logprobs:
            assert each.token.token_id == IDS[position]
            assert each.token.raw == pytest.approx(expected[position - 1, IDS[position]].item(), abs=TOLERANCE)
            position += 1
    assert position == len(IDS)
    assert not sequence.opening().HasField("prompt_logprobs"), "another failover would not ask again"


async def send_and_wait(stream: FailoverStream) -> None:
    await stream.send()
    await stream.verdict()


async def test_bad_logits_of_the_prompt_are_reported_although_parts_are_unread() -> None:
    """The round is sent after the verifier has ended the sequence; the verifier itself counts as sound."""
    sequence: Sequence = record(
        Rule.COUPLED, seed=7, prompt=[*IDS[:20], POISON, 10], max_new_tokens=3, top_prompt_logprobs=2
    )
    with Cluster("--max-batch-tokens 4") as cluster:
        verifier = cluster.verifier(fault="poisoned_logits")
        wait_healthy(verifier)
        async with matched(verifier, silence=20.0) as verifiers:
            stream = FailoverStream(verifiers, sequence, timeout=60.0)
            try:
                await stream.open()
                await asyncio.to_thread(wait_until, lambda: verifier.logged("sequence"))
                sequence.decode(3)
                with pytest.raises(RequestError) as caught:
                    await send_and_wait(stream)
            finally:
                stream.cancel()
            assert status_of(caught.value) == (grpc.StatusCode.INTERNAL, "BAD_LOGITS")
            assert [replica.is_usable() for replica in verifiers.replicas.all()] == [True]


async def test_a_client_resumes_in_the_middle_of_them(draft_address: str, expected: torch.Tensor) -> None:
    with Proxy(draft_address) as one, Proxy(draft_address) as other:
        async with AsyncClient(one.address) as client:
            with one.recording() as seen:
                whole = await client.complete(TEXT, prompt_logprobs=3, max_new_tokens=4, seed=3)
        total = sum(len(segment.data) for segment in seen if segment.way is Way.DOWN)
        for share in (0.3, 0.9):
            for proxy in (one, other):
                proxy.cut_after(int(share * total), Way.DOWN)
            async with AsyncClient([one.address, other.address]) as client:
                events = [event async for event in client.generate(TEXT, prompt_logprobs=3, max_new_tokens=4, seed=3)]
            for proxy in (one, other):
                proxy.heal()
            found = Completion.of(events)
            assert found.samples[0].num_resumes >= 1
            assert found.token_ids == whole.token_ids
            assert_scores(found, expected, 3)
            at = 1
            for event in events:
                if isinstance(event, PromptLogprobs):
                    assert event.first_position == at
                    at += len(event.logprobs)


# ---------------------------------------------------------------------------------------------------------- p and q


def test_p_and_q_of_drafted_tokens_agree_with_beta(client: Client) -> None:
    """A point mass has q = 1, so p is β. For a model, β is the mean of min(1, p / q) over tokens drawn from q: the
    means over many positions agree (standard error below 0.03).
    """
    options = {"rule": "tokenwise", "gamma": 4, "max_new_tokens": 90, "ignore_eos": True, "report_probabilities": True}
    lookup = client.complete(TEXT, drafter="lookup", temperature=0.4, seed=1, **options)  # type: ignore[arg-type]
    judged = 0
    for each in lookup.samples[0].rounds:
        assert len(each.target_probabilities) == len(each.draft_probabilities) == len(each.drafted_token_ids)
        assert set(each.draft_probabilities) <= {1.0}
        assert each.beta == pytest.approx(each.target_probabilities[: len(each.beta)], rel=1e-5)
        judged += len(each.beta)
    assert judged > 20
    beta, chances = list[float](), list[float]()
    for seed in range(3):
        sample = client.complete(TEXT, drafter="model", seed=seed, **options).samples[0]  # type: ignore[arg-type]
        assert len(sample.token_texts) == len(sample.token_ids), "reports of rounds come, too"
        for each in sample.rounds:
            ratios = [p / q for p, q in zip(each.target_probabilities, each.draft_probabilities, strict=True)]
            assert all(ratio < 1 for ratio in ratios[each.accepted : len(each.beta)]), "p >= q is never rejected"
            beta += each.beta
            chances += [min(1.0, ratio) for ratio in ratios[: len(each.beta)]]
    assert len(beta) > 200
    assert sum(chances) / len(beta) == pytest.approx(sum(beta) / len(beta), abs=0.06)


def test_target_probabilities_are_those_of_the_adjusted_distribution(client: Client) -> None:
    completion = client.complete(
        TEXT, drafter="model", rule="block", gamma=3, max_new_tokens=12, temperature=0.7, seed=2, ignore_eos=True,
        report_probabilities=True,
    )  # fmt: skip
    written = list(completion.token_ids)
    for each in completion.samples[0].rounds:
        context = IDS + written[: each.output_length] + list(each.drafted_token_ids)
        rows = torch.softmax(logits(context)[-len(each.drafted_token_ids) - 1 : -1].double() / 0.7, -1)
        drafted = torch.tensor(each.drafted_token_ids).unsqueeze(1)
        assert each.target_probabilities == pytest.approx(rows.gather(1, drafted).squeeze(1).tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "has_q"),
    [
        ({"rule": "coupled", "seed": 4}, False),
        ({"temperature": 0}, True),
        ({"rule": "sigmoid", "sigmoid_scales": (-10.0, 10.0)}, True),
    ],
    ids=["coupled", "greedy", "sigmoid"],
)
def test_every_rule_reports_p(client: Client, options: dict[str, object], has_q: bool) -> None:
    completion = client.complete(
        TEXT, gamma=3, max_new_tokens=16, ignore_eos=True, report_probabilities=True, **options  # type: ignore[arg-type]
    )  # fmt: skip
    drafted = 0
    for each in completion.samples[0].rounds:
        count = len(each.drafted_token_ids)
        assert len(each.target_probabilities) == count
        assert len(each.draft_probabilities) == (count if has_q else 0)
        assert all(0 <= p <= 1 for p in each.target_probabilities)
        assert all(0 < q <= 1 for q in each.draft_probabilities)
        if options.get("temperature") == 0:
            assert list(each.target_probabilities[: each.accepted]) == [1.0] * each.accepted
        drafted += count
    assert drafted


def test_probabilities_are_reported_only_on_request(client: Client) -> None:
    completion = client.complete(TEXT, gamma=3, max_new_tokens=8, report_rounds=True)
    for each in completion.samples[0].rounds:
        assert each.target_probabilities == each.draft_probabilities == ()
