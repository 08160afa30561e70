"""Prove the model families that people use, and write a card of each to docs/models/ (`make cards`).

A family is rehearsed from the config.json of a common size. Its tokenizer has bytes, and the special tokens of its chat
template. Full training takes every step of `src/prove.py`. The other methods train and export. A killed
command resumes: the folder .cards keeps what is done.

python tests/support/cards.py [FAMILY ...]     run all families, or only the named ones

Without a run, `python tests/support/cards.py --memory` computes the predicted memory of the committed cards again.
"""

import json
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import yaml

# Without pytest, the script must add these folders itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from support.environment import ROOT  # isort: skip  first: it sets variables that other imports read

import train
from gearbox.config.gear import gear_names
from gearbox.config.loader import load_recipe
from gearbox.console import make_console
from gearbox.errors import UserError
from gearbox.planning import strategy
from gearbox.planning.architecture import Architecture
from gearbox.planning.gpus import GIB, Gpu
from gearbox.proving import page, settings
from gearbox.proving.prover import RECORD, Prover, Request, locked, row_tokens
from gearbox.proving.record import GearResult, Proof, read_proof
from support.methods import METHODS as ALL_METHODS
from support.template_files import TemplateFile, listed
from support.templates import make_tokenizer

CARDS = ROOT / "docs" / "models"
WORK = ROOT / ".cards"
ARCHITECTURES = ROOT / "recipes" / "architectures"
METHODS = {name: ALL_METHODS[name] for name in ("full", "lora", "dora", "qlora")}
PLANNED = ("full", "lora", "qlora")
COUNTS = (1, 2, 4, 8)  # GPUs of one machine
ANY_SIZE = Gpu("GPU of any size", 2**62)
SIMILAR = {"zero3_nvme": "zero3_offload"}  # the first is refused for what the machine of the cards lacks
Marks = dict[tuple[str, str], str]  # words by gear and method
SETTINGS = {
    "batch": {"rows": 8, "row_tokens": 512, "micro_rows": 1},
    "optim": {"lr": 2e-4},
}
PLAN = ("batch.rows=64", "batch.row_tokens=2048", "batch.micro_rows=1", "perf.checkpointing=full")


class Family(NamedTuple):
    """A family that people use."""

    title: str
    rehearsed: str
    """The Hub id whose config is rehearsed."""
    template: str
    """Its chat template in templates.tsv; empty for a tokenizer that is on this machine."""
    planned: tuple[str, ...]
    """Hub ids of common sizes."""
    note: str = ""
    """Difference between this template and the family's own."""
    edits: str = "none"
    """What a user must change."""
    has_system: bool = True
    """False if the template omits the system turn, so that Gearbox refuses such chats."""


NO_SYSTEM = (
    "none for chats without a system turn; the template omits that turn, so it is refused (`data.chat_template`)"
)
FAMILIES = {
    "llama3": Family(
        "Llama 3", "meta-llama/Llama-3.1-8B-Instruct", "llama.cpp/meta-llama-Llama-3.1-8B-Instruct",
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"),
    ),
    "qwen2_5": Family(
        "Qwen 2.5", "Qwen/Qwen2.5-7B-Instruct", "llama.cpp/Qwen-Qwen2.5-7B-Instruct",
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-32B-Instruct"),
    ),
    "qwen3": Family(
        "Qwen 3", "Qwen/Qwen3-4B", "llama.cpp/Qwen-Qwen3-0.6B", ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"),
        "The template is that of Qwen3-0.6B.",
    ),
    "gemma3": Family(
        "Gemma 3", "google/gemma-3-1b-it", "trl/gemma3", ("google/gemma-3-1b-it",),
        edits="none; the model is gated, so accept its terms on the Hub and export HF_TOKEN",
    ),
    "mistral": Family(
        "Mistral", "mistralai/Mistral-7B-Instruct-v0.3", "openvino/mistralai--Mistral-7B-Instruct-v0.3",
        ("mistralai/Mistral-7B-Instruct-v0.3",), edits=NO_SYSTEM, has_system=False,
    ),
    "phi": Family("Phi", "microsoft/phi-4", "openvino/microsoft--phi-4", ("microsoft/phi-4",)),
    "olmo2": Family(
        "OLMo 2", "allenai/OLMo-2-1124-7B-Instruct", "openvino/allenai--OLMo-7B-0724-Instruct-hf",
        ("allenai/OLMo-2-1124-7B-Instruct",),
        "The template is that of OLMo-7B-0724-Instruct, because that of OLMo 2 is not listed.",
        NO_SYSTEM, has_system=False,
    ),
    "smollm2": Family(
        "SmolLM 2", "models/smollm2-135m", "",
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
        edits="none; `make smollm2` fetches `models/smollm2-135m`, which is SmolLM2-135M-Instruct",
    ),
    "qwen3_moe": Family(
        "Qwen 3, mixture of experts", "Qwen/Qwen3-30B-A3B", "llama.cpp/Qwen-Qwen3-0.6B", ("Qwen/Qwen3-30B-A3B",),
        "The template is that of Qwen3-0.6B.",
    ),
}  # fmt: skip


