"""Settings of the verifier service, beside those that both services share."""

from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from outrider.service.settings import ServiceAddress, ServiceSettings


class VerifierSettings(ServiceSettings):
    """The verifier service: judges proposals with the target model, over gRPC."""

    model_config = SettingsConfigDict(cli_prog_name="python -m verifier_service")

    names_clients: ClassVar[bool] = True

    listen: ServiceAddress = Field(
        "127.0.0.1:50052", description="HOST:PORT or unix:PATH to listen at; port 0 takes a free one"
    )
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
    max_gamma: int = Field(16, ge=1, le=256, description="tokens of one proposal at most")
    max_waiting: int = Field(64, ge=0, description="sequences that may wait for room; more are refused")
    pass_tokens: int = Field(512, ge=1, description="tokens of one pass at most; longer prompts take several")
    max_linger: float = Field(
        20.0,
        ge=0,
        le=1000,
        description="milliseconds that a pass waits at most for sequences about to answer, and never longer than its "
        "own fixed cost; 0: none",
    )
    verify_path: Literal["auto", "torch", "triton"] = Field(
        "auto",
        description="what judges proposals; auto: the fastest on the device",
    )
    prefix_cache: bool = Field(True, description="share keys and values among prompts that begin alike")
    idle_timeout: float = Field(60.0, gt=0, description="seconds after which a silent stream is closed")
    contended_idle_timeout: float = Field(
        5.0,
        gt=0,
        description="seconds instead, where less, for a stream whose place others wait for; looked at every 5 s",
    )
    slow_client_timeout: float = Field(30.0, gt=0, description="seconds a client may leave 64 verdicts unread")
