"""Export a run or a checkpoint to one folder that other tools load, and verify it in a fresh process.

Usage: python src/export.py RUN|CHECKPOINT|FOLDER [--output FOLDER] [--merge] [--dtype bf16] [--gguf [TYPE]] [--push ID]

    RUN|CHECKPOINT|FOLDER  a run (runs/first: its model/ if it is done, else its newest checkpoint), a checkpoint
                           (runs/first/checkpoints/step-100) of any gear, or a saved model or adapter
    --output FOLDER        the folder to write (default: exports/ and the names of run and step)
    --merge                add an adapter to its base: one model that needs neither PEFT nor the base
    --dtype DTYPE          bf16, fp16 or fp32 (default: the data type of the base; an adapter keeps its own)
    --gguf [TYPE]          also write a GGUF file for llama.cpp: f16, bf16, f32 or q8_0 (default: f16)
    --push ID              upload the folder to the Hub as organization/name, with the token in HF_TOKEN; private
    --public               make the repository that --push creates public
    --base FOLDER_OR_ID    where the base is now, if it has moved
    --force                replace an earlier export in the output folder
    --trust_remote_code    run the code shipped with the model

A merge is refused if the merged model differs from its adapter, or equals its base. If anything is wrong, no folder is
left.

Exit codes: 0 exported and verified; 2 a user error, a refused merge, or a failed verification.

Examples:
    python src/export.py runs/first
    python src/export.py runs/first/checkpoints/step-100 --merge --dtype bf16 --gguf q8_0 --output exports/first
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path

from gearbox.errors import UserError
from gearbox.launch import cli

OUTPUT = Path("exports")
GGUF_TYPES = ("f16", "bf16", "f32", "q8_0")


def main(arguments: list[str]) -> None:
    """Export, verify and push, and print what was done."""
    options = parse(arguments)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # PEFT imports DeepSpeed, which would warn if it finds no GPU
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing half written is left

    with cli.importing("transformers"):
        import transformers

        from gearbox.console import make_console
        from gearbox.exporting import exporter, hub, source

    transformers.utils.logging.set_verbosity_error()
    screen = make_console(speaks=True)
    if options.push is not None:
        hub.check(options.push)
    found = source.find(options.source, options.base, screen)
    output = options.output or default_output(found)
    if output.name in ("", ".."):  # such as `.`: the folder is renamed
        output = output.resolve()
    asked = exporter.Options(
        output,
        options.merge,
        options.dtype,
        options.gguf,
        options.force,
        options.trust_remote_code,
        shlex.join(["python", "src/export.py", *arguments]),
    )
    result = exporter.run(found, asked, screen)
    screen.print(f"exported: {output}: {result.kind} in {result.dtype}, from {found.folder}")
    screen.print(f"verified in a fresh process: {result.reloaded}; it answers {result.answer!r}")
    if result.gguf is not None:
        screen.print(f"GGUF: {output.name}-{options.gguf.upper()}.gguf: {result.gguf}")
    if options.push is not None:
        screen.print(f"pushed: {hub.push(output, options.push, options.public)}")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options. Raise UserError for any other argument."""
    parser = cli.Parser(__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--output", type=Path)
    for name in ("--merge", "--public", "--force", "--trust_remote_code"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--gguf", nargs="?", const="f16", choices=GGUF_TYPES)
    parser.add_argument("--push")
    parser.add_argument("--base")
    options = parser.parse_args(arguments)
    if options.public and options.push is None:
        raise UserError("--public: is about the repository of --push ID; add it")
    return options


def default_output(found: object) -> Path:
    """Return exports/ and a name made of the run's and of the step's."""
    from gearbox.exporting.source import Source

    assert isinstance(found, Source)
    if found.manifest is not None:
        run = found.run.name if found.run is not None else "checkpoint"
        return OUTPUT / f"{run}-step-{found.manifest.step}"
    return OUTPUT / (found.run.name if found.run is not None else found.folder.resolve().name)


if __name__ == "__main__":
    cli.run(main)
