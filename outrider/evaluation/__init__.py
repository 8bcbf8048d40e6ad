"""Plans, measures and checks a deployment. Pictures need the extra `bench`; models run with the extra `service`."""


class EvaluationError(Exception):
    """It cannot be planned, measured or checked. The text is one line, with the remedy."""
