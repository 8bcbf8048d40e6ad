"""Settings of the verifier service only."""

from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from outrider.service.settings import Listener, ServiceSettings


class VerifierSettings(ServiceSettings):
    """The verifier service: runs the target model and verifies proposals, over gRPC."""

    model_config = SettingsConfigDict(cli_prog_name="python -m verifier_service")

    names_clients: ClassVar[bool] = True

    listen: Listener = Field("127.0.0.1:50052", description="HOST:PORT or unix:PATH to listen at; port 0: a free one")
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="number of tensor-parallel ranks: processes with a GPU each that share the model; torchrun "
        "starts them",
    )
    rank_timeout: float = Field(30.0, ge=1, description="seconds that a rank may be silent before the service ends")
    max_gamma: int = Field(16, ge=1, le=256, description="maximum tokens in a proposal")
    max_waiting: int = Field(64, ge=0, description="maximum sequences in the queue; more are refused")
    max_batch_tokens: int = Field(512, ge=1, description="maximum tokens in a batch; longer prompts take several")
    max_linger: float = Field(
        20.0,
        ge=0,
        le=1000,
        description="longest time that a step waits for sequences about to send a round, in milliseconds; never longer "
        "than the fixed cost of a step; 0: no wait",
    )
    verify_path: Literal["auto", "torch", "c", "triton"] = Field(
        "auto", description="implementation of verification; auto: the fastest on the device"
    )
    idle_timeout: float = Field(60.0, gt=0, description="seconds without a message after which a stream ends")
    contended_idle_timeout: float = Field(
        5.0, gt=0, description="seconds of --idle-timeout while others wait in the queue, if that is shorter"
    )
    slow_client_timeout: float = Field(
        30.0, gt=0, description="seconds that one write waits for the client to read before its stream ends"
    )
