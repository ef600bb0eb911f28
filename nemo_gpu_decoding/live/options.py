"""Options of the live server: its address, and the limits of its clients. `serve --help` shows the comments."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields

from nemo_gpu_decoding.checks import FieldError, check_int, check_number


@dataclass
class Address:
    """The address of the server, and its access control.

    Raises:
        FieldError: a field is out of range, or a public address has no token.
    """

    # Address to listen on. An address that other machines can reach needs a token, or open_to_all=true.
    host: str = "127.0.0.1"
    # Port to listen on; 0: any free port.
    port: int = 8765
    # Required from every client, in the header "Authorization: Bearer TOKEN" or as ?token=TOKEN. null: the
    # value of the environment variable NEMO_GPU_DECODING_TOKEN; without it no token is required.
    token: str | None = None
    # Allow an address that other machines can reach without a token.
    open_to_all: bool = False
    # Seconds at shutdown to finish open utterances.
    shutdown_seconds: float = 10.0

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        check_number("shutdown_seconds", self.shutdown_seconds)
        if self.token is not None and not self.token.strip():
            raise FieldError("token", self.token, "a text that is not blank")
        if not (self.token or self.open_to_all or self._is_loopback):
            raise FieldError("host", self.host, "127.0.0.1 or ::1, or a token, or open_to_all=true")

    @property
    def _is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass
class Limits:
    """Limits of the options and the timing of clients.

    Raises:
        ValueError: a limit is out of range.
    """

    # Maximum number of open streams.
    max_streams: int = 64
    # Maximum size of a message, in bytes.
    max_message_bytes: int = 1_000_000
    # Maximum number of phrases and aliases per stream. Together they may have 50 times as many characters.
    max_phrases: int = 1000
    # Maximum boosting_weight of a stream, natural log.
    max_boosting_weight: float = 100.0
    # Maximum size of a request with a recording, in bytes.
    max_upload_bytes: int = 25_000_000
    # Maximum length of a recording, in seconds.
    max_upload_seconds: float = 7200.0
    # Seconds without a message after which the server ends a stream.
    idle_seconds: float = 30.0
    # Maximum length of an utterance, in seconds; a longer one is cut.
    utterance_seconds: float = 60.0
    # Seconds of undecoded audio per client; beyond that the server stops reading from the client until it catches up.
    pending_seconds: float = 2.0
    # Seconds within which a client must receive a message; a slower client is disconnected.
    send_seconds: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(Limits):
            value = getattr(self, field.name)
            if isinstance(field.default, int):
                check_int(field.name, value, 1, 1 << 31)
            else:
                check_number(field.name, value, above_zero=True)
