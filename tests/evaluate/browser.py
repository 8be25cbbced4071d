"""A headless Chromium driven over its debugging pipe, with the standard library only."""

from __future__ import annotations

import base64
import fcntl
import gc
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, where Chromium refuses its sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """One page. Messages of its console and errors of its scripts gather in ``problems``, addresses in ``requests``."""

    def __init__(self, program: str, width: int = 1280, height: int = 900) -> None:
        self.profile = tempfile.mkdtemp(prefix="browser")
        gc.collect()  # files that wait to be closed would set free what is counted on
        taken = [os.open(os.devnull, os.O_RDONLY)]  # 3 and 4 are given away below: nothing else may come to lie there
        while taken[-1] <= 4:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        read_there, self.outgoing = os.pipe()
        self.incoming, write_there = os.pipe()

        def give_pipes() -> None:  # Chromium reads commands from descriptor 3 and answers on 4
            copies = [fcntl.fcntl(number, fcntl.F_DUPFD, 10) for number in (read_there, write_there)]
            for copy, wanted in zip(copies, (3, 4), strict=True):
                os.dup2(copy, wanted, inheritable=True)

        command = [program, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"]
        self.process = subprocess.Popen(
            command,
            preexec_fn=give_pipes,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in (read_there, write_there, *taken):
            os.close(number)
        self.buffer, self.number, self.session = b"", 0, ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.outgoing)
        os.close(self.incoming)
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; raise RuntimeError where it is refused."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.outgoing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """Return the next message; events are noted on the way."""
        end = time.monotonic() + TIMEOUT_S
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.incoming], [], [], max(end - time.monotonic(), 0))
            part = os.read(self.incoming, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError("the browser does not answer")
            self.buffer += part
        line, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, values: dict[str, Any]) -> None:
        self.events.append(method)
        if method == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(" ".join(str(item.get("value", "")) for item in values["args"]))
        elif method == "Log.entryAdded":
            self.problems.append(values["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])

    def open(self, path: Path) -> None:
        """Open a file and wait until it is drawn."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self._receive()
        self.settle()

    def settle(self) -> None:
        """Wait for two frames: what a script has changed is laid out and observed then."""
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        self.call("Runtime.evaluate", expression=frames, awaitPromise=True)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; raise RuntimeError where it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", "?"))
        return answer["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """Give the page a window of ``width`` x ``height`` pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def mouse(self, kind: str, x: float, y: float, *, clicks: int = 1) -> None:
        """Send a mouse event: moved, pressed or released."""
        name = {"moved": "mouseMoved", "pressed": "mousePressed", "released": "mouseReleased"}[kind]
        is_button = kind != "moved"
        self.call(
            "Input.dispatchMouseEvent",
            type=name,
            x=x,
            y=y,
            button="left" if is_button else "none",
            buttons=1 if kind == "pressed" else 0,
            clickCount=clicks if is_button else 0,
        )

    def screenshot(self, path: Path, *, is_whole: bool = True, clip: dict[str, float] | None = None) -> None:
        """Write what is seen as PNG or JPEG, by the suffix: the whole page, or ``clip`` x, y, width, height of it."""
        more: dict[str, Any] = {"captureBeyondViewport": True}
        if is_whole and clip is None:
            content = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": content["width"], "height": content["height"]}
        if clip is not None:
            more["clip"] = {**clip, "scale": 1}
        kind = {"format": "jpeg", "quality": 80} if path.suffix == ".jpg" else {"format": "png"}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **kind, **more)["data"]))


def column(page: Browser, table: str, number: int) -> list[str]:
    """Return the texts in a column of the table that is called ``table``."""
    rows = f"document.querySelectorAll('table[aria-label=\"{table}\"] tbody tr')"
    return page.evaluate(f"[...{rows}].map(row => row.cells[{number}].textContent)")
