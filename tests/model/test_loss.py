"""Test the loss on real models: equal to plain cross entropy, without full logits, isolated by document."""

from copy import deepcopy

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from gearbox.kernels import head
from gearbox.model import loss, probes
from gearbox.rows.units import IGNORE_INDEX
from support.documents import Made, random_documents

VOCABULARY = 193
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Phi": {"num_key_value_heads": 4},  # a head with a bias
    "Gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
}


def make(family: str, attention: str = "eager") -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL | FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model with LoRA adapters. Draw their B matrices, which would otherwise start at zero."""
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(1)
    inputs = torch.randint(1, VOCABULARY, (2, 19))
    labels = torch.randint(1, VOCABULARY, (2, 19)).masked_fill(torch.rand(2, 19) < 0.3, IGNORE_INDEX)
    positions = torch.cat([torch.arange(11), torch.arange(8)]).expand(2, -1)
    return {"input_ids": inputs, "position_ids": positions, "labels": labels}


def plain(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the cross entropy on the usual logits, and the logits."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"), logits


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk_tokens", [7, 1024])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_plain_cross_entropy(monkeypatch, batch, family, method, chunk_tokens):
    monkeypatch.setattr(head, "chunk_tokens", lambda *_: chunk_tokens)
    untouched = make(family) if method == "full" else adapted(make(family))
    installed = deepcopy(untouched)
    loss.install_loss(installed)

    expected, logits = plain(untouched, batch)
    found = installed(**batch)
    assert found.shape == () and found.dtype == torch.float32
    assert torch.allclose(found, expected, rtol=1e-5)
    expected.backward()
    found.backward()
    right, ours = gradients(untouched), gradients(installed)
    assert ours.keys() == right.keys() == {name for name, p in untouched.named_parameters() if p.requires_grad}
    for name, gradient in right.items():
        assert (ours[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name

    with torch.no_grad():
        each, hits = installed(**batch)
        assert torch.allclose(each.sum(), expected, rtol=1e-5) and each.shape == batch["labels"].shape
        assert not each[batch["labels"] == IGNORE_INDEX].any()
        assert torch.equal(hits, logits.argmax(-1) == batch["labels"])
        best = batch | {"labels": logits.argmax(-1)}
        assert installed(**best)[1].all()


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", ["Llama", "Phi", "Gemma2", "Cohere"])
def test_log_probs_are_those_of_the_passes_without_gradients(monkeypatch, batch, family, method):
    monkeypatch.setattr(head, "chunk_tokens", lambda *_: 7)
    model = make(family) if method == "full" else adapted(make(family))
    causal_lm = loss.without_adapter(model)
    outputs, (scale, cap) = causal_lm.get_output_embeddings(), loss._logit_shape(causal_lm.config)
    chunked = loss.ChunkedLoss(outputs, outputs.forward, VOCABULARY, scale, cap)
    labels, trained = batch["labels"].flatten().abs(), [p for p in outputs.parameters() if p.requires_grad]
    hidden = torch.randn(len(labels), 32, requires_grad=True)

    found, weights = chunked.log_probs(hidden, labels), torch.rand(len(labels))
    losses, _ = chunked.by_token(hidden, labels)
    assert torch.allclose(found, -losses, rtol=1e-6, atol=1e-6)
    right = torch.autograd.grad(-(losses * weights).sum(), [hidden, *trained])
    for ours, theirs in zip(torch.autograd.grad((found * weights).sum(), [hidden, *trained]), right, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert chunked.log_probs(hidden[:0], labels[:0]).shape == (0,), "an engine may wait for the head's hooks"


@pytest.mark.unit
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Granite"])
def test_a_reference_has_the_bits_of_the_policy_before_the_first_step(batch, family):
    """torch's cross entropy is off by 6e-6 a token with a large vocabulary, always in one direction."""
    model = make(family)
    model.get_output_embeddings().requires_grad_(False)
    loss.install_loss(model)
    head_module, labels = model.get_output_embeddings(), batch["labels"].flatten()
    hidden = torch.randn(len(labels), SMALL["hidden_size"], requires_grad=True)
    policy = head_module(hidden, labels, None, True)
    with torch.no_grad():
        reference, _ = head_module(hidden, labels)
    assert torch.equal(policy, -reference)


