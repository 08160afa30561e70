"""Write a proof as a page of Markdown and a badge, which a copy of this repository can put into its own README."""

from __future__ import annotations

from html import escape
from pathlib import Path
from urllib.parse import quote

from gearbox import ROOT, filesystem
from gearbox.errors import UserError
from gearbox.proving.record import Compared, GearResult, Proof
from gearbox.redact import redact

PASSED, FAILED, PLAIN = "#2e7d32", "#c62828", "#555"
HEIGHT, MARGIN = 20, 7  # pixels
WIDE, NARROW = 6.7, 4.5  # mean widths of letters in Verdana at 11 px; textLength makes the sum exact
COLUMNS = ("gear", "ranks", "result", "loss", "gradient norm", "resumed", "resumed from", "exported", "reloaded")
LEGEND = """- **loss**, **gradient norm**: the largest difference from the first gear in any step, divided by its value.
- **resumed**: resumed under the same gear after half of the steps, and compared with the uninterrupted run. Bit for bit
  means that no bit of loss, gradient norm, weights and optimizer state differs in any later step or checkpoint.
- **resumed from**: resumed from a checkpoint of that gear, compared with the first gear. A figure in these two columns
  is the largest difference of loss, gradient norm, weights and first moments, each relative (`docs/parity.md` defines
  them).
- **exported**: the tensors of the saved model that equal those of the first gear in every byte. A figure after them is
  the largest difference of a weight in the others.
- **reloaded**: a fresh process loaded the saved model; the largest difference of its logits from those of the first
  gear, divided by the largest logit."""


def headline(proof: Proof) -> str:
    """Return the badge's text, such as "proved: 12 gears" or "failed: 2 of 12 gears"."""
    failed, ran = len(proof.of("failed")), len(proof.of("ran"))
    return f"failed: {failed} of {ran + failed} gears" if failed else f"proved: {ran} gear{'s' * (ran != 1)}"


def write(proof: Proof, page: Path) -> Path:
    """Write the page, and the badge next to it. Return the badge's path."""
    picture = page.with_suffix(".svg")
    try:
        filesystem.make_folder(page.parent)
        filesystem.atomic_write(picture, badge("Gearbox", headline(proof), not proof.of("failed")))
        filesystem.atomic_write(page, redact(markdown(proof, page, picture)))
    except OSError as error:
        raise UserError(f"--page: {page} cannot be written: {error.strerror}; give another place") from None
    return picture


def markdown(proof: Proof, page: Path, picture: Path) -> str:
    """Return the page."""
    facts = proof.facts
    assert facts is not None
    fence = "`" * max(3, 1 + _longest_ticks(facts.shown))
    name, reasons = Path(proof.recipe).stem, list[str]()
    return "\n".join(
        [
            f"# Proof of {plain(name)}\n",
            f"![{headline(proof)}]({quote(picture.name)})\n",
            f"{quoted(proof.recipe)} ran {proof.steps} steps under {len(proof.of('ran'))} gears.",
            f"Made on {proof.made}.\n",
            *table(proof, reasons),
            *notes(reasons),
            f"\n{LEGEND}\n",
            "## What was real\n",
            *(f"- {line}" for line in real(proof)),
            "\n## What is trained\n",
            f"The first training document, {facts.place}. Tokens between « and » are trained.\n",
            f"{fence}text\n{facts.shown}\n{fence}\n",
            "## Show it\n",
            "Two lines for the README of this repository. Git must track both files: copy them, or give `--page`.\n",
            "```text",
            *paste(proof, page, picture),
            "```\n",
        ]
    )


