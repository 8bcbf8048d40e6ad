"""The installed version, the event loop, names of models for users, and environment variables that look like settings
and are none.
"""

import asyncio
import os
import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version

ENV_PREFIX = "OUTRIDER_"

# A client's installation lacks the services, and neither service knows the other's settings. A test compares.
_SETTINGS_OF_SERVICES = """
    allow_client_san attention auth_token_file client_burst client_rate contended_idle_timeout device
    draft_temperature draft_timeout drafter dtype failover_timeout gamma grace graph_memory_mb graph_seconds graphs
    health_listen idle_timeout keep_mass kv_cache_mb kv_memory_fraction listen liveness_timeout log_level
    lookup_min_match max_batch_tokens max_client_sequences max_concurrent_streams max_connection_age max_entropy
    max_gamma max_linger max_message_bytes max_prompt_tokens max_samples max_sequence_tokens max_sequences
    max_stop_string_chars max_stop_strings max_support max_waiting metrics_listen model ngram_corpus
    ngram_documents ngram_entries ngram_learn ngram_order otlp_endpoint outcome_cache plaintext prefill_tokens
    prefix_cache rank_timeout request_timeout revision runtime skip_layers slow_client_timeout speculation staged_by
    staged_guesses tensor_parallel_size threads tls_cert tls_client_ca tls_key tokens_per_pass trace_sample
    trust_remote_code verifier verifier_resolve_interval verifier_timeout verifier_tls_ca verifier_tls_cert
    verifier_tls_key verifier_tls_name verifier_token_file verify_path vllm_grpc vllm_metrics
"""
SERVICE_SETTINGS = frozenset(_SETTINGS_OF_SERVICES.split())
"""The settings of both services."""
COMMANDS = (
    "alpha",
    "bench",
    "chat",
    "check",
    "convert",
    "demo",
    "gateway",
    "generate",
    "info",
    "plan",
    "serve",
    "trace",
    "transcribe",
)
"""The commands of `outrider`, whose variables begin with OUTRIDER_COMMAND_."""

# Kubernetes adds variables of this form for each service of a namespace: OUTRIDER_DRAFT_SERVICE_HOST.
_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP|SCTP)|$)")
# A misspelt name is this near to the right one; "VERSION" is near to none.
_CUTOFF = 0.75


def installed_version() -> str:
    """The version of Outrider; "unknown" in a source tree that is not installed."""
    try:
        return version("outrider")
    except PackageNotFoundError:
        return "unknown"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """That of uvloop; None, asyncio's own, where it is not installed."""
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    return uvloop.new_event_loop


def served_name(name: str) -> str:
    """The name of a model for users: a hub id as it is; of a folder the last part, as a path says where files lie."""
    is_folder = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    return name.rstrip("/").rpartition("/")[2] if is_folder else name


def unknown_variables(names: Mapping[str, str] | None = None, ignored: Collection[str] = ()) -> dict[str, str]:
    """The variables OUTRIDER_… that no setting has, each with the nearest known variable, or "" if none is near.

    Args:
        names: known variables on top of the services'; the keys are names without OUTRIDER_, also abbreviated ones.
        ignored: beginnings of variables that are not checked.
    """
    known = dict(names or {}) | {name.upper(): ENV_PREFIX + name.upper() for name in SERVICE_SETTINGS}
    found = {}
    for variable in sorted(os.environ):
        if not variable.startswith(ENV_PREFIX) or variable.startswith(tuple(ignored)):
            continue
        if variable not in known.values() and not _OF_KUBERNETES.search(variable):
            near = get_close_matches(variable.removeprefix(ENV_PREFIX), known, n=1, cutoff=_CUTOFF)
            found[variable] = known[near[0]] if near else ""
    return found
