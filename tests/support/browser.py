"""Open a page in headless Chromium at several widths and colour schemes, measure it and take pictures of it.

The browser is told by its DevTools protocol over a pipe: JSON texts that end in a zero byte.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --hide-scrollbars --font-render-hinting=none --remote-debugging-pipe
""".split()
SECONDS = 120
# The same letters on every machine that has the fonts of `make packages`.
FONTS = "body { font-family: 'Liberation Sans' !important; } pre, code { font-family: 'Liberation Mono' !important; }"
# Returns, for each visible text, its contrast with the background behind it; and the page's width.
MEASURE = """
(() => {
  document.querySelectorAll("details").forEach(one => { one.open = true; });
  const parse = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat([1]);
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const behind = element => { const layers = [];
    for (let one = element; one; one = one.parentElement) layers.push(parse(getComputedStyle(one).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]); };
  const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, box = element.getBoundingClientRect();
    if (!walker.currentNode.data.trim() || !box.width || element.closest("script, style, title")) continue;
    const style = getComputedStyle(element), base = behind(element);
    let shade = 1; for (let one = element; one; one = one.parentElement) shade *= getComputedStyle(one).opacity;
    const colour = parse(style.color); colour[3] *= shade;
    texts.push({text: walker.currentNode.data.trim().slice(0, 40), contrast: ratio(over(colour, base), base),
      size: parseFloat(style.fontSize), left: box.left, right: box.right,
      scrolls: !!element.closest(".scroll, .readout")});
  }
  const strokes = [...document.querySelectorAll(".plot path[data-name], .plot path.dots, .lane path")].map(path => {
    const style = getComputedStyle(path), base = behind(path.closest("figure"));
    const colour = parse(style.stroke); colour[3] *= style.opacity;
    const name = path.dataset.name || path.getAttribute("class") || "sign";
    return {name, contrast: ratio(over(colour, base), base)}; });
  return JSON.stringify({texts, strokes, width: document.documentElement.scrollWidth, room: innerWidth});
})()
"""


def missing() -> str:
    """Return what is missing for a browser; an empty text if nothing is."""
    if not shutil.which("chromium"):
        return "chromium is not installed (make packages)"
    fonts = subprocess.run(["fc-list", ":", "family"], capture_output=True, text=True, check=False).stdout
    return "" if "Liberation Sans" in fonts else "the Liberation fonts are not installed (make packages)"


class Browser:
    """A running Chromium with one page."""

    def __init__(self, commands, answers) -> None:
        self.commands, self.answers, self.number, self.waiting = commands, answers, 0, b""
        self.events: list[dict] = []
        self.session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters) -> dict:
        """Call a method of the protocol and return its result. Keep the events until then."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def receive(self) -> dict:
        while b"\0" not in self.waiting:
            found = os.read(self.answers.fileno(), 2**20)
            assert found, "the browser has ended"
            self.waiting += found
        message, _, self.waiting = self.waiting.partition(b"\0")
        answer = json.loads(message)
        if "method" in answer:
            self.events.append(answer)
        return answer

    def open(self, page: Path, width: int = 1280, dark: bool = False, height: int = 900) -> None:
        """Open a page in a window of this width."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.receive()

    def evaluate(self, script: str):
        """Return the value of a script in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def style(self, css: str) -> None:
        """Add a style sheet to the page."""
        self.evaluate(
            f"document.head.append(Object.assign(document.createElement('style'), {{textContent: {json.dumps(css)}}}))"
        )

    def measure(self) -> dict:
        """Return the contrasts of texts and lines, and the widths of the page and of the window."""
        return json.loads(self.evaluate(MEASURE))

    def picture(self, height: int | None = None) -> bytes:
        """Return the whole page as PNG, or its upper part."""
        size = self.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight].join()")
        wide, high = map(int, size.split(","))
        clip = {"x": 0, "y": 0, "width": wide, "height": min(high, height or high), "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(found["data"])


@contextmanager
def opened() -> Iterator[Browser]:
    """Start the browser, and end it afterwards."""
    with tempfile.TemporaryDirectory() as profile:
        their_input, commands = os.pipe()
        answers, their_output = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        shell = 'exec chromium "$@" 3<&"$THEIR_INPUT" 4>&"$THEIR_OUTPUT"'
        process = subprocess.Popen(
            ["bash", "-c", shell, "chromium", *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            env=os.environ | {"THEIR_INPUT": str(their_input), "THEIR_OUTPUT": str(their_output)},
            pass_fds=(their_input, their_output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(their_input)
        os.close(their_output)
        with os.fdopen(commands, "wb") as writing, os.fdopen(answers, "rb") as reading:
            try:
                browser = Browser(writing, reading)
                yield browser
                browser.session = ""
                browser.call("Browser.close")
                process.wait(SECONDS)
            finally:
                process.kill()
                process.wait()
