"""What can go wrong with a checkpoint, a tokenizer, a loaded model or the KV pool. Knows nothing of who reports it."""


class CheckpointError(Exception):
    """A model that cannot be loaded or run; the text is one line that says why."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class PoolExhausted(Exception):
    """A KV pool has fewer free blocks than are needed."""


class ModelLost(Exception):
    """No pass will ever run again: a process that held a part of the model is gone. The text says which, and how."""


class PoolCorrupted(RuntimeError):
    """The books of a KV pool contradict each other: a bug, not an overload."""
