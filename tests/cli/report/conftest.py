"""A real browser without a window, spoken to through a pipe in its own protocol; no driver, no port, no network."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
SECONDS = 60


def pipe() -> tuple[int, int]:
    """Both ends, numbered above those that the browser expects its own at."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


class Browser:
    """One page. ``log`` holds what it said on its console, ``asked`` the addresses that it asked for."""

    def __init__(self, profile: Path) -> None:
        program = (
            shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
        )
        inward, self._write = pipe()
        self._read, outward = pipe()
        # The browser reads commands from 3 and writes answers to 4.
        command = f'exec "$@" 3<&{inward} 4>&{outward}'
        words = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", *words],
            pass_fds=(inward, outward),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(inward)
        os.close(outward)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.log: list[str] = []
        self.asked: list[str] = []
        (target,) = [
            t
            for t in self.call("Target.getTargets")["targetInfos"]
            if t["type"] == "page"
        ]
        attached = self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.size(1360, 860)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command, answered."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], SECONDS)[0]:
                raise TimeoutError("the browser says nothing")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("the browser is gone")
            self._buffer += part
        first, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(first)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.log.append(
                details.get("exception", {}).get("description") or details["text"]
            )
        elif event == "Log.entryAdded":
            self.log.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled":
            self.log.append(str([a.get("value") for a in params["args"]]))
        elif event == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def size(self, width: int, height: int, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def scheme(self, name: str) -> None:
        """ "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, path: Path) -> None:
        """Open a file and wait until the page is ready (or has failed) and drawn."""
        self.log.clear()
        self.asked.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.as_uri())
        self.wait(
            "document.documentElement?.dataset.ready || document.querySelector('.failed')"
        )
        self.settle()  # a picture is drawn when the page has its size

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate",
            expression=script,
            returnByValue=True,
            awaitPromise=True,
            userGesture=True,
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(
                answer["exceptionDetails"]["exception"].get("description")
            )
        return answer["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of an expression as soon as it is true."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if value := self.run(script):
                return value
            time.sleep(0.02)
        raise TimeoutError(
            f"never true: {script}\n{self.log}\n{self.run('document.body.innerText')[:2000]}"
        )

    def settle(self) -> None:
        """Until what is pending has been drawn."""
        self.run(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def text(self, selector: str) -> list[str]:
        """What people read in all that the selector finds."""
        return self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)"
        )

    def click(
        self,
        selector: str,
        *,
        having: str = "",
        times: int = 1,
        at: tuple[float, float] = (0.5, 0.5),
    ) -> None:
        """A real click into the first such element (with this text), at a fraction of its size."""
        find = (
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            f".find(e => e.innerText.includes({json.dumps(having)}))"
        )
        self.wait(f"Boolean({find})")
        self.run(f"{find}.scrollIntoView({{block: 'nearest'}})")
        self.settle()
        box = self.run(
            f"(b => [b.x, b.y, b.width, b.height])({find}.getBoundingClientRect())"
        )
        place = {
            "x": box[0] + box[2] * at[0],
            "y": box[1] + box[3] * at[1],
            "button": "left",
        }
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.call(
                    "Input.dispatchMouseEvent",
                    type=kind,
                    clickCount=count,
                    buttons=1,
                    **place,
                )
        self.settle()

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)
        self.settle()

    def press(self, *keys: str) -> None:
        """Named keys ("ArrowDown") or characters."""
        codes = {
            "Enter": 13,
            "Escape": 27,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        for key in keys:
            shared = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0)}
            text = {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **shared, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", **shared)
        self.settle()

    def picture(self, path: Path | None = None) -> bytes:
        """What is seen, as PNG."""
        data = base64.b64decode(
            self.call("Page.captureScreenshot", format="png")["data"]
        )
        if path is not None:
            path.write_bytes(data)
        return data

    def close(self) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (RuntimeError, TimeoutError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def look(chromium: Browser, tmp_path: Path) -> Callable[[str], Browser]:
    """Opens a page from a file, in a browser as it is at first."""

    def opened(page: str) -> Browser:
        path = tmp_path / "map.html"
        path.write_text(page, encoding="utf-8")
        chromium.size(1360, 860)
        chromium.scheme("light")
        chromium.open(path)
        return chromium

    return opened
