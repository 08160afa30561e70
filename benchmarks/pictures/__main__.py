"""Make the pictures of README and docs from real runs, and the table of proofs in README.

python benchmarks/pictures                     do all of the following; it takes 15 minutes on two cores

python benchmarks/pictures measure [NAME ...]  run again, and write docs/pictures/measured.json

python benchmarks/pictures draw                draw docs/pictures from measured.json, without a run

python benchmarks/pictures table               write the table of README from measured.json and the generated docs

NAME is packing, memory, parity, resume or report.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "tests", "src")]

from pictures import proof, records, screenshot  # noqa: E402


def main(arguments: list[str]) -> None:
    """Do what the arguments ask for; everything without one."""
    task, *names = arguments or ["all"]
    if task not in ("all", "measure", "draw", "table"):
        sys.exit(__doc__)
    if task in ("all", "measure"):
        from pictures import measure  # torch is imported from here on

        measure.measure(names or list(measure.PARTS))
    if task in ("all", "draw"):
        from pictures import drawings

        for name, svg in drawings.draw(records.read()).items():
            (records.FOLDER / name).write_bytes(svg)
        if screenshot.missing():
            print(f"report.png is not drawn again: {screenshot.missing()}")
        else:
            (records.FOLDER / "report.png").write_bytes(screenshot.take(records.read()["report"]))
    if task in ("all", "table"):
        proof.write()


if __name__ == "__main__":
    main(sys.argv[1:])