def table(proof: Proof, reasons: list[str]) -> list[str]:
    """Return the table of gears, with the number of each problem in `reasons`, and add new ones."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for one in proof.gears:
        word = f"**{one.outcome}**" if one.outcome == "failed" else one.outcome
        cells = [f"`{one.gear}`", str(one.num_ranks), word + marks(one, reasons), *_figures(one, proof)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def marks(result: GearResult, reasons: list[str]) -> str:
    """Return the number of each problem in `reasons`, such as " [1] [3]", and add new ones."""
    reasons += [problem for problem in dict.fromkeys(result.problems) if problem not in reasons]
    return "".join(f" [{reasons.index(problem) + 1}]" for problem in result.problems)


def notes(reasons: list[str]) -> list[str]:
    """Return the numbered list of reasons, after an empty line."""
    return [*[""][: len(reasons)], *(f"{i}. {quoted(why)}" for i, why in enumerate(reasons, start=1))]


def _figures(one: GearResult, proof: Proof) -> list[str]:
    """Return the last six cells of a row."""
    if not one.losses:
        return ["-"] * 6
    is_first = proof.reference is one
    loss, norm = ("first", "first") if is_first else [_of(one.parity, name) for name in ("loss", "gradient norm")]
    moved = f"`{one.moved.origin}`: {largest(one.moved)}" if one.moved else "-"
    exported = "first" if is_first else "-"
    if one.exported:
        equal, all_of_them = one.exported.num_equal, one.exported.num_tensors
        exported = f"{equal} of {all_of_them} equal" + (f", {one.exported.largest:.0e}" if equal < all_of_them else "")
    logits = "-" if one.logits is None else "loads" if is_first else exact(one.logits)
    return [loss, norm, largest(one.resumed), moved, exported, logits]


def _of(compared: Compared | None, name: str) -> str:
    return "-" if compared is None else exact(compared.largest[name])


def exact(number: float) -> str:
    """Return a difference, or 0 if there is none."""
    return f"{number:.0e}" if number else "0"


def largest(compared: Compared | None) -> str:
    """Return the largest difference of a resumed run, or that no bit differs."""
    if compared is None:
        return "-"
    return "bit for bit" if compared.is_exact else exact(max(compared.largest.values()))


def real(proof: Proof) -> list[str]:
    """Return what the proof took from the recipe, and what it replaced."""
    facts = proof.facts
    assert facts is not None
    return [
        f"Model: {plain(facts.model)}, family `{facts.family}` ({plain(facts.architecture)}), method {proof.method}.",
        f"Config: {plain(facts.config)}, narrowed to a few layers. The weights are random.",
        f"Tokenizer: {plain(facts.tokenizer)}. Chat template: {plain(facts.template)}.",
        f"Data: {plain(facts.data)}.",
        *(f"Changed: `{key}={value}`; {why}." for key, value, why in proof.changes),
    ]


def paste(proof: Proof, page: Path, picture: Path) -> list[str]:
    """Return the two lines of Markdown for a README."""
    return [
        f"![{headline(proof)}]({_link(picture)})",
        f"[{quoted(Path(proof.recipe).stem)} under every gear]({_link(page)})",
    ]


def _link(path: Path) -> str:
    """Return the address of a file in Markdown, relative to this repository if it is inside."""
    resolved = path.resolve()
    return quote((resolved.relative_to(ROOT) if resolved.is_relative_to(ROOT) else path).as_posix())


def badge(name: str, text: str, has_passed: bool) -> str:
    """Return an SVG with a name and a text, green if it has passed and red if not."""
    widths = [round(sum(NARROW if c in " .:filr" else WIDE for c in part)) + 2 * MARGIN for part in (name, text)]
    total = sum(widths)
    labels = []
    for part, start, width in ((name, 0, widths[0]), (text, widths[0], widths[1])):
        labels.append(f'<text x="{start + width / 2:g}" y="14" textLength="{width - 2 * MARGIN}">{escape(part)}</text>')
    title = escape(f"{name}: {text}")
    sizes = f'width="{total}" height="{HEIGHT}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {sizes} role="img" aria-label="{title}">
<title>{title}</title>
<clipPath id="r"><rect {sizes} rx="3"/></clipPath>
<g clip-path="url(#r)">
<rect width="{widths[0]}" height="{HEIGHT}" fill="{PLAIN}"/>
<rect x="{widths[0]}" width="{widths[1]}" height="{HEIGHT}" fill="{PASSED if has_passed else FAILED}"/>
</g>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
{labels[0]}
{labels[1]}
</g>
</svg>
"""


def plain(text: str) -> str:
    """Return text from a file so that Markdown shows it as it is, on one line."""
    line = " ".join(text.split())
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#" else letter for letter in line)


def quoted(message: str) -> str:
    """Return a message as a span of code on one line."""
    return f"`{' '.join(message.split()).replace('`', chr(39))}`"


def _longest_ticks(text: str) -> int:
    """Return the length of the longest run of backticks in a text."""
    return max((len(run) for run in "".join(c if c == "`" else " " for c in text).split()), default=0)
