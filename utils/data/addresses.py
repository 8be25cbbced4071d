"""Addresses of pictures, videos and streams: their logins, which are never shown, downloads, and what has an end.

A login (``http://user:password@host``) goes to the host that it was typed for and to no other.
"""

from __future__ import annotations

import base64
import http.client
import re
import shutil
import urllib.parse
import urllib.request
from dataclasses import dataclass
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

    def is_for(self, address: str) -> bool:
        """Return whether an address is of the host, by the same protocol and port or by https instead of http."""
        upgraded = re.sub("^http(://.*):80$", r"https\1:443", self.origin)
        return _origin(address) in (self.origin, upgraded)


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


class _OwnHostOnly(urllib.request.HTTPRedirectHandler):
    """Follows redirections and takes the login along where they stay on its host."""

    def __init__(self, login: Login) -> None:
        self.login = login

    def redirect_request(self, *arguments: object) -> urllib.request.Request | None:
        *answer, address = arguments
        request = super().redirect_request(*answer, split_login(str(address))[0])
        if request is not None and self.login.is_for(request.full_url):
            request.add_unredirected_header("Authorization", self.login.basic)
        return request


def open_address(address: str, timeout_s: float, **headers: str) -> http.client.HTTPResponse:
    """Ask for what is behind an address, with its login by the basic scheme and, where that is wanted, by digest.

    Raises:
        OSError, ValueError, http.client.HTTPException: as ``urlopen``.
    """
    plain, login = split_login(address)
    quoted = urllib.parse.quote(plain, safe=ADDRESS_SIGNS)  # blanks and letters of any script, as a person types them
    request = urllib.request.Request(quoted, headers=headers)
    opener = urllib.request.build_opener()
    if login is not None:
        request.add_unredirected_header("Authorization", login.basic)
        passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
        passwords.add_password(None, login.origin, login.user, login.password)
        digest = urllib.request.HTTPDigestAuthHandler(passwords)
        opener = urllib.request.build_opener(_OwnHostOnly(login), digest)
    return opener.open(request, timeout=timeout_s)


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
