"""Who the server is: a certificate authority of the federation's own, and the server's certificate, signed by it.

Sites get `ca.crt` once, by a way that they trust; from then on nobody else can pose as the server. There is no other
authority in it, and the authority's key is needed again only when the server gets another name.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)  # fmt: skip
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from nestling.core.errors import ConfigError
from nestling.core.files import write_atomic
from nestling.deploy.folder import make_private, write_private

CA, CA_KEY, SERVER, SERVER_KEY = "ca.crt", "ca.key", "server.crt", "server.key"
YEARS = datetime.timedelta(days=3650)
SERVER_LIFE = datetime.timedelta(days=825)
"""Longer ones are refused by some systems."""
RENEW = datetime.timedelta(days=60)
"""A certificate with less of its life left is made anew at the server's next start."""


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Make `ca.crt`, `ca.key`, `server.crt` and `server.key` in `folder`; an authority that is there stays.

    Args:
        folder: made with mode 0700; the keys have 0600.
        hosts: names and addresses under which sites reach the server; localhost is always among them.

    Raises `ConfigError` for a name that cannot be one, or if the authority that is there has lost its key: a new one
    would be trusted by no site.
    """
    make_private(folder)
    names = [_name(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"])]
    now = datetime.datetime.now(datetime.UTC)
    if (folder / CA).is_file():
        ca = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        key = _read_key(folder / CA_KEY)
        if key is None or key.public_key() != ca.public_key():
            raise ConfigError(
                f"is missing, or is not that of {CA}",
                where=str(folder / CA_KEY),
                remedy=f"Put its copy back. Without one: remove {folder}, and give the new {CA} to every site.",
            )
    else:
        key = ec.generate_private_key(ec.SECP384R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Nestling federation")])
        ca = (
            _begun(name, name, key, now, YEARS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA384())
        )
        write_private(folder / CA_KEY, _pem(key))
        write_atomic(folder / CA, ca.public_bytes(Encoding.PEM))
    own = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0] if hosts else "localhost")])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    certificate = (
        _begun(name, ca.subject, own, now, SERVER_LIFE)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA384())
    )
    write_private(folder / SERVER_KEY, _pem(own))
    write_atomic(folder / SERVER, certificate.public_bytes(Encoding.PEM))


def names_of(folder: Path) -> list[str]:
    """The names and addresses that the server's certificate is for; empty if there is none."""
    if not (folder / SERVER).is_file():
        return []
    certificate = x509.load_pem_x509_certificate((folder / SERVER).read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(each.value) for each in found]


def is_good(folder: Path, hosts: Sequence[str]) -> bool:
    """Whether the server's certificate is there, with its key, from the authority there, for these names and addresses
    and this machine, and for some time to come."""
    names = names_of(folder)
    key = _read_key(folder / SERVER_KEY)
    if not names or key is None or not (folder / CA).is_file() or not {*hosts, "127.0.0.1"} <= set(names):
        return False
    certificate = x509.load_pem_x509_certificate((folder / SERVER).read_bytes())
    try:
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate((folder / CA).read_bytes()))
    except (ValueError, TypeError, InvalidSignature):
        return False
    lasts = certificate.not_valid_after_utc > datetime.datetime.now(datetime.UTC) + RENEW
    return lasts and bool(certificate.public_key() == key.public_key())


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey | None:
    """The key in a file of ours; None if there is none."""
    if not path.is_file():
        return None
    key = load_pem_private_key(path.read_bytes(), None)
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _begun(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    life: datetime.timedelta,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - datetime.timedelta(minutes=5)).not_valid_after(now + life)


def _usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign, key_cert_sign=sign, crl_sign=sign, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        if not host or any(c.isspace() or c in "/:@" for c in host):
            raise ValueError
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError("is no name of a host", where=repr(host), remedy="Give sites.example.org.") from error


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem
