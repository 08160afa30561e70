"""Test that llama.cpp itself reads exported GGUF files: the same tokens, prompts, likelihoods and greedy answers."""

import json
import urllib.request
from types import SimpleNamespace

import pytest
import torch
import transformers

from gearbox import ROOT
from support.exports import export, verify_here, write_model
from support.rotations import GEMMA, LINEAR, LLAMA3

pytestmark = [pytest.mark.extras, pytest.mark.long, pytest.mark.timeout(900)]
# All are composed (NFC): llama.cpp composes nothing, where the tokenizer of Qwen2 does.
TEXTS = (
    "Hello world", "  two  spaces\n\n\nand lines\r\n\tx", "It's 12345 and we don't, WE'LL 1.5",
    "Größe 東京 🙂 é ½ \xa0x",
    "<|im_start|>user\nhi<|im_end|>\n", "<|user|>hi<|end|> there<|assistant|>", "def f(x):\n    return x**2  # ok", "",
    "a" * 50, "١٢٣ 2024年 x_1",
)  # fmt: skip
QUESTION = "Which letters of this sentence, which is long enough to fill more than a hundred positions, come first?"
SMOLLM2 = ROOT / "models/smollm2-135m"


@pytest.fixture(autouse=True)
def here(monkeypatch):
    verify_here(monkeypatch)


def serve(path):
    """Return llama.cpp's server of this file, which ends with the object, and a function that asks it."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: make extras-test")
    settings = xllamacpp.CommonParams()
    settings.model.path = str(path)
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers, settings.port = 512, 1, 0, 0
    settings.warmup, settings.cache_ram_mib, settings.verbosity = False, 0, 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 2
    server = xllamacpp.Server(settings)

    def ask(route, **content):
        request = urllib.request.Request(
            f"{server.listening_address}/{route}", json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    return SimpleNamespace(ask=ask, server=server)


@torch.no_grad()
def compare(folder, path, tolerance):
    """Compare llama.cpp on a GGUF file with transformers on the folder that holds it."""
    served = serve(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for text in TEXTS:
        found = served.ask("tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        assert found == tokenizer(text)["input_ids"], text
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert served.ask("apply-template", messages=chat)["prompt"] == prompt
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    asked = {"temperature": 0, "cache_prompt": False, "return_tokens": True, "n_probs": 20}
    answer = served.ask("completion", prompt=ids, n_predict=16, **asked)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :].tolist()
    likely = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    for one in answer["completion_probabilities"][0]["top_logprobs"]:
        assert one["logprob"] == pytest.approx(likely[one["id"]].item(), abs=tolerance), one
    assert answer["tokens"] == expected


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
        ("llama", {"rope_parameters": LINEAR, "head_dim": 32}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("gemma2", GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
        ("gemma3_text", GEMMA),
    ],
)
def test_llama_cpp_computes_what_the_folder_does(tmp_path, family, sizes):
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: make extras-test")
    base = write_model(family, tmp_path / "base", **sizes)
    folder = export(base, tmp_path / "x", "--gguf", "f32")
    compare(folder, folder / "x-F32.gguf", 5e-3)


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="models/smollm2-135m is missing: make smollm2")
def test_llama_cpp_answers_as_smollm2_does(tmp_path):
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: make extras-test")
    folder = export(SMOLLM2, tmp_path / "x", "--gguf", "f16")
    compare(folder, folder / "x-F16.gguf", 3e-2)
