"""Rehearse every model family of transformers under several gears, and write docs/models.md (`make zoo`).

A family is rehearsed as by a user who has only its config.json. Each rehearsal trains two steps on warm forked ranks.
`make zoo` skips what has passed, according to .zoo/results.json, until all have passed.

python tests/support/zoo.py [FAMILY ...]     run all families, or only the named ones
"""

import json
import math
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

# Without pytest, the script must add these folders itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from gearbox import ROOT
from support import matrix, ranks
from support.documents import make_chats
from support.methods import METHODS

TABLE = ROOT / "docs" / "models.md"
RESULTS = ROOT / ".zoo" / "results.json"
COLUMNS = {  # gear and method
    "single": ("single", "full"),
    "ddp": ("ddp", "full"),
    "fsdp": ("fsdp", "full"),
    "zero3": ("zero3", "full"),
    "lora": ("single", "lora"),
    "qlora": ("single", "qlora"),
}
SETTINGS = {
    "model.init": "random", "run.rehearse": "true", "batch.rows": "4", "batch.row_tokens": "64",
    "batch.micro_rows": "2", "train.steps": "2", "schedule.name": "constant", "schedule.warmup": "0",
    "optim.lr": "5e-3", "optim.eps": "1e-3", "eval.fraction": "0", "eval.samples": "0", "save.every": "0",
}  # fmt: skip
DECODERS = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert roberta
    roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod""".split()
INDEXER = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}  # fmt: skip
# What a published model sets, but the default config of its family leaves out.
GIVEN = {family: {"is_decoder": True} for family in DECODERS} | {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None}
    },
    "dbrx": {"attn_config": {"rope_theta": 5e5, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "emu3": {"vocabulary_map": {"<image>": 200}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 8 + ["conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}


class Result(NamedTuple):
    """The result of a rehearsal: its losses, or the reason for their absence."""

    losses: tuple[float, ...] = ()
    packs: bool = True
    """Whether rows hold several documents."""
    refusal: str = ""
    failure: str = ""
    """The end of the output of a run that ended with a traceback."""

    def mark(self, single: "Result") -> str:
        """Return a word for the result, given the result of the same family and method on one device."""
        if self.refusal:
            return "refused"
        if self.failure or not all(map(math.isfinite, self.losses)):
            return "fails"
        return "yes" if matrix.close([*self.losses], [*single.losses]) else "differs"


class Zoo:
    """Rehearse families below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chats = make_chats(folder / "chats.jsonl")

    def family(self, name: str) -> dict[str, Result]:
        """Return a family's results by column."""
        return {column: self.rehearse(name, column) for column in COLUMNS}

    def rehearse(self, family: str, column: str) -> Result:
        if not (self.folder / family).exists():
            write_config(family, self.folder / family)
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[family]]  # imports it before the fork
        gear, method = COLUMNS[column]
        runs = self.folder / "runs"
        places = {"model.name": str(self.folder / family), "run.dir": str(runs), "data.path": str(self.chats)}
        settings = [f"{key}={value}" for key, value in (SETTINGS | places).items()]
        number = 1 if gear == "single" else 2
        outcome = ranks.run_ranks(gear, ["recipes/tiny.yaml", *settings, *METHODS[method]], runs, number)
        if 2 in outcome.codes:
            result = Result(refusal=matrix.refusal(outcome.output))
        elif set(outcome.codes) != {0}:
            result = Result(failure=outcome.output[-3000:])
        else:
            result = Result(tuple(outcome.losses), "packing is off" not in outcome.output)
        shutil.rmtree(runs, ignore_errors=True)
        return result


def write_config(family: str, folder: Path) -> None:
    """Write the config.json of a family.

    Larger weights than usual let the loss of a token clearly depend on the tokens before it.
    """
    config = transformers.CONFIG_MAPPING[family](**GIVEN.get(family, {}))
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for key in ("initializer_range", "init_std"):
            if hasattr(part, key):
                setattr(part, key, 0.2)
    config.save_pretrained(folder)


def marks(results: dict[str, Result]) -> dict[str, str]:
    """Return a word for each column of a family."""
    reference = {"ddp": "single", "fsdp": "single", "zero3": "single"}
    return {column: result.mark(results[reference.get(column, column)]) for column, result in results.items()}


def general(refusal: str, family: str) -> str:
    """Return a message without the family's name and measured numbers, which is the same for other families."""
    return re.sub(r"by [\d.]+", "by ...", re.sub(rf"\b{family}\b", "FAMILY", refusal))