def template_of(family: Family) -> TemplateFile:
    (found,) = [file for file in listed() if file.name == family.template]
    return found


def write_recipe(name: str) -> Path:
    """Write a family's folder: its recipe, its chats, and its config with a tokenizer."""
    family, folder = FAMILIES[name], WORK / name
    folder.mkdir(parents=True, exist_ok=True)
    chats = (ROOT / "recipes/chats.jsonl").read_text().splitlines()
    chats = [line for line in chats if family.has_system or '"system"' not in line]
    longest = max(chats, key=lambda line: line.count("role"))  # first, since the card shows it
    (folder / "chats.jsonl").write_text("\n".join([longest, *(line for line in chats if line != longest)]) + "\n")
    model = ROOT / family.rehearsed
    if family.template:
        model, file = folder / "model", template_of(family)
        tokenizer = make_tokenizer(file.read(), file.bos or None, file.eos or None)
        tokenizer.save_pretrained(model)
        shutil.copy(ARCHITECTURES / f"{family.rehearsed.replace('/', '--')}.json", model / "config.json")
    recipe = folder / f"{name}.yaml"
    content = {"model": {"name": str(model)}, "data": {"path": str(folder / "chats.jsonl")}, **SETTINGS}
    recipe.write_text(yaml.safe_dump(content | {"train": {"steps": settings.STEPS}}, sort_keys=False))
    return recipe


