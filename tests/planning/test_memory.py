"""Compare the closed form of a step's memory with published figures and with what theory asks of it."""

from dataclasses import replace

import pytest

from gearbox import ROOT
from gearbox.config.recipe import Model
from gearbox.planning.architecture import Architecture, read_config
from gearbox.planning.layer_memory import Setup, Shares
from gearbox.planning.memory import predict, predicted
from support.published import PUBLISHED, sharded, table
from support.simulations import job_of

SHAPE = Architecture.of(read_config(Model(name="Qwen/Qwen2.5-7B-Instruct")))
SMALL_GEMMA = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 999,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
FULL = Setup("full", 4096, checkpointing="full")


def test_most_published_figures_are_within_15_percent():
    ratios = [one.predicted_gib() / one.gib for one in PUBLISHED]
    assert sum(abs(ratio - 1) < 0.15 for ratio in ratios) >= 14
    assert all(one.difference for one, ratio in zip(PUBLISHED, ratios, strict=True) if abs(ratio - 1) >= 0.15)


def test_the_table_of_the_docs_is_the_current_one():
    assert table() in (ROOT / "docs" / "plan.md").read_text()


def test_a_trained_weight_takes_16_bytes_and_ranks_share_them():
    alone, of_eight = predicted(SHAPE, FULL), predicted(SHAPE, replace(FULL, **sharded(8)))
    assert alone.state_bytes == pytest.approx(16 * SHAPE.num_weights, rel=1e-6)
    assert of_eight.state_bytes == pytest.approx(alone.state_bytes / 8, rel=1e-6)
    zero2 = replace(FULL, zero_stage=2, casts=False, shares=Shares(1, 8, 8))
    assert predicted(SHAPE, zero2).state_bytes == pytest.approx((2 + 16 / 8) * SHAPE.num_weights, rel=1e-6)


@pytest.mark.parametrize("setup", [FULL, replace(FULL, **sharded(8)), replace(FULL, method="lora")])
def test_memory_grows_with_tokens_and_shrinks_with_checkpointing(setup):
    sizes = [predicted(SHAPE, replace(setup, num_tokens=count)).peak_bytes for count in (512, 4096, 32768)]
    assert sizes == sorted(sizes)
    by_kind = [
        predicted(SHAPE, replace(setup, checkpointing=kind, num_tokens=32768)).peak_bytes
        for kind in ("none", "full", "offload")
    ]
    assert by_kind == sorted(by_kind, reverse=True)


def test_terms_add_up_to_the_peak():
    found = predict(SHAPE, job_of("fsdp_2gpu", "fsdp"))
    assert sum(found.terms.values()) == found.peak_bytes
    assert min(found.terms.values()) >= 0
    assert found.state_bytes <= found.allocated_bytes < found.peak_bytes


def test_adapted_experts_are_trained_and_made_for_each_pass():
    """PEFT adds the product of both adapters to all experts of a layer: with 128 experts that is much memory."""
    mixture = Architecture.of(read_config(Model(name="Qwen/Qwen3-30B-A3B")))
    whole, attention = (
        predicted(mixture, Setup("lora", 4096, adapter=(16, names))) for names in (None, ("q_proj", "v_proj"))
    )
    of_experts = 3 * 128 * 768 * 2048
    assert whole.terms["activations"] - attention.terms["activations"] > 48 * 2 * of_experts
    of_one = 32 * (2048 + 2 * 768) + 16 * (768 + 2048)
    assert whole.state_bytes - attention.state_bytes > 48 * 16 * 128 * of_one


def test_attention_without_sdpa_keeps_scores():
    gemma = Architecture.of({"model_type": "gemma2", **SMALL_GEMMA})
    kept = [predicted(gemma, Setup("lora", 4096, row_tokens=row)).terms["activations"] for row in (2048, 4096)]
    assert kept[1] - kept[0] == pytest.approx(8 * 2 * 8 * 4096 * 2048, rel=0.01)


def test_a_tied_embedding_adds_gradients_at_the_end():
    small = {**SMALL_GEMMA, "model_type": "llama", "vocab_size": 256_000}
    tied = predicted(Architecture.of({**small, "tie_word_embeddings": True}), Setup("full", 256))
    assert tied.moment == "the backward pass of the embedding"
    assert tied.terms["head"] == 3 * 4 * 256_000 * 512


def test_a_pipeline_is_as_large_as_its_largest_stage():
    whole = predict(SHAPE, job_of("fsdp_2gpu", "pp"))
    assert whole.state_bytes < predicted(SHAPE, FULL).state_bytes
    assert whole.checkpoint_bytes == pytest.approx(12 * SHAPE.num_weights, rel=1e-6)


def test_nf4_and_paged_state_are_small():
    lora, qlora = (predicted(SHAPE, replace(FULL, method=method)) for method in ("lora", "qlora"))
    assert qlora.terms["weights"] < 0.4 * lora.terms["weights"]
    paged = predicted(SHAPE, replace(FULL, optimizer="paged_adamw"))
    assert paged.terms["optimizer"] == 0
    assert paged.checkpoint_bytes == predicted(SHAPE, FULL).checkpoint_bytes
