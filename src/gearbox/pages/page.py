"""Write a self-contained HTML page: style, script, tables and the frame around the sections of a page.

The page loads nothing, and its content security policy allows no script but the one below. It works without that
script, which adds values under the pointer and the age of a running run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from gearbox import filesystem
from gearbox.redact import redact

# Colours with a contrast of at least 4.5 on their background, in both schemes; tests/pages/test_looks.py measures it.
# A print is always light.
STYLE = """
:root { color-scheme: light dark; --bg: #f4f6f8; --card: #fff; --text: #1a2330; --muted: #566173; --edge: #dde2e9;
  --soft: #eef1f5; --mark: #e3f4e6; --good: #176f38; --bad: #b3261e; --warn: #8a5200; --accent: #1f57c3;
  --s1: #1f57c3; --s2: #b04a00; --s3: #176f38; --s4: #8430b8; --s5: #0b6a80; --s6: #b3261e; --s7: #596579;
  --s8: #7a5c00; }
@media screen and (prefers-color-scheme: dark) { :root { --bg: #0e131a; --card: #171e28; --text: #e7ecf3;
  --muted: #a3afbf; --edge: #2c3644; --soft: #202937; --mark: #17402a; --good: #5fd38a; --bad: #ff8f86;
  --warn: #f0b35a;
  --accent: #8ab0ff; --s1: #8ab0ff; --s2: #ffa45c; --s3: #5fd38a; --s4: #d8a1ff; --s5: #55d0e6; --s6: #ff8f86;
  --s7: #a9b5c6; --s8: #e3c34d; } }
@media print { :root { color-scheme: light; } .card, figure { break-inside: avoid; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; margin: 0;
  background: var(--bg); color: var(--text); overflow-wrap: anywhere; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; letter-spacing: -.015em; }
h2 { font-size: 1.2rem; margin: 40px 0 12px; letter-spacing: -.01em; }
h3 { font-size: .95rem; margin: 0; }
p { margin: 6px 0; } a { color: var(--accent); }
.muted, .unit, footer { color: var(--muted); } .unit { font-size: .8rem; font-weight: 400; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
header .line { display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: center; }
header p { color: var(--muted); margin: 6px 0 0; }
.status { border: 1.5px solid currentColor; border-radius: 99px; padding: 1px 12px; font-weight: 600; font-size: .9rem;
  white-space: nowrap; }
.status::before { content: ""; display: inline-block; width: .55em; height: .55em; border-radius: 50%;
  background: currentColor; margin-right: .45em; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 16px 18px; min-width: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 12px 0; }
header + .tiles { margin-top: 22px; } .tiles + .tiles .tile b { font-size: 1.25rem; }
.tile { display: flex; flex-direction: column; gap: 1px; padding: 12px 16px; }
.tile b { font-size: 1.55rem; line-height: 1.25; letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.tile span { font-size: .85rem; color: var(--muted); }
.tile.main { grid-column: span 2; } .tile.main b { font-size: 2.1rem; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 14px; }
.columns > * { min-width: 0; } .columns.texts { align-items: start; }
.columns + .card { margin-top: 14px; } .wide { grid-column: 1 / -1; }
pre, code { font-family: ui-monospace, "SF Mono", Menlo, "Liberation Mono", monospace; font-size: 13px; }
pre { margin: 6px 0 0; padding: 10px 12px; background: var(--soft); border-radius: 7px; white-space: pre-wrap;
  overflow-wrap: anywhere; }
pre.command { user-select: all; } pre + h3 { margin-top: 14px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--edge); }
tr:last-child > td { border-bottom: 0; } td { min-width: 3.5em; } td:last-child, th:last-child { padding-right: 0; }
th { font-weight: 600; color: var(--muted); font-size: .85rem; } td b { font-weight: 700; }
table.facts td:first-child { color: var(--muted); width: 11.5em; min-width: 8em; }
.num th, .num td { white-space: nowrap;
  font-variant-numeric: tabular-nums; }
details > summary { cursor: pointer; font-weight: 600; } details[open] > summary { margin-bottom: 8px; }
.doc, .answers td { white-space: pre-wrap; }
.doc + .doc { margin-top: 14px; padding-top: 12px; border-top: 1px solid var(--edge); }
.doc code { color: var(--muted); } mark, .doc mark { background: var(--mark); color: var(--text); font-weight: 600;
  text-decoration: underline; text-decoration-thickness: 2px; text-underline-offset: 3px; border-radius: 3px; }
footer { margin-top: 40px; font-size: .85rem; }
figure { margin: 0; } figcaption { display: flex; flex-wrap: wrap; gap: 2px 10px; align-items: baseline; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 4px 0 8px; padding: 0;
  font-size: .83rem; } .legend b { font-variant-numeric: tabular-nums; }
.legend svg { width: 24px; height: 10px; margin-right: 6px; vertical-align: 0; }
.plot { position: relative; display: grid; grid-template-columns: var(--gutter, 5ch) 1fr; font-size: 12px;
  color: var(--muted); font-variant-numeric: tabular-nums; }
.plot > svg, .box { display: block; grid-area: 1 / 2; width: 100%; height: 210px; overflow: visible; }
.wide .plot > svg, .wide .box { height: 270px; }
.ys { position: relative; grid-area: 1 / 1; } .xs { position: relative; grid-area: 2 / 2; height: 20px; }
.ys span { position: absolute; right: 8px; transform: translateY(50%); white-space: nowrap; line-height: 1; }
.xs span { position: absolute; top: 5px; transform: translateX(-50%); white-space: nowrap; line-height: 1; }
.xs span.first { transform: none; } .xs span.last { transform: translateX(-100%); }
.xs i { position: absolute; right: 0; top: 21px; font-style: normal; }
path { fill: none; stroke-width: 1.7px; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
path.grid { stroke: var(--edge); stroke-width: 1px; } path.axis { stroke: var(--muted); stroke-width: 1px; }
path.faint { stroke-width: 1px; opacity: .45; } path.dots { stroke-width: 6px; stroke-linecap: round; }
path.area { stroke: none; opacity: .8; } path.limit { stroke: var(--text); stroke-dasharray: 3 4; }
path.resume { stroke: var(--muted); stroke-width: 1px; stroke-dasharray: 2 3; }
.lane { position: relative; grid-area: 3 / 2; height: 16px; margin-top: 4px; }
.lane svg { position: absolute; top: 2px; width: 11px; height: 11px; margin-left: -5.5px; overflow: visible; }
.lane path, .legend .sign path { fill: currentColor; stroke: currentColor; stroke-width: 1.5px; }
.readout { position: absolute; z-index: 2; top: 4px; pointer-events: none; background: var(--card); color: var(--text);
  border: 1px solid var(--muted); border-radius: 6px; padding: 4px 9px; white-space: nowrap; }
.cursor { position: absolute; top: 0; width: 1px; background: var(--text); pointer-events: none; }
[hidden] { display: none !important; }
@media (max-width: 560px) { main { padding: 18px 12px 36px; } .card { padding: 13px 13px; } h1 { font-size: 1.4rem; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 9px; } .tile { padding: 10px 12px; } .tile b { font-size: 1.25rem; }
  .tile.main b { font-size: 1.75rem; } .wide .plot > svg, .wide .box { height: 210px; }
  table.facts td { display: block; padding: 0 0 6px; border: 0; width: auto !important; }
  table.facts td:first-child { padding: 6px 0 0; font-size: .85rem; }
  table.facts tr { border-bottom: 1px solid var(--edge); display: block; } }
"""

# Reads the values under the pointer from the drawn lines, and counts the age of the last update.
SCRIPT = """
const show = (v, unit) => unit === "bytes" ? (v / 2 ** 30 >= 0.25 ? (v / 2 ** 30).toFixed(2) + " GiB" :
  (v / 2 ** 20).toFixed(1) + " MiB") : unit === "percent" ? (100 * v).toFixed(1) + " %" :
  (Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : v === 0 ? "0" : +v.toPrecision(3) + "");
for (const plot of document.querySelectorAll(".plot")) {
  const [x0, x1, y0, y1] = plot.dataset.range.split(" ").map(Number), log = plot.dataset.log !== undefined;
  const svg = plot.querySelector("svg"), box = () => document.createElement("div"), readout = box(), cursor = box();
  readout.className = "readout"; cursor.className = "cursor"; readout.hidden = cursor.hidden = true;
  plot.append(cursor, readout);
  const lines = [...svg.querySelectorAll("path[data-name]")].map(path => ({name: path.dataset.name,
    base: path.dataset.base !== undefined, points: [...path.getAttribute("d").matchAll(/(-?[\\d.]+) (-?[\\d.]+)/g)]
      .map(m => [+m[1], +m[2]])}));
  const value = h => { const f = 1 - h / 1000; return log ? y0 * (y1 / y0) ** f : y0 + f * (y1 - y0); };
  svg.addEventListener("pointerleave", () => { readout.hidden = cursor.hidden = true; });
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), at = 1000 * (event.clientX - box.left) / box.width;
    let step = null, below = 0; const rows = [];
    for (const {name, base, points} of lines) {
      if (!points.length) continue;
      const [px, py] = points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
      const here = Math.round(x0 + px / 1000 * (x1 - x0)), top = value(py); step = step ?? here;
      const far = Math.abs(here - step) > (x1 - x0) / 200 ? ` (${plot.dataset.x} ${here.toLocaleString("en")})` : "";
      rows.push(name + " " + show(base ? top - below : top, plot.dataset.unit) + far);
      if (base) below = top;
    }
    readout.replaceChildren(...[plot.dataset.x + " " + step.toLocaleString("en"), ...rows].map(text => {
      const line = document.createElement("div"); line.textContent = text; return line; }));
    readout.hidden = cursor.hidden = false;
    const left = box.left - plot.getBoundingClientRect().left + at / 1000 * box.width;
    cursor.style.cssText = `left:${left}px;height:${box.height}px`;
    const room = plot.clientWidth - readout.offsetWidth;
    const beside = left + 12 > room ? left - 12 - readout.offsetWidth : left + 12;
    readout.style.left = Math.max(0, Math.min(beside, room)) + "px";
  });
}
for (const one of document.querySelectorAll("[data-updated]")) {
  const age = () => { const s = Date.now() / 1000 - one.dataset.updated;
    one.textContent = ", " + (s < 90 ? "just now" : s < 5400 ? Math.round(s / 60) + " minutes ago" : s < 172800 ?
      Math.round(s / 3600) + " hours ago" : Math.round(s / 86400) + " days ago");
    one.parentElement.querySelector(".stale").hidden = s < one.dataset.stale; };
  age(); setInterval(age, 30000);
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => { d.open = true; }));
"""
NO_PICTURE = "data:,"  # else a browser asks for favicon.ico


def write(path: Path, title: str, sections: Iterable[str]) -> None:
    """Write a page with the given HTML sections, secrets redacted. Raise OSError if it cannot be written."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    head = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<link rel="icon" href="{NO_PICTURE}"><title>{escape(redact(title))}</title>',
        f"<style>{STYLE}</style></head><body><main>",
    ]
    footer = "<footer>Written by Gearbox. The page needs no network.</footer>"
    end = f"{footer}</main><script>{SCRIPT}</script></body></html>\n"
    text = "\n".join([*head, redact("\n".join(sections)), end])
    filesystem.atomic_write(path, text.encode("utf-8", "replace"))  # names and answers may have halves of letters


def table(rows: Iterable[Iterable[str]], head: Sequence[str] = (), kind: str = "") -> str:
    """Return an HTML table that scrolls on a narrow screen. The cells are plain text and are escaped.

    The kind `facts` is a table of labels and texts, and `num` one of numbers.
    """
    lines = ["".join(f"<td>{escape(text)}</td>" for text in row) for row in rows]
    return html_table(lines, head, kind)


def html_table(lines: Iterable[str], head: Sequence[str] = (), kind: str = "") -> str:
    """Return a table of rows whose cells are HTML already."""
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join(f"<tr>{line}</tr>" for line in lines if line)
    heading = f"<thead><tr>{top}</tr></thead>" if top else ""
    return f'<div class="scroll"><table class="{kind}">{heading}<tbody>{body}</tbody></table></div>'


def card(content: str, title: str = "", wide: bool = False) -> str:
    """Return a card with a heading and HTML content."""
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<section class="card{" wide" if wide else ""}">{heading}{content}</section>'


def command(title: str, text: str) -> str:
    """Return a command under a heading. A click selects all of it."""
    return f'<h3>{escape(title)}</h3><pre class="command">{escape(text)}</pre>'


def tile(label: str, value: str, change: str = "", is_main: bool = False) -> str:
    """Return a tile with a large number, its label above it and how it changed below."""
    below = f"<span>{escape(change)}</span>" if change else ""
    kind = "card tile main" if is_main else "card tile"
    return f'<div class="{kind}"><span>{escape(label)}</span><b>{escape(value)}</b>{below}</div>'
