"""Plans, measures and checks a deployment. Pictures need the extra `bench`; models run with the extra `service`."""

ALPHA_DRAFTERS = ("model", "parallel", "unigram", "bigram", "ngram", "lookup", "random")
"""Drafters whose α can be measured without a service."""

DRAFT_MODELS = frozenset({"model", "parallel"})
"""Of them, those that run the draft model."""


class EvaluationError(Exception):
    """It cannot be planned, measured or checked. The text is one line, with the remedy."""
