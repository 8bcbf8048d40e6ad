"""Sampling parameters of a request: checked and converted for `kernels`.

Both services use it, so both accept the same values. Each check raises a `RequestError`, INVALID_ARGUMENT, that names
the field and the numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams
from kernels.sigmoid import SigmoidScales
from kernels.verify import Rule
from outrider.rpc.errors import above_limit, invalid_field
from protos.outrider.v1 import model_pb2, sampling_pb2

LOSSY_RULES = frozenset({Rule.SIGMOID})
"""The rules that do not keep the target's distribution."""

DEFAULT_RULE = Rule.BLOCK
"""The acceptance rule unless the request names or implies another one. It accepts more tokens a round than `tokenwise`
on the demo pair (`benchmarks/results/rules.json`); at temperature 0 all exact rules give the same result."""

# In these ranges no operation overflows float32 for logits up to 10^4: after penalties they are below 10^9, divided by
# the least temperature below 10^15, and by the least width of a sigmoid below 10^18.
TEMPERATURES = (1e-6, 100.0)
"""Bounds of a temperature that is not 0."""
_REPETITION_PENALTIES = (0.01, 100.0)
_LENIENCES = (1e-6, 1.0)
_MAX_SIGMOID_SCALE, _MIN_SIGMOID_WIDTH = 1e6, 1e-3

MAX_TOKEN_LIST = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20

RULES = {
    sampling_pb2.ACCEPTANCE_RULE_TOKENWISE: Rule.TOKENWISE,
    sampling_pb2.ACCEPTANCE_RULE_BLOCK: Rule.BLOCK,
    sampling_pb2.ACCEPTANCE_RULE_COUPLED: Rule.COUPLED,
    sampling_pb2.ACCEPTANCE_RULE_SIGMOID: Rule.SIGMOID,
}
"""The rules that both services offer, by their numbers in messages."""
RULE_TO_WIRE = {rule: number for number, rule in RULES.items()}


@dataclass(frozen=True, slots=True)
class Sampling:
    """One request's sampling, checked.

    Attributes:
        params: temperature, top-k, top-p and min-p.
        logit_rules: penalties, bias and bans, which are applied before. The caller adds stop ids.
        lenience: l of [L A.5]; 1 is exact.
        seed: key of the random draws; None if the service chooses it.
        sigmoid: the scales of the rule `sigmoid`; None under any other.
    """

    params: SamplingParams
    logit_rules: LogitRules
    rule: Rule
    lenience: float
    seed: int | None
    sigmoid: SigmoidScales | None = None

    @property
    def needs_logits(self) -> bool:
        """Whether the rule needs the draft's logits over the whole vocabulary."""
        return self.rule is Rule.SIGMOID and not self.params.is_greedy

    @property
    def is_lossy(self) -> bool:
        """Whether the text may differ from the target's distribution. At temperature 0 every rule takes the argmax."""
        return self.lenience < 1 or (self.rule in LOSSY_RULES and not self.params.is_greedy)


def check_sampling(
    params: sampling_pb2.SamplingParams, *, vocab_size: int, rules: Iterable[Rule], default_rule: Rule
) -> Sampling:
    """Checks every field against the ranges that the contract states."""
    temperature = check_temperature("sampling.temperature", params.temperature if params.HasField("temperature") else 1)
    top_p = _within("sampling.top_p", params.top_p if params.HasField("top_p") else 1.0, 0.0, 1.0, open_below=True)
    min_p = _within("sampling.min_p", params.min_p, 0.0, 1.0)
    if params.top_k >= 2**31:
        raise invalid_field(
            "sampling.top_k",
            f"sampling.top_k is {params.top_k}; it must be below 2^31, or 0 to keep all tokens",
            given=params.top_k,
        )
    repetition = params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
    rule = _check_rule(params, tuple(rules), default_rule)
    return Sampling(
        params=SamplingParams(temperature=temperature, top_k=params.top_k, top_p=top_p, min_p=min_p),
        logit_rules=LogitRules(
            repetition_penalty=_within("sampling.repetition_penalty", repetition, *_REPETITION_PENALTIES),
            presence_penalty=_within("sampling.presence_penalty", params.presence_penalty, -100.0, 100.0),
            frequency_penalty=_within("sampling.frequency_penalty", params.frequency_penalty, -100.0, 100.0),
            logit_bias=_check_bias(params, vocab_size),
            banned_tokens=_check_banned(params, vocab_size),
        ),
        rule=rule,
        lenience=_check_lenience(params, rule),
        sigmoid=_check_sigmoid(params.sigmoid) if rule is Rule.SIGMOID else None,
        seed=params.seed if params.HasField("seed") else None,
    )


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int, longest: int | None = None) -> list[int]:
    """The ids as a list, each below `vocab_size`. `longest` is the most tokens of a sequence, if they are one."""
    if longest is not None and len(ids) > longest:  # before all are read: there may be millions
        raise above_limit(field, len(ids), longest, " (--max-sequence-tokens)", noun="token")
    checked = list(ids)
    if checked and (max(checked) >= vocab_size or min(checked) < 0):
        at = next(i for i, token in enumerate(checked) if not 0 <= token < vocab_size)
        raise invalid_field(
            field,
            f"{field}[{at}] is {checked[at]}; token ids must be below {vocab_size}, the size of the vocabulary",
            given=checked[at],
            vocab_size=vocab_size,
        )
    return checked


