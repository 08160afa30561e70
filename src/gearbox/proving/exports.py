"""Compare exported models tensor by tensor, and reload them in a fresh process.

As a script, it loads each folder and prints how far its logits are from those of the first, one JSON object a line:

    python -m gearbox.proving.exports TOKENS TRUST FOLDER ...

TOKENS is a JSON list of token ids. TRUST is true or false: whether to run the code shipped with the model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from gearbox.errors import UserError, one_line, one_line_with_type
from gearbox.launch.environment import python_path, without_launcher
from gearbox.proving.record import Exported


def compare(reference: Path, other: Path) -> Exported:
    """Return how the tensors of an exported model differ. Raise UserError if they have other names or shapes."""
    expected, found = _places(reference), _places(other)
    if {*expected} != {*found}:
        missing = sorted({*expected} ^ {*found})
        raise UserError(f"the exported models have different tensors, such as {missing[0]}")
    num_equal, largest = 0, 0.0
    for name in expected:
        ours, theirs = _read(found[name], name), _read(expected[name], name)
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            raise UserError(f"{name} is exported as {_kind(ours)}, but by the first gear as {_kind(theirs)}")
        if torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            num_equal += 1
        else:
            largest = max(largest, (ours.double() - theirs.double()).abs().max().item())
    return Exported(num_tensors=len(expected), num_equal=num_equal, largest=largest)


def _places(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    places: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    return places


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def reload(folders: Sequence[Path], tokens: list[int], trust_remote_code: bool) -> dict[str, float | str]:
    """Load the models in a fresh process. Return the difference of each one's logits, or why it cannot be loaded."""
    command = [sys.executable, "-m", "gearbox.proving.exports", json.dumps(tokens), json.dumps(trust_remote_code)]
    environment = without_launcher() | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()}
    done = subprocess.run([*command, *map(str, folders)], env=environment, capture_output=True, text=True, check=False)
    found: dict[str, float | str] = {}
    for line in done.stdout.splitlines():
        folder, result = json.loads(line)
        found[folder] = result
    errors = done.stderr.strip().splitlines()
    ended = f"the fresh process ended with code {done.returncode}: {errors[-1] if errors else ''}"
    return {str(folder): found.get(str(folder), ended) for folder in folders}


def differences(
    folders: Sequence[Path], tokens: list[int], trust_remote_code: bool
) -> Iterator[tuple[str, float | str]]:
    """Yield each folder with the difference of its logits from the first one's, or with its problem."""
    from gearbox.model.loading import load_for_answers

    reference: torch.Tensor | None = None
    for folder in folders:
        try:
            model, _ = load_for_answers(folder, trust_remote_code)
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([tokens])).logits.double()
        except UserError as error:
            yield str(folder), one_line(error)
            continue
        except Exception as error:  # any code of a family
            yield str(folder), one_line_with_type(error)
            continue
        reference = logits if reference is None else reference
        difference = ((logits - reference).abs().max() / reference.abs().max()).item()
        yield str(folder), difference if logits.isfinite().all() else "its logits are not finite"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    given, trusts, *names = sys.argv[1:]
    for line in differences([Path(name) for name in names], json.loads(given), json.loads(trusts)):
        print(json.dumps(line), flush=True)
