"""The requests of a check: which there are, and how one is cut and resumed."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kernels.sampling import SamplingParams
from outrider.client import (
    AcceptanceRule,
    AsyncClient,
    Chunk,
    Options,
    PositionLogprobs,
    SpeculationPolicy,
    Started,
)
from outrider.evaluation import deployment
from outrider.evaluation.check_report import ALONE, COUPLED, GREEDY, LOAD, NO_DRAFT, RESUMED
from outrider.evaluation.clips import Source, request_of
from outrider.evaluation.reference import TOP_N, sampling_options
from outrider.evaluation.streams import for_each
from protos.outrider.v1 import model_pb2

GAMMAS = (1, 2, 4, None)
SETTINGS = (SamplingParams(), SamplingParams(top_k=10, top_p=0.8))
PROMPTS: tuple[Source, ...] = (
    *deployment.PROMPTS,
    "Once upon a time there was",
    "class Stack:\n    def __init__(self):\n",
    "SELECT name, price FROM",
    "for (int i = 0; i < n; i++) {",
)
CUTS = 3
"""Of a sampled text that is resumed: after each of its first chunks."""
_LEAST_TEXTS = 96
"""Texts for each prompt and setting, at least: fewer prompts are used for fewer texts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask for.

    Attributes:
        load: sampled texts for each rule, many at once.
        alone: sampled texts for each rule, one after the other.
        resumed: sampled texts for each rule that are cut and resumed.
        tokens: of each sampled text.
        equal: prompts of which texts are compared token for token.
        equal_tokens: of each of them.
        at_once: requests under load.
        prompts: to continue; clips for a pair of speech models.
        settings: how sampled texts are sampled.
        gammas: of requests, in turn; None: the service's default policy.
        drafter: by name; None: the service's default.
        rounding: see `ROUNDING`; None: by the target's dtype.
        seed: of all requests that give one.
    """

    load: int = 1536
    alone: int = 128
    resumed: int = 512
    tokens: int = 9
    equal: int = 8
    equal_tokens: int = 32
    at_once: int = 32
    prompts: Sequence[Source] = PROMPTS
    settings: Sequence[SamplingParams] = SETTINGS
    gammas: Sequence[int | None] = GAMMAS
    drafter: str | None = None
    rounding: float | None = None
    seed: int = 0


def sampling(**fields: Any) -> SamplingParams:
    """Return a setting of a plan; for callers that must not import torch at the start."""
    return SamplingParams(**fields)


Step = Callable[[str, int, int], None]
"""Called with the name of a stage, steps done since the last call, and steps in all."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        name: `GREEDY` or `COUPLED` if its text is compared; else the rule, or `NO_DRAFT`.
        prompt: its number.
        where: `ALONE`, `LOAD` or `RESUMED`.
        options: of the request.
        params: of a sampled text; None: it is compared.
        cuts: how often it is cut and resumed: after `cut` tokens, and after each chunk from then on; without a draft
            after each token, since a chunk then holds as many as the verifier wrote in a step.
        cut: at least 1.
    """

    name: str
    prompt: int
    where: str
    options: Options
    params: SamplingParams | None = None
    cuts: int = 0
    cut: int = 1


@dataclass(frozen=True, slots=True)
class Text:
    """The answer. `begin` is the position of its first token; `drafted` and `accepted` are of the last part."""

    ask: Ask
    tokens: tuple[int, ...]
    begin: int
    drafted: int = 0
    accepted: int = 0
    logprobs: tuple[PositionLogprobs, ...] = ()
    is_resumed: bool = False


# ------------------------------------------------------------------------------------------------------- which requests


def requests(plan: Plan, target: model_pb2.ModelInfo) -> list[Ask]:
    """Return the requests of a plan, in random order: under load all kinds are in progress together."""
    generator = random.Random(plan.seed)
    rules = [AcceptanceRule.of(number).value for number in target.rules if number not in target.lossy_rules]
    asks = list(_compared(plan, rules, generator))
    for where, count in ((ALONE, plan.alone), (LOAD, plan.load), (RESUMED, plan.resumed)):
        for rule in (*rules, NO_DRAFT):
            asks += _sampled(plan, rule, where, count, generator)
    generator.shuffle(asks)
    return asks


def _compared(plan: Plan, rules: Sequence[str], generator: random.Random) -> Iterator[Ask]:
    common = Options(max_new_tokens=plan.equal_tokens, ignore_eos=True)
    for prompt in range(min(plan.equal, len(plan.prompts))):
        kinds = {GREEDY: common | Options(temperature=0.0)}
        if AcceptanceRule.COUPLED in rules:
            kinds[COUPLED] = common | Options(seed=generator.getrandbits(63), rule=AcceptanceRule.COUPLED)
        for kind, options in kinds.items():
            yield Ask(kind, prompt, ALONE, options | Options(gamma=0, logprobs=TOP_N))
            for gamma in plan.gammas:
                drafting = options | _drafting(plan, gamma)
                yield Ask(kind, prompt, ALONE, drafting)
                yield Ask(kind, prompt, LOAD, drafting)
                yield Ask(kind, prompt, RESUMED, drafting, cuts=1, cut=generator.randrange(1, plan.equal_tokens - 1))


def _sampled(plan: Plan, rule: str, where: str, count: int, generator: random.Random) -> Iterator[Ask]:
    prompts = min(max(count // (_LEAST_TEXTS * len(plan.settings)), 1), len(plan.prompts))
    for number in range(count):
        turn, at = divmod(number, prompts * len(plan.settings))
        params, gamma = plan.settings[at // prompts], plan.gammas[turn % len(plan.gammas)]
        options = Options(max_new_tokens=plan.tokens, ignore_eos=True, rule=rule) | sampling_options(params)
        seed = generator.getrandbits(63)
        if rule == NO_DRAFT:
            options |= Options(gamma=0, seed=seed, rule=AcceptanceRule.TOKENWISE)
        else:
            options |= _drafting(plan, gamma)
            if gamma is not None:  # with a seed the service's own policy would not be used
                options["seed"] = seed
        yield Ask(rule, at % prompts, where, options, params, CUTS if where == RESUMED else 0)


def _drafting(plan: Plan, gamma: int | None) -> Options:
    options = Options() if plan.drafter is None else Options(drafter=plan.drafter)
    return options if gamma is None else options | Options(gamma=gamma)


# --------------------------------------------------------------------------------------------------------------- asking


class Requester:
    """Sends the requests of a plan.

    Attributes:
        prompts: as they are sent: token ids, but for encoder–decoder models.
        ids: of each prompt; of the decoder's for encoder–decoder models.
    """

    def __init__(self, client: AsyncClient, prompts: Sequence[Source], ids: Sequence[Sequence[int]]) -> None:
        self.prompts = prompts
        self.ids = ids
        self._client = client

    @classmethod
    async def of(cls, client: AsyncClient, plan: Plan, target: model_pb2.ModelInfo) -> Self:
        """Has the service tokenise the prompts."""
        done = []
        for prompt, speech in map(request_of, plan.prompts):
            done.append(await client.complete(prompt, **(speech | Options(max_new_tokens=1, gamma=0))))
        ids = [each.started.prompt_token_ids for each in done]
        return cls(client, plan.prompts if target.HasField("encoder") else ids, ids)

    async def texts(self, stage: str, asks: Sequence[Ask], at_once: int, step: Step) -> list[Text]:
        """Return the answers, with so many requests in progress."""
        step(stage, 0, len(asks))

        async def text(ask: Ask) -> Text:
            found = await (self._resumed(ask) if ask.cuts else self._whole(ask, ask.options))
            step(stage, 1, len(asks))
            return found

        return await for_each(asks, text, at_once)

    async def _whole(self, ask: Ask, options: Options, kept: Sequence[int] = ()) -> Text:
        prompt, speech = request_of(self.prompts[ask.prompt])
        done = await self._client.complete(prompt, **(speech | options))
        statistics = done.statistics
        return Text(
            ask,
            (*kept, *done.token_ids),
            len(done.started.prompt_token_ids),
            statistics.num_draft_tokens,
            statistics.num_accepted_tokens,
            done.logprobs,
            is_resumed=bool(kept),
        )

    async def _resumed(self, ask: Ask) -> Text:
        """Drops the stream, and asks for the rest with the tokens so far, as the client does after a failure."""
        kept: list[int] = []
        prompt, speech = request_of(self.prompts[ask.prompt])
        options, begin = speech | ask.options, 0
        for cut in range(ask.cuts):
            events = self._client.generate(prompt, **options)
            async for event in events:
                match event:
                    case Started():
                        begin = len(event.prompt_token_ids)
                        options = options | Options(
                            seed=event.seed, rule=event.rule, weights_fingerprint=event.weights_fingerprint
                        )
                        if event.policy is not SpeculationPolicy.UNSPECIFIED:
                            options = options | Options(speculation=event.policy)
                        if event.tokens_per_pass:
                            options = options | Options(tokens_per_pass=event.tokens_per_pass)
                    case Chunk():
                        kept += event.token_ids[:1] if ask.name == NO_DRAFT else event.token_ids
                        options = options | Options(committed_token_ids=tuple(kept), held_tokens=event.held_tokens)
                        if len(kept) >= ask.cut:
                            break
            await events.aclose()
            if len(kept) >= ask.options["max_new_tokens"]:  # its last chunk came before the cut
                return Text(ask, tuple(kept), begin, is_resumed=cut > 0)
        return await self._whole(ask, options, kept)
