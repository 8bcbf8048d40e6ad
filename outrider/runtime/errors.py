"""What can go wrong with a checkpoint or a loaded model."""


class CheckpointError(Exception):
    """A model that cannot be loaded or run; the text is one line that says why."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ModelLost(Exception):
    """No pass will ever run again: a process that held a part of the model is gone. The text says which, and how."""
