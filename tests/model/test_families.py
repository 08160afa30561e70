"""Test model families that differ from a plain decoder: each trains the same under every gear, or is refused."""

import pytest
import torch
from transformers import CONFIG_MAPPING

LONG_ROPE = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
    },
}


@pytest.fixture
def rehearse(train, tmp_path):
    """Return a function that rehearses a family from its default config: rehearse("mamba", "fsdp", *overrides)."""

    def call(family: str, gear: str, *more: str, **settings):
        CONFIG_MAPPING[family](**settings).save_pretrained(tmp_path / family)
        given = ("batch.rows=4", "batch.row_tokens=64", "train.steps=2", "eval.fraction=0")
        return train(gear, f"model.name={tmp_path / family}", *given, *more)

    return call


@pytest.mark.parametrize(
    ("family", "gears"),
    [
        ("mamba", ("fsdp",)),  # no attention heads, and a block of which a part is named as a layer
        ("deepseek_v3", ("fsdp", "zero3")),  # a persistent buffer, which accelerate cannot shard
        ("afmoe", ("ddp", "zero2")),  # a parameter without a gradient
        ("blt", ("ddp",)),  # a part without a gradient, and several configs that no config of the text unites
        ("longcat_flash", ("ddp",)),  # an empty row reaches no expert
        ("zamba", ("fsdp",)),  # layers that share their weights
        ("youtu", ("zero3",)),  # its initialization reads the shapes of weights
        ("inkling_text", ("ddp", "fsdp")),  # more than a head after the decoder
    ],
)
def test_a_family_trains_the_same_under_every_gear(rehearse, family, gears):
    more = ("optim.weight_decay=0.1", f"perf.checkpointing={'full' if family == 'mamba' else 'none'}")
    one = rehearse(family, "single", *more)
    assert one.codes == [0], one.output
    for gear in gears:
        outcome = rehearse(family, gear, *more)
        assert outcome.losses == pytest.approx(one.losses, rel=1e-5), outcome.output
        for name, tensor in outcome.weights.items():
            assert (tensor - one.weights[name]).abs().max() < 1e-4, f"{gear}: {name}"


def test_a_family_that_numbers_positions_differently_uses_its_own(rehearse):
    """RoBERTa counts positions from 2. Our count from 0 would train it two positions away from its pretraining."""
    outcome = rehearse("roberta", "single", is_decoder=True)
    assert (
        "loss                    full logits of the model's own forward, which take more memory, the model's own"
        in (outcome.output)
    )
    assert "packing is off, one document per row" in outcome.output


def test_a_model_that_reads_what_it_predicts_is_refused(rehearse):
    outcome = rehearse("bert", "ddp")
    assert outcome.codes == [2] * 4
    assert "model.name: the family bert reads the tokens that it is to predict" in outcome.output
    assert rehearse("bert", "single", is_decoder=True).codes == [0]


def test_a_family_that_cannot_read_rows_is_refused_in_its_own_words(rehearse):
    outcome = rehearse("reformer", "single", is_decoder=True)
    assert outcome.codes == [2]
    assert "the family reformer cannot be trained on text: ValueError: If training, make sure that" in outcome.output


def test_heads_and_states_that_cannot_be_divided_are_refused(rehearse):
    assert "tp.yaml: mamba has no attention heads to divide" in rehearse("mamba", "tp").output
    assert "ulysses.yaml: DeepSpeed reads num_key_value_heads from the model's" in rehearse("gpt2", "ulysses").output


@pytest.mark.parametrize(
    ("family", "settings", "more"),
    [
        ("mistral", {"sliding_window": 16}, ()),
        ("gemma3_text", {"sliding_window": 16}, ()),  # sliding and full attention
        ("qwen3_moe", {}, ("model.router_loss=0",)),
        ("deepseek_v3", {}, ()),  # values narrower than keys
        ("gpt2", {}, ()),  # a table of positions
    ],
)
def test_a_family_trains_the_same_with_ring_attention(rehearse, family, settings, more):
    one, outcome = (rehearse(family, gear, *more, **settings) for gear in ("single", "ring"))
    assert outcome.losses == pytest.approx(one.losses, rel=1e-5), outcome.output
    for name, tensor in outcome.weights.items():
        assert (tensor - one.weights[name]).abs().max() < 1e-4, name


@pytest.mark.parametrize(
    ("family", "settings", "gears", "reason"),
    [
        ("gemma2", {}, ("ring",), "computes attention with a mask (eager) here"),  # capped scores
        ("gpt_oss", {}, ("ring",), "computes attention with a mask (eager) here"),  # sinks
        ("llama4_text", {}, ("ulysses",), "computes attention with a mask (sdpa) here"),  # chunks
        ("qwen3_5_text", {}, ("ring", "ulysses"), "has layers besides attention that read earlier tokens"),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, ("ring",), "has layers besides"),
        (
            "phi3",
            LONG_ROPE,
            ("ring",),
            "batch.row_tokens: above 32 tokens phi3 rotates positions by the length of rows",
        ),
    ],
)
def test_a_family_whose_rows_cannot_be_divided_is_refused(rehearse, family, settings, gears, reason):
    for gear in gears:
        outcome = rehearse(family, gear, "model.router_loss=0", **settings)
        assert set(outcome.codes) == {2} and reason in outcome.output, outcome.output


def test_a_family_that_chooses_its_attention_by_name_has_no_attention_by_document(rehearse):
    """Falcon's classes of attention have names, and it ignores a later change."""
    assert rehearse("falcon", "single").codes == [0]


def test_layers_whose_weights_are_read_directly_are_not_adapted(rehearse):
    """The kernels of Mamba read two weights, so an adapter on them would have no effect on a GPU."""
    outcome = rehearse("nemotron_h", "single", "adapter.method=lora")
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in outcome.weights}
    assert "in_proj" in adapted and not adapted & {"out_proj", "dt_proj"}


def test_a_folder_without_a_tokenizer_is_refused(train, tmp_path):
    CONFIG_MAPPING["gpt2"]().save_pretrained(tmp_path / "bare")
    assert (
        "has no tokenizer files, such as tokenizer.json"
        in train("single", f"model.name={tmp_path / 'bare'}", "run.rehearse=false").output
    )


@pytest.mark.parametrize("family", ["olmo2", "phi3"])
def test_an_adapter_is_whole_where_a_layer_gathers_its_output(rehearse, family):
    """PEFT computes it in full on every rank of tp, so its matrices are not divided."""
    settings = ("adapter.method=lora", "adapter.targets=all-linear", "optim.lr=1e-2", "optim.eps=1e-3", "train.steps=4")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    one = rehearse(family, "single", *settings, **sizes)
    assert one.codes == [0], one.output
    reference, losses = one.weights, one.losses
    two = rehearse(family, "tp", *settings, **sizes)
    assert set(two.codes) == {0}, two.output
    assert two.losses == pytest.approx(losses, rel=1e-5)
    assert two.weights.keys() == reference.keys()
    for name, tensor in two.weights.items():
        assert torch.allclose(tensor, reference[name], rtol=0, atol=2e-6), name
