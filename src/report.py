"""Write the report of a run again, or compare several runs on one page.

Usage: python src/report.py RUN [RUN ...] [--output PATH]

    RUN            a run's folder, such as runs/first
    --output PATH  where to write the comparison of several runs (default: compare.html beside the first run)

With one run, this writes report.html and loss.png into its folder, from the files there, without torch. With several
runs, the page compares their results and the keys of their recipes, and draws their curves by step and by tokens.

Exit codes: 0 written; 2 a user error.

Examples:
    python src/report.py runs/first
    python src/report.py runs/first runs/second --output compared.html
"""

from __future__ import annotations

from pathlib import Path

from gearbox.errors import UserError
from gearbox.launch import cli


def main(arguments: list[str]) -> None:
    """Write the report of one run, or the comparison of several."""
    parser = cli.Parser(__doc__)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_intermixed_args(arguments)
    if not options.runs:
        raise UserError(f"usage: {cli.usage(__doc__)}")
    if len(options.runs) == 1 and options.output is not None:
        raise UserError(f"--output: is for several runs; the report of one run is {options.runs[0] / 'report.html'}")

    from gearbox.pages import overlay, run_data, run_report

    output = options.output or options.runs[0].resolve().parent / "compare.html"
    try:
        if len(options.runs) == 1:
            output = options.runs[0] / "report.html"
            run_report.write(options.runs[0])
        else:
            overlay.write(output, [run_data.read(run) for run in options.runs])
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror or error}; give another place") from None
    print(f"report: {output}")


if __name__ == "__main__":
    cli.run(main)