@pytest.mark.parametrize("family", ["Gemma2", "Granite", "Cohere"])
def test_without_scale_or_cap_these_families_have_a_different_loss(monkeypatch, batch, family):
    right = plain(make(family), batch)[0]
    monkeypatch.setattr(loss, "_logit_shape", lambda config: (1.0, None))
    unshaped = make(family)
    loss.install_loss(unshaped)
    assert abs(unshaped(**batch) / right - 1) > 0.01, "otherwise the test above would prove nothing"


@pytest.mark.parametrize("method", ["full", "lora"])
def test_without_labels_the_model_is_unchanged(batch, method):
    untouched = make("Gemma2") if method == "full" else adapted(make("Gemma2"))
    installed = deepcopy(untouched)
    loss.install_loss(installed)
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    for extra in ({}, {"logits_to_keep": 1}):
        assert torch.equal(installed(**inputs, **extra).logits, untouched(**inputs, **extra).logits)
    ask = {"input_ids": batch["input_ids"][:1], "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(installed.generate(**ask), untouched.generate(**ask))


class Largest(TorchDispatchMode):
    """A counter of the elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outcome = func(*args, **kwargs or {})
        for tensor in outcome if isinstance(outcome, tuple | list) else [outcome]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return outcome


@pytest.mark.parametrize("training", [True, False])
def test_the_full_logits_are_never_made(monkeypatch, training):
    monkeypatch.setattr(head, "chunk_tokens", lambda *_: 16)
    model = make("Llama")
    rows = torch.randint(1, VOCABULARY, (8, 16))
    inputs = {"input_ids": rows, "position_ids": torch.arange(16).expand(8, -1)}
    with Largest() as usual:
        model(**inputs, use_cache=False)
    loss.install_loss(model)
    with torch.set_grad_enabled(training), Largest() as chunked:
        outcome = model(**inputs, labels=rows)
        if training:
            outcome.backward()
    assert usual.numel == rows.numel() * VOCABULARY
    assert chunked.numel < usual.numel / 2


@pytest.fixture(params=["documents", "sdpa", "eager"])
def packed(request):
    """Return a model, and seven documents in two rows."""
    made = random_documents([9, 5, 12, 4, 15, 10, 3], vocabulary=VOCABULARY)
    assert len(made.rows(32)) == 2
    return make("Llama", request.param).eval(), made


@torch.no_grad()
def logits_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(input_ids=batch["input_ids"], position_ids=batch.get("position_ids"), use_cache=False).logits


def test_documents_of_a_row_are_isolated(packed):
    model, made = packed
    batch = made.rows(32).batch([0, 1])
    usual = logits_of(model, batch)
    for index in range(len(made)):
        inside = batch["chunk_ids"] == index
        changed = batch | {"input_ids": torch.where(inside, (batch["input_ids"] + 7) % VOCABULARY, batch["input_ids"])}
        moved = (logits_of(model, changed) - usual).abs().amax(-1)
        assert moved[~inside].max() < 1e-6
        assert moved[inside].min() > 1e-2


def whole(model: torch.nn.Module, made: Made, row_tokens: int, packing: bool) -> tuple[torch.Tensor, dict]:
    """Return the loss of each document, and the gradient of their sum, in one batch."""
    rows = made.rows(row_tokens, packing=packing)
    batch = rows.batch(list(range(len(rows))))
    documents = batch.pop("chunk_ids")
    with torch.no_grad():
        each, _ = model(**batch)
    model.zero_grad()
    model(**batch).backward()
    return torch.stack([each[documents == index].sum() for index in range(len(made))]), gradients(model)


def test_packed_documents_have_the_losses_and_the_gradient_they_have_one_at_a_time(packed):
    model, made = packed
    loss.install_loss(model)
    together, of_all = whole(model, made, 32, packing=True)
    padded, of_padded = whole(model, made, 15, packing=False)
    model.zero_grad()
    alone = []
    for index in range(len(made)):
        one = Made([made.tokens(index).tolist()], [made.loss_mask(index).tolist()]).rows(15, packing=False).batch([0])
        one.pop("chunk_ids")
        alone.append(model(**one))
        alone[-1].backward()
    one_at_a_time = gradients(model)
    alone = torch.stack(alone).detach()
    assert (together - alone).abs().max() < 1e-5 * alone.max()
    assert (padded - alone).abs().max() < 1e-5 * alone.max()
    for name, gradient in one_at_a_time.items():
        largest = gradient.abs().max()
        assert (of_all[name] - gradient).abs().max() < 1e-5 * largest, name
        assert (of_padded[name] - gradient).abs().max() < 1e-5 * largest, name


@pytest.mark.parametrize("attention", ["documents", "sdpa", "eager"])
def test_the_probe_detects_a_packing_leak(attention):
    model = make("Llama", attention)
    batch = random_documents([9, 5, 12, 4, 15, 10, 3], vocabulary=VOCABULARY).rows(32).batch([0, 1, None])
    loss.install_loss(model)
    assert probes.packing_leak(model, batch, VOCABULARY) < 1e-5
    assert model.training
    unseparated = batch | {"position_ids": torch.arange(32).expand(3, -1)}
    assert probes.packing_leak(model, unseparated, VOCABULARY) > 1e-2
    alone = random_documents([30, 32]).rows(32).batch([0, 1])
    assert probes.packing_leak(model, alone | {"position_ids": torch.arange(32).expand(2, -1)}, VOCABULARY) == 0


@pytest.mark.parametrize(
    ("family", "settings"),
    [("Lfm2", {"layer_types": ["conv", "full_attention"]}), ("Mamba", {"state_size": 4})],
)
def test_the_probe_detects_layers_that_ignore_positions(family, settings):
    """These families do not restart their convolutions and states at a document's first token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**SMALL | settings))
    loss.install_loss(model)
    batch = random_documents([9, 5, 12, 4, 15, 10, 3], vocabulary=VOCABULARY).rows(32).batch([0, 1])
    assert probes.packing_leak(model, batch, VOCABULARY) > 0.1


@pytest.fixture
def gemma(tmp_path, tokenizer):
    """Return the folder of a model from a family without sdpa and with capped logits."""
    config = transformers.Gemma2Config(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.5, initializer_range=0.5,
    )  # fmt: skip
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    tokenizer.save_pretrained(tmp_path / "gemma")
    return tmp_path / "gemma"


def test_a_second_family_trains_the_same_on_all_gears(train, gemma):
    given = (f"model.name={gemma}", "run.rehearse=false", "model.init=pretrained")
    alone, shared = train("single", *given), train("fsdp", *given, ranks=2)
    assert set(alone.codes + shared.codes) == {0}, alone.output + shared.output
    assert shared.losses == pytest.approx(alone.losses, rel=1e-5)


def test_unknown_logits_are_taken_from_the_model(train, gemma, monkeypatch):
    settings = (f"model.name={gemma}", "run.rehearse=false", "model.init=pretrained")
    usual = train("single", *settings)
    assert "full logits" not in usual.output
    monkeypatch.setattr(loss, "_logit_shape", lambda config: (1.0, None))
    for gear in ("single", "fsdp", "zero3"):
        outcome = train(gear, *settings)
        assert "loss                    full logits of the model's own forward" in outcome.output
        assert outcome.losses == pytest.approx(usual.losses, rel=1e-5)
    monkeypatch.setattr(loss, "_loss_of_logits", lambda logits, *_: (logits[:, 0], logits[:, 0] > 0))
    assert "the family gemma2 transforms its logits in an unknown way" in train("single", *settings).output
