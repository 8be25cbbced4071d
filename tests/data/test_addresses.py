"""Addresses: logins reach their host, no other one and no line; what a server says about lengths."""

from __future__ import annotations

import base64
import hashlib
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deploy.fakes import write_picture
from utils.data.addresses import download, has_known_length, split_login, without_password
from utils.data.sources import LoadImages, resolve_source

QUERY = "/gone.jpg?user=u&password=secret&n=1"
Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


class Site:
    """A server on the loopback address whose pages are functions; notes (path, Authorization) of each request."""

    def __init__(self, pages: dict[str, Answer]) -> None:
        self.asked: list[tuple[str, str | None]] = []
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802 - http.server's name
                site.asked.append((self.path, self.headers.get("Authorization")))
                pages[self.path](self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.host = f"127.0.0.1:{self.server.server_port}"


@pytest.fixture
def make_site() -> Iterator[Callable[[dict[str, Answer]], Site]]:
    sites: list[Site] = []

    def make(pages: dict[str, Answer]) -> Site:
        sites.append(Site(pages))
        return sites[-1]

    yield make
    for site in sites:
        site.server.shutdown()
        site.server.server_close()


def gives(data: bytes, status: int = 200, **headers: str) -> Answer:
    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(data)

    return answer


def leads_to(address: str) -> Answer:
    return gives(b"", 302, Location=address)


def basic(login: str) -> str:
    return "Basic " + base64.b64encode(login.encode()).decode()


BASIC, DIGEST = 'Basic realm="cam"', 'Digest realm="cam", nonce="7", qop="auth", algorithm=MD5'


def asks(*offered: str) -> Answer:
    """Ask for a login, in as many header lines as texts are given."""

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(401)
        for text in offered:
            request.send_header("WWW-Authenticate", text)
        request.end_headers()

    return answer


def wants_basic(login: str, page: Answer) -> Answer:
    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        (page if request.headers.get("Authorization") == basic(login) else asks(BASIC))(request)

    return answer


def wants_digest(user: str, password: str, hashed: Callable, offered: list[str]) -> Answer:
    """Give a picture for the right answer (RFC 7616, 3.4.1), computed here from the bytes that were sent."""

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        sent = (request.headers.get("Authorization") or "").encode("latin-1")
        got = {name: quoted or bare for name, quoted, bare in re.findall(rb'(\w+)=(?:"([^"]*)"|([^,]+))', sent)}

        def h(*parts: bytes) -> bytes:
            return hashed(b":".join(parts)).hexdigest().encode()

        secret, what = h(user.encode(), got.get(b"realm", b""), password.encode()), h(b"GET", request.path.encode())
        middle = [got[b"nc"], got[b"cnonce"], got[b"qop"]] if b"qop" in got else []
        is_right = got.get(b"response") == h(secret, b"7", *middle, what) and got[b"username"] == user.encode()
        (gives(b"picture") if is_right else asks(*offered))(request)

    return answer


# --- logins ---


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("u:p", "u:p"),
        ("u:p@ss", "u:p@ss"),
        ("u%40home:p%2Fa%23%25", "u@home:p/a#%"),
        ("u:", "u:"),
        ("u", "u:"),
        ("ü:é:x", "ü:é:x"),
    ],
)
def test_a_login_is_decoded_and_sent_to_its_host(
    tmp_path: Path, make_site: Callable[..., Site], messages: list[str], typed: str, meant: str
) -> None:
    site = make_site({"/a.jpg?n=1": wants_basic(meant, gives(write_picture(tmp_path / "a.jpg").read_bytes()))})
    source = resolve_source(f"http://{typed}@{site.host}/a.jpg?n=1")
    (file,) = source.files
    assert site.asked == [("/a.jpg?n=1", None), ("/a.jpg?n=1", basic(meant))]
    assert file.title == f"http://***@{site.host}/a.jpg?n=1" and file.relative == Path("a.jpg")
    assert messages == [f"downloading http://***@{site.host}/a.jpg?n=1"]
    source.close()


