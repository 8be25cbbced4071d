"""Addresses of pictures, videos and streams: their logins, which are never shown, downloads, and what has an end.

A login (``http://user:password@host``) goes to the host that it was typed for and to no other.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

from utils.data.frames import HEAD_BYTES
from utils.log import LOGGER

ADDRESS_SIGNS = "%/:=&?~#+!$,;'@()*[]"  # have a meaning in addresses
DOWNLOAD_TIMEOUT_S = 30
QUESTION_TIMEOUT_S = 3  # a camera that serves one reader at a time answers a second one never
# A list of addresses (HLS, DASH, playlists, SDP) has a length of its own, whatever the stream behind it has.
_LIST_HEADS = (b"#EXTM3U", b"<", b"[playlist]", b"v=0")
# In front of the last @ before the path; or behind a colon where no port stands, for signs that should be written %2F.
_LOGIN = re.compile(r"(?<=://)(?:[^/?#]*@|[^/?#:@\[]+:(?!\d*(?:[/?#]|$))[^@]*@)")
_SECRET_WORDS = (
    r"pass(?:word|wd)?|pwd|psw|(?:access_?|auth_?)?token|(?:api_?)?key|auth|secret|sig(?:nature)?|x-amz-signature"
)
_SECRET = re.compile(rf"(?i)(?<![a-z])((?:{_SECRET_WORDS})=)(?:(?!_\w+=)[^&#;\s])+")

Challenge = tuple[str, dict[str, str]]  # how a login is to be proved: kind and parameters


def without_password(address: str) -> str:
    """Return an address as it may be shown: login and secret parameters (``?pwd=``, ``&token=``) replaced by ``***``.

    Text that is no address is returned as it is.
    """
    if "://" not in address:
        return address
    return _SECRET.sub(r"\1***", _LOGIN.sub("***@", address))


@dataclass(frozen=True)
class Login:
    """User and password for one host."""

    origin: str
    user: str
    password: str

    @property
    def basic(self) -> str:
        """Value of the header ``Authorization``."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()

    @property
    def upgraded(self) -> str:
        """The host by https where it was typed with http, else as typed."""
        return re.sub("^http(://.*):80$", r"https\1:443", self.origin)

    def is_for(self, address: str) -> bool:
        """Return whether an address is of the host, by the same protocol and port or by https instead of http."""
        return _origin(address) in (self.origin, self.upgraded)


def split_login(address: str) -> tuple[str, Login | None]:
    """Take user and password out of an address and decode them.

    Raises:
        ValueError: what stands behind the host is no port; the message does not repeat it, as it may be a password.
    """
    parts = urllib.parse.urlsplit(address)
    try:
        origin = _origin(address)
    except ValueError as error:
        raise ValueError(
            "behind the host should stand the number of a port; write signs of a password that have a meaning in "
            "addresses as %2F (/), %3F (?), %23 (#) and %40 (@)"
        ) from error
    if parts.username is None:
        return address, None
    plain = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    user, password = urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or "")
    return plain, Login(origin, user, password)


def _origin(address: str) -> str:
    """Return protocol, host and port in one spelling; ValueError where the port is no number."""
    parts = urllib.parse.urlsplit(address)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host}:{port}"


class _LoginAnswers(urllib.request.HTTPDigestAuthHandler):
    """Sends a login where its host asks for one (401), and once: cameras lock an address after a few wrong passwords.

    Digest comes before basic, in which the password is readable, in whatever order the server offers them. Unlike
    Python's own handler this one reads all challenges, and repeats an answer only if it was right and came too late.
    """

    def __init__(self, login: Login) -> None:
        passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
        # Python shows the bytes of headers as Latin-1. Hashed are a realm as it came, user and password in UTF-8.
        user, password = (text.encode().decode("latin-1") for text in (login.user, login.password))
        passwords.add_password(None, (login.origin, login.upgraded), user, password)
        super().__init__(passwords)
        self.login = login
        self._is_renewed = False  # a server that calls each answer late is not asked for ever

    def http_error_401(
        self, req: urllib.request.Request, fp: http.client.HTTPResponse, code: int, msg: str, headers: Message
    ) -> http.client.HTTPResponse | None:
        """Return what the server gives for the login; None where it is not wanted, not for this host, or refused."""
        challenges = list(_challenges(headers))
        sent = req.get_header("Authorization")
        if sent is not None:
            is_late = any(kind == "digest" and of.get("stale", "").lower() == "true" for kind, of in challenges)
            if self._is_renewed or not is_late or not sent.startswith("Digest "):
                return None
            self._is_renewed = True
        answer = self._answer(req, challenges) if self.login.is_for(req.full_url) else None
        if answer is None:
            return None
        fp.close()  # a camera may serve one reader at a time
        req.add_unredirected_header("Authorization", answer)
        return self.parent.open(req, timeout=req.timeout)

    def _answer(self, request: urllib.request.Request, challenges: Sequence[Challenge]) -> str | None:
        """Return the header of the safest kind that is offered and known."""
        for kind, parameters in challenges:
            if kind != "digest" or "auth" not in parameters.get("qop", "auth").split(","):
                continue
            if digest := self.get_authorization(request, parameters | ({"qop": "auth"} if "qop" in parameters else {})):
                return f"Digest {digest}"
        return self.login.basic if any(kind == "basic" for kind, _ in challenges) else None

    def get_algorithm_impls(self, algorithm: str) -> tuple[Callable[[str], str], Callable[[str, str], str]]:
        """Return the hash and the keyed hash of a digest; None twice for an unknown one."""
        kind = {"MD5": hashlib.md5, "SHA": hashlib.sha1, "SHA-256": hashlib.sha256}.get(algorithm.upper())
        if kind is None:
            return None, None

        def hashed(text: str) -> str:
            return kind(text.encode("latin-1")).hexdigest()

        return hashed, lambda secret, data: hashed(f"{secret}:{data}")


