"""Write the table of proofs in README: one figure for each promise, from measured.json and the generated docs."""

import re

from pictures import records
from pictures.records import ROOT, Record, largest_difference

BEGIN, END = "<!-- proof: made by make pictures -->", "<!-- end -->"
FAULT = re.compile(r"^\| ([^|]+) \| (\d+) \| [^|]+ \| (passed|\*\*failed\*\*)[^|]*\|$", re.MULTILINE)
RESTARTS = re.compile(r"median ([\d.]+) s, maximum ([\d.]+) s \((\d+) restarts\)")


def write() -> None:
    """Write the table into README.md."""
    page = ROOT / "README.md"
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(text: str) -> str:
    """Return the text of README with the table between its markers. Raises ValueError if a marker is missing."""
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md: the lines {BEGIN} and {END} are missing; add them where the table belongs")
    return f"{before}{begin}{table()}{end}{after}"


def table() -> str:
    """Return the table, in Markdown."""
    found = records.read()
    reliability = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = [
        parity(found["parity"]), resume(found["resume"]), faults(reliability), restarts(reliability), matrix()
    ]  # fmt: skip
    lines = [f"| [{promise}]({page}) | {figure} | `{command}` |" for promise, page, figure, command in rows]
    return "\n".join(["| promise | measured on two CPU cores, in fp32 | reproduce |", "|---|---|---|", *lines, ""])


Row = tuple[str, str, str, str]  # promise, page, figure, command


def parity(record: Record) -> Row:
    """Return how far the losses of the gears are from those of one device."""
    losses = record["losses"]
    worst = max(largest_difference(values, losses["single"]) for values in losses.values())
    names = ", ".join(f"`{gear}`" for gear in losses)
    figure = f"losses of {names} over {len(losses['single'])} steps: largest relative difference {worst:.1e}"
    return "Gears train the same model", "docs/parity.md", figure, "make pictures"


def resume(record: Record) -> Row:
    """Return how far the losses of a killed run are from those of an undisturbed one."""
    gears = ", then ".join(f"`{segment['gear']}`" for segment in record["segments"])
    worst = largest_difference(record["resumed"], record["undisturbed"])
    figure = f"{gears}, killed in between, over {len(record['resumed'])} steps: largest relative difference {worst:.1e}"
    return "Runs resume under another gear", "docs/reliability.md", figure, "make pictures"


def faults(page: str) -> Row:
    """Return how many faults runs survived. The row that trains under pairs of gears is not a fault."""
    rows = [(name, int(times), outcome) for name, times, outcome in FAULT.findall(page) if "Train" not in name]
    if not rows:
        raise ValueError("docs/reliability.md: contains no row of the form: fault | times | expected | passed (1 s)")
    num_damaged = sum(times for name, times, _ in rows if name.startswith("Damage"))
    num_kills = sum(times for name, times, _ in rows if name.startswith("Kill"))
    num_kills += sum(int(times) for times in re.findall(r"(\d+) x kill", page))  # of the random faults
    num_faults = sum(times for _, times, _ in rows) - num_damaged
    failed = [name for name, _, outcome in rows if outcome != "passed"]
    verdict = f"failed: {'; '.join(failed)}" if failed else "all passed"
    figure = f"{num_faults} faults in runs, {num_kills} of them kills, and {num_damaged} damaged checkpoints: {verdict}"
    return "Runs survive faults", "docs/reliability.md", figure, "make faults"


def restarts(page: str) -> Row:
    """Return how long a run takes from a rank's death to its next step."""
    found = RESTARTS.search(page)
    if not found:
        raise ValueError("docs/reliability.md: contains no: median N s, maximum N s (N restarts)")
    median, longest, times = found.groups()
    figure = f"median {median} s, maximum {longest} s, of {times} restarts"
    return "Runs restart after a rank dies", "docs/reliability.md", figure, "make faults"


def matrix() -> Row:
    """Return how many gears run with how many methods."""
    from support.matrix import read_table  # imports torch

    marks = list(read_table().values())
    run, refused = marks.count("yes"), marks.count("refused")
    failed = len(marks) - run - refused
    figure = f"{len(marks)} combinations: {run} run, {refused} are refused with the reason, {failed} fail"
    return "Gears and methods combine", "docs/matrix.md", figure, "make matrix"
