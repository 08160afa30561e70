"""Rehearse every model family of transformers under several gears, and write docs/models.md (`make zoo`).

A family is rehearsed as a user would: from a folder with only its default config. `make zoo` resumes where it stopped.

python tests/support/zoo.py [FAMILY ...] [--gears single ddp]     run the named families again
"""

import argparse
import json
import math
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import transformers
from transformers import CONFIG_MAPPING

# Without pytest, the script must add these folders itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from gearbox import ROOT
from support import ranks
from support.documents import make_chats
from support.methods import METHODS
from support.ranks import run_ranks, skip_loading_back

RESULTS = ROOT / ".zoo" / "results.json"
COLUMNS = {
    "single": ("single", "full"),
    "ddp": ("ddp", "full"),
    "fsdp": ("fsdp", "full"),
    "zero3": ("zero3", "full"),
    "lora": ("single", "lora"),
    "qlora": ("single", "qlora"),
}
TOLERANCE = 1e-4
DECODERS = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod reformer""".split()
# Values that every published model of a family has, but its default config lacks.
MISSING = {
    **{family: {"is_decoder": True} for family in DECODERS},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    **{family: {"head_dim": 128} for family in ("hunyuan_v1_dense", "ministral")},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "nemotron": {"num_key_value_heads": 8},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 8 + ["conv"] * 8},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "clip_qkv": 8}},
    "cohere_compass_text": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": None,
        }
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
    },
}  # fmt: skip
MISSING["emu3"] = {"vocabulary_map": {"<image>": 200}}
MISSING["qwen4_exp"] = {"text_config": MISSING["qwen4_exp_text"]}


class Zoo:
    """Rehearse families below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chats = make_chats(folder / "chats.jsonl")

    def run(self, family: str, column: str) -> dict:
        """Rehearse a family; return its losses, or why it was refused or failed."""
        gear, method = COLUMNS[column]
        model = self.folder / "models" / family
        if not model.exists():
            try:
                config = CONFIG_MAPPING[family](**MISSING.get(family, {}))
                spread(config)
                config.save_pretrained(model)
                transformers.AutoTokenizer.from_pretrained(ROOT / "recipes/tiny").save_pretrained(model)
            except Exception as error:
                return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}", "output": ""}
        settings = {
            "model.name": str(model), "model.init": "random", "run.rehearse": "true",
            "run.dir": str(self.folder / "runs" / family / column), "data.path": str(self.chats),
            "batch.rows": "4", "batch.row_tokens": "64", "batch.micro_rows": "2", "train.steps": "2",
            "schedule.name": "constant", "schedule.warmup": "0", "optim.lr": "5e-3", "optim.eps": "1e-3",
            "eval.fraction": "0", "eval.samples": "0", "save.every": "0",
        }  # fmt: skip
        arguments = ["recipes/tiny.yaml", *(f"{key}={value}" for key, value in settings.items()), *METHODS[method]]
        started = time.monotonic()
        runs = Path(settings["run.dir"])
        outcome = run_ranks(gear, arguments, runs, 1 if gear == "single" else 2)
        seconds = round(time.monotonic() - started, 1)
        if set(outcome.codes) == {0}:
            result = {"losses": outcome.losses, "seconds": seconds}
            if "one document per row" in outcome.output:
                result["packing"] = False
        elif 2 in outcome.codes:
            result = {"refused": refusal(outcome.output), "seconds": seconds}
        else:
            result = {"failed": last_line(outcome.output), "codes": outcome.codes, "output": outcome.output[-4000:]}
        shutil.rmtree(runs, ignore_errors=True)
        return result


def spread(config: transformers.PretrainedConfig) -> None:
    """Draw larger weights than usual, so that a token's loss clearly depends on the tokens before it."""
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for key in ("initializer_range", "init_std"):
            if hasattr(part, key):
                setattr(part, key, 0.2)


def refusal(output: str) -> str:
    lines = [line for line in output.splitlines() if re.match(r"\S+\.(yaml|json): |[a-z]+\.[a-z_]+: ", line)]
    return re.sub(r"\S*/", "", lines[-1]) if lines else output[-500:]


def last_line(output: str) -> str:
    errors = [line for line in output.splitlines() if re.match(r"(\[rank\d\]: )?[\w.]+(Error|Exception|Exit)\b", line)]
    return errors[0][:300] if errors else output.strip()[-300:]


def warm(family: str) -> None:
    """Import the family's modules here, so that forked ranks need not."""
    try:
        config = CONFIG_MAPPING[family]
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config]
    except Exception:
        pass


def verdict(results: dict, column: str) -> str:
    result = results.get(column)
    if result is None:
        return ""
    if "failed" in result:
        return "fails"
    if "refused" in result:
        return "refused"
    gear, _ = COLUMNS[column]
    losses = result["losses"]
    if not all(map(math.isfinite, losses)):
        return "nan"
    if gear != "single":
        single = results.get("single", {}).get("losses")
        if single is None or losses != pytest.approx(single, rel=TOLERANCE):
            return "differs"
    return "yes"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS))
    parser.add_argument("--again", nargs="*", default=[])
    given = parser.parse_args()
    patches = pytest.MonkeyPatch()
    skip_loading_back(patches)
    patches.setattr(ranks, "PATIENCE", 3)
    RESULTS.parent.mkdir(exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        zoo = Zoo(Path(folder))
        for family in given.families or CLASSES:
            mine = results.setdefault(family, {})
            wanted = [c for c in given.columns if given.families or c not in mine or verdict(mine, c) in given.again]
            if not wanted:
                continue
            warm(family)
            for column in wanted:
                if column != "single" and verdict(mine, "single") != "yes" and not given.families:
                    continue
                mine[column] = zoo.run(family, column)
                mark = verdict(mine, column)
                why = mine[column].get("refused", mine[column].get("failed", mine[column].get("losses")))
                print(f"{family:24} {column:7} {mark:8} {mine[column].get('seconds', '')} {why}", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
