"""A simulated step has the memory and the traffic of a real one."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from gearbox.distributed import engine as engines
from gearbox.errors import UserError
from gearbox.kernels import head
from gearbox.model.random_init import shrink_config
from gearbox.planning.architecture import Architecture
from gearbox.planning.memory import predict
from gearbox.simulation.simulate import simulate
from support.held import at_second_step
from support.simulations import config_of, job_of, simulated

pytestmark = pytest.mark.ranks
SMALL = ("batch.rows=4", "batch.micro_rows=1", "batch.row_tokens=64")


def one(gear: str, ranks: int, *overrides: str, **changes):
    job = job_of("tiny", gear, ranks, *SMALL, *overrides)
    return simulated(job, config_of(job) | changes)


@pytest.fixture(scope="module")
def whole():
    return one("single", 1)


def test_terms_add_up(whole):
    assert sum(whole["terms"].values()) == whole["peak_bytes"]
    assert whole["terms"]["optimizer"] == pytest.approx(2 * whole["terms"]["weights"], rel=0.01)
    assert whole["terms"]["gradients"] == pytest.approx(whole["terms"]["weights"], rel=0.01)
    assert whole["sent_bytes"] == {}


@pytest.mark.parametrize(
    ("gear", "ranks", "shards"), [("ddp", 2, 1), ("fsdp", 2, 2), ("fsdp", 64, 64), ("hsdp", 4, 2), ("tp", 2, 2)]
)
def test_state_is_divided_among_shards(whole, gear, ranks, shards):
    found = one(gear, ranks, f"batch.rows={4 * ranks}")
    for term in ("weights", "optimizer"):
        assert found["terms"][term] == pytest.approx(whole["terms"][term] / shards, rel=0.05), term
    kinds = {"ddp": "all-reduce", "fsdp": "reduce-scatter", "hsdp": "reduce-scatter", "tp": "all-reduce"}
    assert found["sent_bytes"][kinds[gear]] > 0


def test_fsdp_sends_three_times_the_weights(whole):
    """A ring sends each complete tensor once. Here all-gathers are in bf16 and reduce-scatters in fp32."""
    found, weights = one("fsdp", 2, "batch.rows=8"), whole["terms"]["weights"]
    assert found["sent_bytes"]["reduce-scatter"] == pytest.approx(4 * weights, rel=0.05)
    assert weights * 2 < found["sent_bytes"]["all-gather"] < weights * 4 * 1.05


def test_checkpointing_keeps_fewer_activations():
    row = ("batch.row_tokens=2048", "batch.rows=1")
    found = [one("single", 1, f"perf.checkpointing={way}", *row, num_hidden_layers=12) for way in ("none", "full")]
    kept, recomputed = (simulation["terms"]["activations"] for simulation in found)
    assert kept > 2 * recomputed > 0


def test_an_adapter_trains_few_weights(whole):
    found = one("single", 1, "adapter.method=lora", "adapter.r=4")["terms"]
    assert found["optimizer"] < whole["terms"]["optimizer"] / 10
    assert found["weights"] < 0.6 * whole["terms"]["weights"]  # frozen in bf16


def test_offloaded_state_is_on_the_host():
    found = one("fsdp_offload", 2)["terms"]
    assert found["optimizer"] == found["gradients"] == 0 and found["gathered"] > 0


def test_odd_sizes_and_more_ranks_than_rows():
    found = one("fsdp", 3, "batch.rows=1", vocab_size=1031)
    assert sum(found["terms"].values()) == found["peak_bytes"] > 0


class Counted(TorchDispatchMode):
    """The most bytes of living real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self.count([one for one in gc.get_objects() if isinstance(one, torch.Tensor)])

    def count(self, found):
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "to_local"):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.forget, storage._cdata)
        return found

    def forget(self, key):
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented
        return self.count(func(*args, **(kwargs or {})))


def peak(step):
    counted = Counted()
    usual = torch.UntypedStorage.resize_

    def resize(storage, size):
        usual(storage, size)
        if storage._cdata in counted.sizes:
            counted.now += size - counted.sizes[storage._cdata]
            counted.sizes[storage._cdata] = size
            counted.peak = max(counted.peak, counted.now)

    torch.UntypedStorage.resize_ = resize
    with counted:
        step.take()
    return {"peak": counted.peak}


@pytest.mark.parametrize(
    ("gear", "ranks", "objective"), [("single", 1, "sft"), ("ddp", 2, "sft"), ("fsdp", 2, "sft"), ("ddp", 2, "dpo")]
)
def test_a_real_step_in_bf16_has_the_same_peak(train, monkeypatch, tmp_path, gear, ranks, objective):
    """Let the CPU compute as a GPU does: in bf16, with its chunks of logits."""
    monkeypatch.setattr(engines, "runs_on_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setitem(head.NUM_LOGITS, "cpu", head.NUM_LOGITS["cuda"])
    overrides = (
        "run.rehearse=false",
        "model.init=random",
        "batch.row_tokens=256",
        "batch.micro_rows=2",
        "batch.rows=8",
        *(("train.objective=dpo", "data.path=builtin:preferences") if objective == "dpo" else ()),
    )
    real = at_second_step(monkeypatch, tmp_path, peak, lambda: train(gear, *overrides, ranks=ranks))[0]["peak"]
    job = job_of("tiny", gear, ranks, *overrides)
    found = simulated(job, config_of(job))
    assert found["peak_bytes"] == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("gear", ["single", "ddp"])
def test_without_packing_each_answer_of_a_pair_has_a_line(gear):
    job = job_of("tiny", gear, 2, "data.packing=false", "model.attention=sdpa", "train.objective=dpo")
    found = simulated(job, config_of(job))
    expected = predict(Architecture.of(config_of(job)), job).allocated_bytes
    assert found["peak_bytes"] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2", "phi3"])
def test_families_that_no_file_names(tokenizer, family):
    config = shrink_config(AutoConfig.for_model(family), tokenizer).to_dict()
    found = simulated(job_of("tiny", "fsdp", 4, *SMALL), config)
    assert sum(found["terms"].values()) == found["peak_bytes"] > 0


SHAPE = {
    "hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32_000, "pad_token_id": 0,
    "num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 2,
}  # fmt: skip
LORA = ("adapter.method=lora", "adapter.r=16")


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("gemma2", ()), ("gemma2", LORA), ("gpt_oss", LORA), ("glm4", LORA), ("starcoder2", LORA), ("olmoe", LORA)],
)
def test_the_closed_form_knows_layers_that_our_kernels_do_not(family, overrides):
    """Attention without sdpa keeps scores; experts and fused MLPs keep all that they compute."""
    head_size = {} if family == "olmoe" else {"head_dim": 128}
    config = AutoConfig.for_model(family, **SHAPE, **head_size).to_dict()
    job = job_of("fsdp_2gpu", "single", 1, "perf.checkpointing=none", *overrides)
    closed = predict(Architecture.of(config), job).allocated_bytes
    assert closed == pytest.approx(simulated(job, config)["peak_bytes"], rel=0.06)


@pytest.mark.parametrize("gear", ["zero3", "pp", "fsdp_tp"])
def test_a_gear_that_cannot_be_simulated_is_refused(gear):
    with pytest.raises(UserError, match=f"plan: {gear}: .*the closed form covers it"):
        simulate(job_of("tiny", gear), {})


def test_a_model_that_does_not_continue_text_is_refused():
    with pytest.raises(UserError, match="t5 is not a model that continues text"):
        simulate(job_of("tiny", "single"), AutoConfig.for_model("t5").to_dict())