def read_table() -> dict[str, dict[str, str]]:
    """Return the committed marks by family and column."""
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    return {
        row[0].strip("`"): dict(zip(COLUMNS, (re.sub(r" \[\d+\]", "", mark) for mark in row[2:-1]), strict=True))
        for row in rows
    }


def write_table(zoo: dict[str, dict[str, Result]]) -> None:
    counts = {column: Counter(marks(results)[column] for results in zoo.values()) for column in COLUMNS}
    summary = [
        f"| {column} | {len(zoo)} | {count['yes']} | {count['refused']} | {count['differs'] + count['fails']} |"
        for column, count in counts.items()
    ]
    reasons: list[str] = []
    rows = []
    for family, results in zoo.items():
        cells = []
        for column, mark in marks(results).items():
            why = general(results[column].refusal, family) if mark == "refused" else "see what `make zoo` prints"
            if mark != "yes" and why not in reasons:
                reasons.append(why)
            cells.append(mark if mark == "yes" else f"{mark} [{reasons.index(why) + 1}]")
        packs = ("several" if results["single"].packs else "one") if cells[0] == "yes" else "-"
        rows.append(f"| `{family}` | {CLASSES[family]} | {' | '.join(cells)} | {packs} |")
    footnotes = [f"{i}. {why}" for i, why in enumerate(reasons, start=1)]
    TABLE.write_text(
        PAGE.format(
            made=matrix.made(),
            tolerance=matrix.TOLERANCE,
            columns=" | ".join(COLUMNS),
            summary="\n".join(summary),
            rule="---|" * (len(COLUMNS) + 3),
            rows="\n".join(rows),
            footnotes="\n".join(footnotes),
        )
    )


PAGE = """# Model families

This table shows which model families train under which gear (an Accelerate config file). It is generated by rehearsing
every class of transformers' `MODEL_FOR_CAUSAL_LM_MAPPING`:

```bash
make zoo
```

{made}

A rehearsal starts from the default config of a family, shrunk to a few narrow layers with random weights. A run marked
`yes` passed the checks of its loss, and trained two steps. Under ddp, fsdp and zero3, on two ranks, its losses equal
those of one device within {tolerance:g}, in fp32. A `refused` run stopped before training with the message in the
footnote. The last column shows how many documents share a row: several, or one where they would affect each other.

| column | families | run | refused | fail |
|---|---|---|---|---|
{summary}

Some default configs leave out what every published model sets, such as `is_decoder` of BERT. `tests/support/zoo.py`
lists what is added. A composite model (with a vision tower, for example) trains its text.

## Families

| family | class | {columns} | documents in a row |
|{rule}
{rows}

{footnotes}

## Read next

- [Model cards](models/README.md): what the families that people use did under every gear
- [Methods](methods.md): full training, LoRA, QLoRA and DoRA
- [Gears and methods](matrix.md): every gear with every method
- [Mixtures of experts](moe.md): what is different for a model with a router
"""


def prepare(patches: pytest.MonkeyPatch) -> None:
    """Make rehearsals quick: do not load models back, and do not wait long for the other ranks of a refused one."""
    ranks.skip_loading_back(patches)
    patches.setattr(ranks, "PATIENCE", 3)


def main(named: list[str]) -> int:
    prepare(pytest.MonkeyPatch())
    RESULTS.parent.mkdir(exist_ok=True)
    cached = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    zoo = {name: {column: Result(*one) for column, one in results.items()} for name, results in cached.items()}
    with tempfile.TemporaryDirectory() as folder:
        keeper = Zoo(Path(folder))
        for family in CLASSES:
            found = marks(zoo[family]) if family in zoo else {}
            if family not in named if named else found and {*found.values()} <= {"yes", "refused"}:
                continue
            zoo[family] = keeper.family(family)
            RESULTS.write_text(json.dumps(zoo, indent=1))
            for column, mark in marks(zoo[family]).items():
                result = zoo[family][column]
                print(
                    f"{family:24} {column:7} {mark:8} {result.refusal or result.failure or result.losses}", flush=True
                )
    if named:
        return 0
    write_table({family: zoo[family] for family in CLASSES})
    failed = [family for family in CLASSES if {*marks(zoo[family]).values()} & {"fails", "differs"}]
    if not failed:
        RESULTS.unlink()  # the next `make zoo` starts over
    print(f"{len(failed)} families fail: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
