"""Write the report of a run again, or compare several runs on one page.

Usage: python src/report.py RUN [RUN ...] [--output PATH]

    RUN            a run's folder, such as runs/first
    --output PATH  where to write the page (default: report.html in the run, or compare.html beside the first run)

With one run, this writes report.html and loss.png into its folder, from the files there, without torch; with --output
only the page. With several runs, the page compares their results and the keys of their recipes, and draws their curves
by step and by tokens. --output replaces other pages, but no other file.

Exit codes: 0 written; 2 a user error.

Examples:
    python src/report.py runs/first
    python src/report.py runs/first runs/second --output compared.html
"""

from __future__ import annotations

import os
from pathlib import Path

from gearbox.console import printable
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

    from gearbox.pages import overlay, run_data, run_report

    runs = []
    for folder in options.runs:
        try:
            runs.append(run_data.read(folder))
        except OSError as error:
            raise UserError(f"{folder}: cannot be read: {error.strerror or error}; change its permissions") from None
    first, is_one = options.runs[0], len(runs) == 1
    output: Path = options.output or (first / "report.html" if is_one else first.resolve().parent / "compare.html")
    try:
        if options.output is not None and os.path.lexists(output) and not _is_page(output):
            raise UserError(f"--output: {output} is there and is not a page; give a name that ends in .html")
        if not is_one:
            overlay.write(output, runs)
        elif options.output is not None:
            run_report.write_page(output, runs[0])
        else:
            run_report.write_files(runs[0])
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror or error}; give another place") from None
    print(f"report: {printable(str(output))}")


def _is_page(path: Path) -> bool:
    return path.suffix == ".html" and path.is_file() and not path.is_symlink()


if __name__ == "__main__":
    cli.run(main)
