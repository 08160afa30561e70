"""Test the keys of perf under the gears: results stay equal, and what runs is what was asked."""

import functools
import json
import shutil

import pytest
import torch
import torch._dynamo.backends.debugging  # warm: the compiler's modules take seconds to import
import torch._functorch.aot_autograd
import yaml

from gearbox import ROOT
from gearbox.distributed import engine
from gearbox.kernels import blocks
from gearbox.kernels import head as heads
from gearbox.training import loop

FULL = ("optim.lr=5e-3", "optim.eps=1e-3", "optim.max_grad_norm=0.5", "train.steps=1", "schedule.warmup=0")

LONG = (pytest.mark.long, pytest.mark.cells)


@pytest.fixture(scope="module")
def calls_of_head(tmp_path_factory):
    """Return a folder with a file per gear, to which `usual` adds a byte for each call of the fused head."""
    return tmp_path_factory.mktemp("calls")


@pytest.fixture(scope="module")
def usual(calls_of_head):
    """Return get(train, gear, ranks), which runs each gear once without keys of perf, and counts calls of the head."""
    made, compute = {}, heads.cross_entropy_sum

    def get(train, gear, ranks):
        def counted(*arguments):
            with (calls_of_head / gear).open("a") as file:
                file.write("x")
            return compute(*arguments)

        if gear not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(heads, "cross_entropy_sum", counted)
                made[gear] = results(train(gear, *FULL, ranks=ranks))
        return made[gear]

    return get


