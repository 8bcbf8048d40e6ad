"""Errors of checkpoints and loaded models."""


class CheckpointError(Exception):
    """A model cannot be loaded or run; the message is one line with the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class UnsupportedModel(CheckpointError):
    """A model has a form that Outrider does not run. The message ends with a page that names the supported ones."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; docs/reference/models.md names the models that run")


class ModelLost(Exception):
    """The model can run no more steps: a device or a tensor-parallel rank is lost. The message has the reason."""
