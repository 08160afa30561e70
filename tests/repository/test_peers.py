"""The comparison with other trainers computes its ratios, slopes and tables correctly."""

import sys

import pytest

from gearbox import ROOT

pytestmark = pytest.mark.unit


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    from peers import figures, inside

    return figures, inside


def sample(system: str, cpu: float, peak: int) -> dict:
    """Return a run of two steps, each of 1,000 tokens and `cpu` seconds."""
    steps = [
        {"tokens": 1250, "real_tokens": 1000, "targets": 800, "loss": 2.0, "cpu": n * cpu, "wall": 50 + n * cpu,
         "all_cpu": n * cpu}
        for n in (1, 2)
    ]  # fmt: skip
    return {"system": system, "case": "10m-masked", "round": 0, "steps": steps, "spawned": 50.0, "matmul_rate": 1e11,
            "peak_bytes": peak, "device_bytes": 0}  # fmt: skip


def test_a_ratio_above_1_means_that_gearbox_is_better(peers):
    figures, _ = peers
    ours = [{"round": n, "cpu_rate": 100.0 * (n + 2), "peak_gb": 1.0} for n in range(3)]
    theirs = [{"round": n, "cpu_rate": 100.0, "peak_gb": 4.0} for n in (0, 2)]  # its second round failed
    assert figures.ratio(ours, theirs, "cpu_rate") == "3.00 x (2.00 to 4.00)"
    assert figures.ratio(ours, theirs, "peak_gb") == "4.00 x (4.00 to 4.00)"
    assert figures.ratio([], theirs, "cpu_rate") == ""


def test_a_table_has_the_medians_the_ratios_and_what_did_not_run(peers):
    figures, _ = peers
    model = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 3,
             "num_key_value_heads": 3, "vocab_size": 49152}  # fmt: skip
    failed = {"system": "axolotl", "case": "10m-masked", "round": 0, "error": "cannot be installed: no wheel"}
    record = {"samples": [sample("gearbox", 2.0, 10**9), sample("trl", 4.0, 3 * 10**9), failed],
              "models": {"llama-10m": model}, "chats": {"context": 100.0}}  # fmt: skip
    gearbox, trl, axolotl = figures.table(record, "10m-masked")[2:]
    assert gearbox.startswith("| Gearbox | 500 (500 to 500) | 500 |")
    assert trl.endswith("| 2.00 x (2.00 to 2.00) | 3.00 x (3.00 to 3.00) |")
    assert "did not run: cannot be installed: no wheel" in axolotl
    assert figures.checks(record, "10m-masked")[2] == "| Gearbox | 2.00 | 80% | 20% |"


def test_the_flops_of_a_token_are_counted(peers):
    figures, _ = peers
    model = {"hidden_size": 2, "intermediate_size": 3, "num_hidden_layers": 1, "num_attention_heads": 1,
             "num_key_value_heads": 1, "vocab_size": 10}  # fmt: skip
    full = figures.CASES["10m-full"]
    assert figures.flops_of_a_token(model, full, 0, 0) == 6 * (4 * 4 + 3 * 6)
    assert figures.flops_of_a_token(model, full, 5, 0.5) == 6 * (34 + 10) + 3 * 4 * 2 * 5


def test_a_slope_is_the_exponent(peers):
    _, inside = peers
    assert inside.slope([(x, 7 * x**-0.5) for x in (1, 2, 4, 16)]) == pytest.approx(-0.5)


def test_operators_belong_to_groups(peers):
    _, inside = peers
    times = {
        "aten::mm<aten::linear": 5.0, "aten::mm<_CrossEntropySum": 2.0, "aten::mul": 1.0, "aten::view": 1.0,
        "aten::_fused_adamw_<Optimizer.step#AdamW.step": 1.0,
    }  # fmt: skip
    assert inside.shares(times) == pytest.approx(
        {
            "matrix products of the layers": 0.5, "head and loss": 0.2, "norms, activations, copies": 0.1,
            "rest": 0.1, "optimizer": 0.1,
        }
    )  # fmt: skip