def check_logprobs(params: sampling_pb2.LogprobsParams, field: str = "logprobs") -> int:
    """The number of most probable tokens to report. `field` is the name of `params` in its message."""
    if params.top_n > MAX_TOP_LOGPROBS:
        raise above_limit(f"{field}.top_n", params.top_n, MAX_TOP_LOGPROBS)
    return params.top_n


def check_prompt_logprobs(params: sampling_pb2.LogprobsParams, target: model_pb2.ModelInfo) -> int:
    """The number of most probable tokens to report at each position of the prompt."""
    if target.HasField("encoder"):
        raise invalid_field(
            "prompt_logprobs", "prompt_logprobs is set; a model with an encoder does not score its prompt: unset it"
        )
    return check_logprobs(params, "prompt_logprobs")


def check_temperature(field: str, value: float) -> float:
    """Checks a temperature: 0, or within `TEMPERATURES`."""
    return 0.0 if value == 0 else _within(field, value, *TEMPERATURES, must="be 0 or lie")


def _within(field: str, value: float, low: float, high: float, *, open_below: bool = False, must: str = "lie") -> float:
    if not _float32(low) <= value <= high or (open_below and value <= low):  # also refuses NaN
        interval = f"{'(' if open_below else '['}{low:g}, {high:g}]"
        raise invalid_field(field, f"{field} is {value:g}; it must {must} in {interval}", given=value, range=interval)
    return value


def _float32(bound: float) -> float:
    """A bound rounded to float32, as a message carries it: it may become smaller."""
    return float(np.float32(bound))


def _check_rule(params: sampling_pb2.SamplingParams, rules: tuple[Rule, ...], default: Rule) -> Rule:
    rule: Rule | None
    if params.rule == sampling_pb2.ACCEPTANCE_RULE_UNSPECIFIED:
        rule = Rule.TOKENWISE if params.HasField("lenience") and params.lenience < 1 else default
    else:
        rule = RULES.get(params.rule)
    if rule is None or rule not in rules:
        given = params.rule if rule is None else rule.value
        offered = ", ".join(sorted(known.value for known in rules))
        raise invalid_field(
            "sampling.rule", f"sampling.rule is {given}; this service offers {offered}", given=given, offered=offered
        )
    if params.HasField("sigmoid") and rule is not Rule.SIGMOID:
        raise invalid_field(
            "sampling.sigmoid",
            f"sampling.sigmoid is set and sampling.rule is {rule.value}; unset it, or name the rule sigmoid",
        )
    if rule is Rule.SIGMOID and not params.HasField("sigmoid"):
        raise invalid_field(
            "sampling.sigmoid", "sampling.sigmoid is not set; give its scales alpha and beta, or another rule"
        )
    return rule


def _check_sigmoid(scales: sampling_pb2.SigmoidScales) -> SigmoidScales:
    for name, value in (("alpha", scales.alpha), ("beta", scales.beta)):
        _within(f"sampling.sigmoid.{name}", value, -_MAX_SIGMOID_SCALE, _MAX_SIGMOID_SCALE)
    if not scales.beta - scales.alpha >= _float32(_MIN_SIGMOID_WIDTH):
        raise invalid_field(
            "sampling.sigmoid.alpha",
            f"sampling.sigmoid.alpha is {scales.alpha:g} and sampling.sigmoid.beta is {scales.beta:g}; alpha must be "
            f"below beta by at least {_MIN_SIGMOID_WIDTH:g}",
            alpha=scales.alpha,
            beta=scales.beta,
            minimum=_MIN_SIGMOID_WIDTH,
        )
    return SigmoidScales(scales.alpha, scales.beta)


def _check_lenience(params: sampling_pb2.SamplingParams, rule: Rule) -> float:
    lenience = _within("sampling.lenience", params.lenience if params.HasField("lenience") else 1.0, *_LENIENCES)
    if lenience < 1.0 and rule in (Rule.BLOCK, Rule.COUPLED):
        raise invalid_field(
            "sampling.lenience",
            f"sampling.lenience is {lenience:g}; it must be 1 under the rule {rule.value}: set it to 1, or name "
            "the rule tokenwise",
            given=lenience,
        )
    return lenience


def _check_bias(params: sampling_pb2.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    _check_count("sampling.logit_bias", len(params.logit_bias))
    ids = check_token_ids("sampling.logit_bias", [entry.token_id for entry in params.logit_bias], vocab_size)
    if len(set(ids)) < len(ids):
        twice = next(token for token in ids if ids.count(token) > 1)
        raise invalid_field(
            "sampling.logit_bias", f"sampling.logit_bias has the token {twice} twice; give each token once", given=twice
        )
    return tuple(
        (entry.token_id, _within("sampling.logit_bias", entry.bias, -100.0, 100.0)) for entry in params.logit_bias
    )


def _check_banned(params: sampling_pb2.SamplingParams, vocab_size: int) -> tuple[int, ...]:
    _check_count("sampling.banned_token_ids", len(params.banned_token_ids))
    banned = tuple(sorted(set(check_token_ids("sampling.banned_token_ids", params.banned_token_ids, vocab_size))))
    if len(banned) >= vocab_size:
        raise invalid_field(
            "sampling.banned_token_ids",
            f"sampling.banned_token_ids has all {vocab_size} tokens of the vocabulary; leave at least 1 out",
        )
    return banned


def _check_count(field: str, count: int) -> None:
    if count > MAX_TOKEN_LIST:
        raise above_limit(field, count, MAX_TOKEN_LIST, noun="element")
