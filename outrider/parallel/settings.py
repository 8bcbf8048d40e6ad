"""Settings of a service whose model may run in several processes."""

from pydantic import Field

from outrider.settings import ServiceSettings


class ParallelSettings(ServiceSettings):
    """What such a service is told beside what both services share."""

    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="processes that share the model, each on a GPU of its own and with its own heads; torchrun starts "
        "them",
    )
    rank_timeout: float = Field(
        30.0,
        ge=1,
        description="seconds that one of those processes may be silent before the service ends; one that dies is "
        "noticed at once",
    )