def test_a_login_follows_redirections_on_its_host_only(tmp_path: Path, make_site: Callable[..., Site]) -> None:
    other = make_site({"/c.jpg": asks(BASIC), "/d.jpg": gives(b"picture")})
    away = {path: wants_basic("u:secret", leads_to(f"http://{other.host}{path}")) for path in ("/c.jpg", "/d.jpg")}
    first = make_site({"/a.jpg": wants_basic("u:secret", leads_to("/d.jpg"))} | away)
    download(f"http://u:secret@{first.host}/a.jpg", tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == b"picture"
    sent = [None, basic("u:secret")]
    assert first.asked == [(path, login) for path in ("/a.jpg", "/d.jpg") for login in sent]
    with pytest.raises(ConnectionError, match="401"):
        download(f"http://u:secret@{first.host}/c.jpg", tmp_path / "got")
    assert other.asked == [("/d.jpg", None), ("/c.jpg", None)]


DIGEST_FORMS = [
    [DIGEST],
    [BASIC, DIGEST],
    [DIGEST, BASIC],
    [f"{BASIC}, {DIGEST}"],
    ["Negotiate", f"Bearer, {DIGEST}"],
    ['Digest realm="cam", nonce="7"'],
    ['DIGEST Realm="cam", Nonce="7", QOP="auth-int, auth", algorithm=md5'],
    ['Digest realm="cam", nonce="7", algorithm=SHA-512-256', 'Digest realm="cam", nonce="7", algorithm=SHA-256'],
    ['Digest realm="Türe, 1 = a b", nonce="7", qop="auth"'],
]


@pytest.mark.parametrize("offered", DIGEST_FORMS)
@pytest.mark.parametrize("is_right", [True, False])
def test_a_host_that_takes_a_digest_gets_one_and_no_password(
    tmp_path: Path, make_site: Callable[..., Site], offered: list[str], is_right: bool
) -> None:
    hashed = hashlib.sha256 if "SHA-256" in str(offered) else hashlib.md5
    site = make_site({"/a.jpg?n=1": wants_digest("ü", "sécret" if is_right else "other", hashed, offered)})
    address = f"http://ü:sécret@{site.host}/a.jpg?n=1"
    if is_right:
        download(address, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == b"picture"
    else:
        with pytest.raises(ConnectionError, match="401"):
            download(address, tmp_path / "got")
    (_, first), (_, second) = site.asked
    assert first is None and second.startswith("Digest "), "asked once, answered once"


@pytest.mark.parametrize(
    "offered",
    [[BASIC], ["Negotiate", BASIC], ['Digest realm="cam", nonce="7", algorithm=other', BASIC], ["Digest x", BASIC]],
)
def test_a_wrong_password_is_sent_once(tmp_path: Path, make_site: Callable[..., Site], offered: list[str]) -> None:
    site = make_site({"/a.jpg": asks(*offered)})
    with pytest.raises(ConnectionError, match="401"):
        download(f"http://u:wrong@{site.host}/a.jpg", tmp_path / "got")
    assert [login for _, login in site.asked] == [None, basic("u:wrong")]


@pytest.mark.parametrize(
    "offered", [[], ["Negotiate"], ["Digest"], ['Digest realm="cam", nonce="7", qop="auth-int"'], ["=,=", ""]]
)
def test_what_cannot_be_answered_gets_no_password(
    tmp_path: Path, make_site: Callable[..., Site], offered: list[str]
) -> None:
    site = make_site({"/a.jpg": asks(*offered)})
    with pytest.raises(ConnectionError, match="401"):
        download(f"http://u:secret@{site.host}/a.jpg", tmp_path / "got")
    assert site.asked == [("/a.jpg", None)]


def test_an_answer_that_came_too_late_is_repeated_once(tmp_path: Path, make_site: Callable[..., Site]) -> None:
    late = asks(BASIC, f"{DIGEST}, stale=TRUE")
    site = make_site({"/a.jpg": late})
    with pytest.raises(ConnectionError, match="401"):
        download(f"http://u:secret@{site.host}/a.jpg", tmp_path / "got")
    assert [login and login[:7] for _, login in site.asked] == [None, "Digest ", "Digest "]


@pytest.mark.parametrize(
    "form",
    [
        "http://u:secret@{host}/gone.jpg",
        f"http://{{host}}{QUERY}",
        "http://{host}/gone.jpg?Token=secret/x",
        "http://u:secret/x@{host}/gone.jpg",
        "http://u:secret@127.0.0.1:port/gone.jpg",
        "http://u:secret@youtube.com/gone.jpg",
        "htp://u:secret@{host}/gone.jpg",
        "htp://u:secret@{host}/*.jpg",
        "http://u:secret@{host}/away.jpg",
        "http://u:secret@{host}/there.jpg",
    ],
)
def test_no_password_is_told_with_what_fails(
    tmp_path: Path, make_site: Callable[..., Site], messages: list[str], form: str
) -> None:
    gone = gives(b"", 404)
    pages = {"/away.jpg": leads_to("file://u:secret@host/"), "/there.jpg": leads_to("http://u:secret@127.0.0.1:port/")}
    site = make_site({path: gone for path in ("/gone.jpg", QUERY, "/gone.jpg?Token=secret/x")} | pages)
    address = form.format(host=site.host)
    with pytest.raises((OSError, ValueError)) as caught:
        resolve_source(address)
    assert "secret" not in str(caught.value)
    (tmp_path / "list.txt").write_text(f"{address}\nhttp://{site.host}/gone.jpg\n")
    with pytest.raises(ValueError, match="list.txt") as caught:
        resolve_source(tmp_path / "list.txt")
    assert "secret" not in str(caught.value) and "secret" not in "\n".join(messages)


def test_no_password_is_told_where_files_and_streams_mix(tmp_path: Path, make_site: Callable[..., Site]) -> None:
    site = make_site({"/a.jpg": gives(write_picture(tmp_path / "a.jpg").read_bytes())})
    for sources in (
        [f"http://u:secret@{site.host}/a.jpg", "rtsp://u:secret@cam/1"],
        [str(tmp_path), "rtsp://u:secret@cam/1"],
    ):
        with pytest.raises(ValueError, match="mixed") as caught:
            resolve_source(sources)
        assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="is a stream") as caught:
        LoadImages("rtsp://u:secret@cam/1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("rtsp://u:p@ss@host:554/live@1", "rtsp://***@host:554/live@1"),
        ("http://host/a@b", "http://host/a@b"),
        ("http://host:80/a@b", "http://host:80/a@b"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        ("http://host?mail=a@b", "http://host?mail=a@b"),
        ("rtsp://u:p/w@host/1", "rtsp://***@host/1"),
        ("rtsp://u:p?w@host/1", "rtsp://***@host/1"),
        ("http://h/s.cgi?loginuse=a&loginpas=b&pwd=x", "http://h/s.cgi?loginuse=a&loginpas=b&pwd=***"),
        ("rtsp://h/user=a_password=x_channel=1_stream=0.sdp", "rtsp://h/user=a_password=***_channel=1_stream=0.sdp"),
        ("http://h/a?monkey=1&bypass=2", "http://h/a?monkey=1&bypass=2"),
        ("shots/pwd=1@b.jpg", "shots/pwd=1@b.jpg"),
    ],
)
def test_what_is_hidden_of_an_address(address: str, shown: str) -> None:
    assert without_password(address) == shown
    assert without_password(shown) == shown


def test_an_address_without_login_is_left_alone() -> None:
    assert split_login("http://host:8080/a?b=c") == ("http://host:8080/a?b=c", None)
    address, login = split_login("https://u:p@host/a")
    assert address == "https://host/a" and login.is_for("https://HOST:443/b") and not login.is_for("http://host/b")
    assert split_login("http://u:p@host/a")[1].is_for("https://host/a")
    assert not split_login("http://u:p@host:8080/a")[1].is_for("https://host/a")


# --- downloads in lines and tables ---


def test_downloads_keep_their_names_and_order_and_come_once(tmp_path: Path, make_site: Callable[..., Site]) -> None:
    picture = gives(write_picture(tmp_path / "a.jpg").read_bytes())
    paths = [f"/{folder}/p.jpg" for folder in "hgfedcba"]
    site = make_site(dict.fromkeys(paths, picture))
    (tmp_path / "list.txt").write_text("\n".join(f"http://u:p@{site.host}{path}" for path in paths * 2))
    source = resolve_source(tmp_path / "list.txt")
    assert [file.title for file in source.files] == [f"http://***@{site.host}{path}" for path in sorted(paths)]
    assert len(site.asked) == len(paths)
    source.close()


def test_a_download_that_is_no_picture_is_told_by_its_address(
    tmp_path: Path, make_site: Callable[..., Site], messages: list[str]
) -> None:
    site = make_site({"/a.jpg": gives(b"<html>"), "/b.jpg": gives(write_picture(tmp_path / "b.jpg").read_bytes())})
    (tmp_path / "list.txt").write_text(f"http://{site.host}/a.jpg\nhttp://{site.host}/b.jpg\n")
    images = LoadImages(tmp_path / "list.txt")
    ((path, *_, text),) = images
    assert Path(path).is_file() and text == f"image 2/2 http://{site.host}/b.jpg: "
    assert any(line.startswith(f"http://{site.host}/a.jpg: ") for line in messages)


# --- lengths ---

TS = b"G" + b"\0" * 187


@pytest.mark.parametrize(
    ("answer", "is_file"),
    [
        (gives(TS * 9, Content_Length=str(188 * 9)), True),
        (gives(TS, 206, Content_Range="bytes 0-187/9999", Content_Length="188"), True),
        (gives(TS, 206, Content_Range="bytes 0-187/*", Content_Length="188"), False),
        (gives(TS * 9), False),
        (gives(b"--B\r\n", Content_Type="multipart/x-mixed-replace; boundary=B", Content_Length="5"), False),
        (gives(b"#EXTM3U\n", Content_Length="8"), False),
        (gives(b"\xef\xbb\xbf\n<?xml ?><MPD>", Content_Length="17"), False),
        (gives(b"", 404, Content_Length="0"), False),
        (gives(b"busy", 503, Content_Length="4"), False),
        (gives(b"", Content_Length="many"), False),
    ],
)
def test_what_has_a_length(make_site: Callable[..., Site], answer: Answer, is_file: bool) -> None:
    site = make_site({"/live": answer})
    assert has_known_length(f"http://u:p@{site.host}/live") is is_file
    assert site.asked == [("/live", None)]


@pytest.mark.parametrize("address", ["0", "screen 1", "rtsp://127.0.0.1:9/1", "http://127.0.0.1:9/live", "http://["])
def test_what_is_no_server_has_none(address: str) -> None:
    assert not has_known_length(address)


def test_a_server_that_does_not_answer_is_given_up(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()
    site = make_site({"/live": lambda request: waits.wait(5)})
    monkeypatch.setattr("utils.data.addresses.QUESTION_TIMEOUT_S", 0.1)
    assert not has_known_length(f"http://{site.host}/live")
    waits.set()
