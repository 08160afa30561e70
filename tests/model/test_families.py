"""Test model families that differ from a plain decoder: each trains the same under every gear, or is refused."""

import pytest
from transformers import CONFIG_MAPPING


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
        ("mamba", ("fsdp",)),  # no attention heads
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
    decay = "optim.weight_decay=0.1"
    one = rehearse(family, "single", decay)
    assert one.codes == [0], one.output
    for gear in gears:
        outcome = rehearse(family, gear, decay)
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
    outcome = rehearse("qwen3_5_text", "ulysses")
    assert outcome.codes == [2, 2]
    assert "Sequence parallelism does not support attention layers of type ['linear_attention']" in outcome.output


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
