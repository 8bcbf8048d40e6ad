"""How the draft service speaks to verifiers: by TLS, or in plaintext where that was asked for or leaves no machine."""

from draft_service.settings import DraftSettings
from outrider.rpc.tls import TLS, ChannelTLS
from outrider.security import check_plaintext, made, pair
from outrider.settings import SettingsError


def verifier_tls(settings: DraftSettings) -> ChannelTLS | None:
    """How to speak to verifiers; None is plaintext.

    Raises:
        SettingsError: the settings contradict each other, a file is not what it should be, or plaintext would leave
            this machine without having been asked for.
    """
    cert, key = settings.verifier_tls_cert, settings.verifier_tls_key
    pair("--verifier-tls-cert", cert, "--verifier-tls-key", key)
    ca, name = settings.verifier_tls_ca, settings.verifier_tls_name
    if ca is None:
        for flag, given in (("--verifier-tls-cert", cert), ("--verifier-tls-name", name)):
            if given is not None:
                raise SettingsError(f"{flag} needs --verifier-tls-ca")
        for address in settings.verifier:
            check_plaintext("--verifier", address, settings.plaintext, "give --verifier-tls-ca")
        return None
    return made("--verifier-tls-ca, -cert or -key", lambda: ChannelTLS(TLS(ca, cert, key, name)))
