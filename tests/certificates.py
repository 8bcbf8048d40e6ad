"""Certificate authorities for tests, and certificates that they sign, as PEM files in a folder."""

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    cert: Path
    key: Path


class Authority:
    """A CA with a folder for its certificates; `pem` is the file of its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        signed = (
            _builder(self._name, self._name, self._key, -DAY, DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = folder / f"{name}.crt"
        write(self.pem, signed.public_bytes(Encoding.PEM))

    def issue(self, *names: str, file: str = "", expired: bool = False, passphrase: bytes = b"") -> Certificate:
        """Issue a certificate of these names: URIs with `://`, addresses, `cn:` for the subject, DNS names otherwise.

        `FILE.crt` and `FILE.key` are replaced atomically, as Kubernetes does it.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = [x509.NameAttribute(x509.NameOID.COMMON_NAME, name[3:]) for name in names if name.startswith("cn:")]
        builder = _builder(x509.Name(subject), self._name, key, -3 * DAY, timedelta(hours=-1) if expired else DAY)
        if sans := [_san(name) for name in names if not name.startswith("cn:")]:
            builder = builder.add_extension(x509.SubjectAlternativeName(sans), critical=not subject)
        signed = builder.sign(self._key, hashes.SHA256())
        stem = file or f"{len(list(self._folder.iterdir()))}"
        issued = Certificate(self._folder / f"{stem}.crt", self._folder / f"{stem}.key")
        encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
        write(issued.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
        write(issued.cert, signed.public_bytes(Encoding.PEM))
        return issued


def write(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    os.replace(new, path)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, since: timedelta, until: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + since)
        .not_valid_after(now + until)
    )


def _san(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