@pytest.fixture
def quick_compiler(monkeypatch):
    """Trace and split each graph as usual, but run it without making machine code, which takes most of the time."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def results(outcome) -> tuple[list[float], dict[str, torch.Tensor]]:
    assert set(outcome.codes) == {0}, outcome.output
    return outcome.losses, outcome.weights


def facts(outcome) -> dict[str, str]:
    return {line[:24].strip(): line[24:].strip() for line in outcome.output.splitlines()}


def assert_close(ours, theirs, tolerance: float) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=tolerance) and ours[1].keys() == theirs[1].keys()
    assert all(torch.allclose(ours[1][name], theirs[1][name], rtol=0, atol=tolerance) for name in ours[1])


@pytest.mark.parametrize(
    ("gear", "ranks", "grade"),
    [
        ("single", None, "selective"),
        ("fsdp", 2, "selective"),
        ("fsdp", 2, "offload"),
        ("pp", 2, "selective"),
        pytest.param("ddp", 2, "selective", marks=LONG),
        pytest.param("fsdp", 2, "full", marks=LONG),
        pytest.param("zero2", 2, "selective", marks=LONG),
        pytest.param("zero3", 2, "offload", marks=LONG),
        pytest.param("tp", 2, "selective", marks=LONG),
        pytest.param("fsdp_tp", 4, "selective", marks=LONG),
        pytest.param("ulysses", 2, "offload", marks=LONG),
    ],
)
def test_checkpointing_changes_no_bit(train, usual, gear, ranks, grade):
    outcome = train(gear, *FULL, f"perf.checkpointing={grade}", ranks=ranks)
    losses, weights = results(outcome)
    assert facts(outcome)["checkpointing"] == grade
    theirs = usual(train, gear, ranks)
    assert losses == theirs[0] and all(torch.equal(weights[name], theirs[1][name]) for name in weights)


@pytest.mark.parametrize(
    ("gear", "ranks", "also"),
    [
        ("ddp", 2, "perf.checkpointing=full"),
        ("fsdp", 2, "perf.checkpointing=selective"),
        pytest.param("fsdp", 2, "adapter.method=lora", marks=LONG),
        pytest.param("zero2", 2, "perf.checkpointing=offload", marks=LONG),
    ],
)
def test_compiled_layers_give_the_same_model(train, usual, quick_compiler, gear, ranks, also):
    theirs = results(train(gear, *FULL, also, ranks=ranks)) if "adapter" in also else usual(train, gear, ranks)
    outcome = train(gear, *FULL, also, "perf.compile=true", ranks=ranks)
    assert_close(results(outcome), theirs, 1e-5)
    assert facts(outcome)["compiled layers"] == "yes"


def test_layers_whose_hooks_do_not_run_are_refused(train, quick_compiler, monkeypatch):
    wrap = engine.checking_hooks

    def without_hooks(layers):
        layers[1]._forward_pre_hooks.clear()
        return wrap(layers)

    monkeypatch.setattr(engine, "checking_hooks", without_hooks)
    outcome = train("fsdp", "perf.compile=true", ranks=2)
    assert set(outcome.codes) == {2}
    assert "perf.compile: FSDP2 does not gather a layer's weights before it computes" in outcome.output


def test_layers_that_are_not_compiled_are_refused(train, quick_compiler, monkeypatch):
    monkeypatch.setattr(blocks, "_compiled", lambda forward: forward)
    monkeypatch.setattr(blocks, "wrap_blocks", lambda model, checkpointing, compile_: None)
    outcome = train("single", "perf.compile=true")
    assert outcome.codes == [2]
    assert "compiled layers: requested {True}, running {False}" in outcome.output


def test_fsdp_gathers_as_many_layers_ahead_as_asked(train, tmp_path):
    deep = tmp_path / "deep"
    shutil.copytree(ROOT / "recipes/tiny", deep)
    config = json.loads((deep / "config.json").read_text())
    (deep / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    given = (*FULL, f"model.name={deep}", "run.rehearse=false")
    usual, ahead = (train("fsdp", *given, f"perf.prefetch={number}", ranks=2) for number in (1, 2))
    assert set(ahead.codes) == {0}, ahead.output
    assert facts(ahead)["layers gathered ahead"] == "2" and "layers gathered ahead" not in facts(usual)
    assert_close(results(ahead), results(usual), 0)


def test_fsdp_keeps_the_gathered_weights_if_the_gear_asks_for_it(train, usual, tmp_path):
    gear = yaml.safe_load((ROOT / "accelerate_configs/fsdp.yaml").read_text())
    gear["fsdp_config"]["fsdp_reshard_after_forward"] = False
    path = tmp_path / "kept.yaml"
    path.write_text(yaml.safe_dump(gear))
    outcome = train(str(path), *FULL, "eval.every=1", ranks=2)
    assert facts(outcome)["freed after forward"] == "no"
    assert_close(results(outcome), usual(train, "fsdp", 2), 0)


def test_ddp_sends_gradients_in_bf16_if_asked(train, usual):
    theirs = usual(train, "ddp", 2)
    outcome = train("ddp", *FULL, "perf.ddp_compression=bf16", ranks=2)
    ours = results(outcome)
    assert facts(outcome)["gradients sent in bf16"] == "yes"
    assert_close(ours, theirs, 1e-2)
    assert any(not torch.equal(ours[1][name], theirs[1][name]) for name in ours[1]), "nothing was rounded"


@pytest.mark.parametrize(("gear", "ranks"), [("single", None), ("ddp", 2)])
def test_rows_divided_into_passes_give_the_same_model(train, usual, monkeypatch, tmp_path, gear, ranks):
    """The documents of a row are computed 40 tokens at a time, in several passes instead of one."""
    theirs = usual(train, gear, ranks)
    divide = loop.passes_of

    def counted(*inputs):
        passes = divide(*inputs)
        with (tmp_path / "counts").open("a") as file:
            file.write(f"{len(passes)}\n")
        return passes

    monkeypatch.setattr(loop, "passes_of", counted)
    assert_close(results(train(gear, *FULL, "perf.pass_tokens=40", ranks=ranks)), theirs, 1e-6)
    assert max(map(int, (tmp_path / "counts").read_text().split())) > 1


@pytest.mark.parametrize(("gear", "method"), [("single", "none"), ("fsdp", "lora")])
def test_without_our_kernels_the_model_is_the_same(train, usual, gear, method):
    given, ranks = (*FULL, f"adapter.method={method}"), 1 if gear == "single" else 2
    ours = usual(train, gear, ranks) if method == "none" else results(train(gear, *given, ranks=ranks))
    plain = results(train(gear, *given, "perf.kernels=none", "model.attention=sdpa", ranks=ranks))
    assert_close(ours, plain, 1e-5)


@pytest.mark.parametrize(("gear", "ranks"), [("single", None), ("ddp", 2), ("fsdp", 2), ("zero3", 2)])
def test_the_head_computes_its_gradient_with_the_logits(train, usual, calls_of_head, gear, ranks):
    """The fused head runs in each micro-batch under each engine, although FSDP2 replaces the class of a layer."""
    usual(train, gear, ranks)
    assert len((calls_of_head / gear).read_text()) >= 6