def _challenges(headers: Message) -> Iterator[Challenge]:
    """Yield what a server takes as proof of a login, kinds in small letters; a header may hold several (RFC 9110)."""
    found: list[Challenge] = []
    for header in headers.get_all("WWW-Authenticate") or ():
        for part in urllib.request.parse_http_list(header):
            begin = re.fullmatch(r"([^\s=]+)(?:\s+(?![\s=])(.*))?", part)
            if begin:
                found.append((begin[1].lower(), {}))
            name, _, value = (begin[2] or "" if begin else part).partition("=")
            if found and name.strip():
                value = value.strip()
                is_quoted = len(value) > 1 and value[0] == value[-1] == '"'
                found[-1][1][name.strip().lower()] = value[1:-1] if is_quoted else value
    for kind, parameters in found:
        if "qop" in parameters:
            parameters["qop"] = parameters["qop"].replace(" ", "").lower()
        yield kind, parameters


class _PlainRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirections without a login of their own; that of the first host is sent where that host asks again."""

    def redirect_request(self, *arguments: object) -> urllib.request.Request | None:
        *answer, address = arguments
        return super().redirect_request(*answer, split_login(str(address))[0])


def open_address(address: str, timeout_s: float, **headers: str) -> http.client.HTTPResponse:
    """Ask for what is behind an address; where its host asks for a login, send the one of the address, once.

    Raises:
        OSError, ValueError, http.client.HTTPException: as ``urlopen``; ``HTTPError`` 401 where the login is wrong.
    """
    plain, login = split_login(address)
    quoted = urllib.parse.quote(plain, safe=ADDRESS_SIGNS)  # blanks and letters of any script, as a person types them
    request = urllib.request.Request(quoted, headers=headers)
    handlers = [] if login is None else [_PlainRedirects(), _LoginAnswers(login)]
    return urllib.request.build_opener(*handlers).open(request, timeout=timeout_s)


def download(address: str, target: Path) -> None:
    """Write what is behind an address into a file.

    Raises:
        ConnectionError: it cannot be had, or not in full.
    """
    shown = without_password(address)
    LOGGER.info(f"downloading {shown}")
    try:
        with open_address(address, DOWNLOAD_TIMEOUT_S) as answer, open(target, "wb") as handle:
            shutil.copyfileobj(answer, handle)
            missing = int(answer.headers.get("Content-Length") or 0) - handle.tell()
        if missing > 0:
            raise ConnectionError(f"the connection broke {missing} bytes before the end")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConnectionError(f"{shown} cannot be downloaded: {without_password(str(error))}") from error


def has_known_length(address: str) -> bool:
    """Return whether a server says how long the thing behind an address is, as it does for files and not for cameras.

    A server that does not answer within a few seconds, or refuses, says nothing.
    """
    if not address.lower().startswith(("http://", "https://")):
        return False
    try:
        with open_address(address, QUESTION_TIMEOUT_S, Range=f"bytes=0-{HEAD_BYTES - 1}") as answer:
            total = answer.headers.get("Content-Range", "").rpartition("/")[2]
            length = total if answer.status == http.client.PARTIAL_CONTENT else answer.headers.get("Content-Length")
            is_multipart = answer.headers.get_content_maintype() == "multipart"  # pictures of a camera
            if is_multipart or not (length or "").strip().isdecimal():
                return False
            return not answer.read(HEAD_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(_LIST_HEADS)
    except (OSError, ValueError, http.client.HTTPException):
        return False