def request_of(name: str, method: str, gears: list[str]) -> Request:
    """Return what to prove of a family with a method."""
    path = write_recipe(name)
    given = [f"run.dir={WORK / name}", *METHODS[method]]
    recipe, loaded = load_recipe(path, given), settings.load_gears(gears)
    changes = settings.changes_of_proof(recipe, loaded, row_tokens(recipe))
    given += settings.comparison_overrides(recipe, given, settings.STEPS, settings.STEPS // 2)
    given += [*(f"{one.key}={one.value}" for one in changes), "run.rehearse=true"]
    return Request(
        path, load_recipe(path, given), [str(path), *given], changes, loaded, WORK / name / method, method == "full"
    )


def all_gears() -> list[str]:
    return sorted(gear_names(), key=lambda name: name != "single")


def prove(name: str, method: str, gears: list[str]) -> Proof:
    """Return the proof of a family with a method. One with the same code is not run again."""
    request, screen = request_of(name, method, gears), make_console(speaks=True)
    done = read_proof(request.folder / RECORD)
    if done is not None and done.is_complete and done.key == request.key():
        return done
    screen.print(f"{name}, {method}:")
    with locked(request.folder):
        return Prover(request, train.main, screen).prove()


def result_of(proof: Proof, gear: str) -> GearResult:
    (one,) = [one for one in proof.gears if one.gear == gear]
    return one


def word_of(result: GearResult) -> str:
    """Return the word of a gear with a method: yes, refused or failed."""
    return "yes" if result.outcome == "ran" else result.outcome


def memory(family: Family, marks: Marks) -> str:
    """Return a table of the predicted peak by gear for each common size and method, if the family runs so."""
    path = ROOT / "recipes" / "fsdp_2gpu.yaml"
    recipe = load_recipe(path, [*PLAN])
    columns: dict[str, dict[str, str]] = {}
    counts: dict[str, str] = {}
    for size in family.planned:
        config = json.loads((ARCHITECTURES / f"{size.replace('/', '--')}.json").read_text())
        shape = Architecture.of(config)
        for method in PLANNED:
            planned = strategy.with_method(strategy.with_values(recipe, "model", name=size), method)
            cells = columns.setdefault(f"{size.rpartition('/')[2]} {method}", {})
            for count in COUNTS:  # tp runs on as many GPUs as its degree
                found, _ = strategy.options(shape, planned, path, strategy.Machines(ANY_SIZE, count))
                found = [one for one in found if marks[SIMILAR.get(one.gear.name, one.gear.name), method] == "yes"]
                cells |= {one.gear.name: f"{one.prediction.peak_bytes / GIB:,.1f}" for one in found}
                counts |= {one.gear.name: str(count) for one in found}
    lines = [f"| gear | GPUs | {' | '.join(columns)} |", f"|---{'|---:' * (len(columns) + 1)}|"]
    for gear in all_gears():
        figures = [cells.get(gear, "-") for cells in columns.values()]
        lines.append(f"| `{gear}` | {' | '.join([counts.get(gear, '-'), *figures])} |")
    return "\n".join(lines)


def methods_table(proofs: dict[str, Proof], reasons: list[str]) -> list[str]:
    """Return the table of gears and methods. Add the reasons of refusals and failures to `reasons`."""
    lines = [f"| gear | ranks | {' | '.join(proofs)} |", "|---" * (len(proofs) + 2) + "|"]
    for one in proofs["full"].gears:
        results = [result_of(proof, one.gear) for proof in proofs.values()]
        cells = [word_of(result) + page.marks(result, reasons) for result in results]
        lines.append(f"| `{one.gear}` | {one.num_ranks} | {' | '.join(cells)} |")
    return lines


def for_readers(problem: str, name: str, rehearsed: str) -> str:
    """Return a problem without the places of this run, which a reader does not have."""
    for place in ("command line: ", f".cards/{name}/{name}.yaml: "):
        problem = problem.removeprefix(place)
    return problem.replace(f".cards/{name}/model", rehearsed)


def worst(proof: Proof) -> str:
    """Return the largest differences of loss and gradient norm, over all gears."""
    found = [one.parity.largest for one in proof.gears if one.parity]
    figures = [page.exact(max(one[name] for one in found)) for name in ("loss", "gradient norm")] if found else []
    return f"{figures[0]} of the loss, {figures[1]} of the gradient norm" if found else "no gear ran"


def card(name: str, proofs: dict[str, Proof]) -> str:
    """Return the page of a family."""
    family, full = FAMILIES[name], proofs["full"]
    for result in (result for proof in proofs.values() for result in proof.gears):
        result.problems = [for_readers(problem, name, family.rehearsed) for problem in result.problems]
    marks: Marks = {(one.gear, method): word_of(one) for method, proof in proofs.items() for one in proof.gears}
    reasons: list[str] = []
    methods = methods_table(proofs, reasons)
    table = page.table(full, reasons)  # its numbers are those of the first table
    facts = full.facts
    assert facts is not None
    ran = [one for one in full.gears if one.outcome == "ran"]
    exact = [one for one in ran if one.resumed is not None and one.resumed.is_exact]
    path = write_recipe(name)
    note = family.note or "The template is the family's own."
    tokenizer = "The tokenizer and its chat template are the model's own."
    if family.template:
        file = template_of(family)
        tokenizer = f"The tokenizer has bytes, and the template's special tokens. {note}"
        tokenizer += f" `tests/support/templates.tsv` lists it as `{file.name}`."
    given = yaml.safe_load(path.read_text()) | {"model": {"name": family.rehearsed}, "data": {"path": "mine.jsonl"}}
    return PAGE.format(
        title=family.title,
        family=facts.family,
        made=full.made,
        rehearsed=family.rehearsed,
        recipe=yaml.safe_dump(given, sort_keys=False).strip(),
        num_ran=len(ran),
        num_exact=len(exact),
        methods="\n".join([*methods, *page.notes(reasons)]),
        parity="\n".join(f"- {method}: {worst(proof)}." for method, proof in proofs.items()),
        table="\n".join(table),
        legend=page.LEGEND,
        shown=facts.shown,
        tokenizer=textwrap.fill(f"Tokens between « and » are trained. {tokenizer}", 120, break_on_hyphens=False),
        edits=textwrap.fill(f"Edits needed: {family.edits}.", 120, break_on_hyphens=False),
        memory=memory(family, marks),
    )


PREDICTED = "the runs above, so it has figures.\n\n"
PAGE = """# {title}

```bash
make cards
```

{edits}

The recipe below trained under {num_ran} gears, with random weights in a narrow copy of
`{rehearsed}` (family `{family}`). Made on {made}.

```yaml
{recipe}
```

## Gears and methods

{methods}

The largest difference between gears:

{parity}

## Full training under each gear

After a resume under the same gear, {num_exact} of {num_ran} gears equal the uninterrupted run bit for bit.

{table}

{legend}

## What is trained

{tokenizer}

```text
{shown}
```

## Predicted memory

Peak of one GPU in GiB, on 8 GPUs or as many as the gear's file allows. A step has 64 rows of 2,048 tokens, one row in a
micro-batch, and `perf.checkpointing` is full. `python src/plan.py` computes the same for a recipe. A dash marks what
the gear refuses. Only a missing library made `zero3_nvme` refuse the runs above, so it has figures.

{memory}

## Read next

- [Model cards](README.md): the other families
- [Model families](../models.md): every family of transformers under some gears
- [Proof of a recipe](../prove.md): make such a page for your own recipe
"""


def read_marks(name: str) -> Marks:
    """Return the words of a committed card by gear and method."""
    section = (CARDS / f"{name}.md").read_text().partition("## Gears and methods")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {
        (row[0].strip("`"), method): re.sub(r" \[\d+\]", "", word)
        for row in rows
        for method, word in zip(METHODS, row[2:], strict=True)
    }


def memory_of_card(name: str) -> tuple[str, str, str]:
    """Return a committed card in three parts: before, in and after its table of predicted memory."""
    text = (CARDS / f"{name}.md").read_text()
    before, _, rest = text.partition(PREDICTED)
    table, _, after = rest.partition("\n\n## ")
    return before + PREDICTED, table, "\n\n## " + after


def write_memory() -> None:
    """Compute the predicted memory of each committed card again."""
    for name, family in FAMILIES.items():
        before, _, after = memory_of_card(name)
        (CARDS / f"{name}.md").write_text(before + memory(family, read_marks(name)) + after)


def write_index() -> None:
    """Write the list of cards."""
    rows = []
    for name, family in FAMILIES.items():
        if (CARDS / f"{name}.md").is_file():
            marks = read_marks(name)
            counts = [sum(marks[gear, method] == "yes" for gear, one in marks if one == method) for method in METHODS]
            rows.append(f"| [{family.title}]({name}.md) | {' | '.join(map(str, counts))} |")
    (CARDS / "README.md").write_text(
        INDEX.format(
            methods=" | ".join(METHODS), rule="---|" * (len(METHODS) + 1), rows="\n".join(rows), total=len(gear_names())
        )
    )


INDEX = """# Model cards

```bash
make cards
```

Each card shows what one model family did under every gear and method. `make cards` writes it by running. The table
counts the gears that ran, of {total}; a card gives the reason for each of the others.

| family | {methods} |
|{rule}
{rows}

## Read next

- [Proof of a recipe](../prove.md): make such a page for your own recipe
- [Model families](../models.md): every family of transformers under some gears
- [Gears and methods](../matrix.md): every gear with every method
"""


def main(named: list[str]) -> int:
    if named == ["--memory"]:
        write_memory()
        return 0
    CARDS.mkdir(exist_ok=True)
    failed = []
    for name in named or FAMILIES:
        try:
            proofs = {method: prove(name, method, all_gears()) for method in METHODS}
        except UserError as error:
            failed.append(f"{name}: {error}")
            continue
        (CARDS / f"{name}.md").write_text(card(name, proofs))
        write_index()
        failed += [f"{name} {method}" for method, proof in proofs.items() if proof.of("failed")]
        print(f"wrote {CARDS / name}.md", flush=True)
    print(f"{len(failed)} fail: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
