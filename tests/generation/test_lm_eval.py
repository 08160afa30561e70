"""Test that lm-eval reads a saved model as it is, on a task of this test and without a network."""

import json
import subprocess
import sys

import pytest
import torch
import transformers

pytestmark = [pytest.mark.extras, pytest.mark.long, pytest.mark.cold]
TASK = """
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {path}}}
test_split: train
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_lm_eval_scores_the_saved_model(train, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: make extras-test")
    outcome = train("single", "train.steps=30", "optim.lr=1e-2")
    assert outcome.codes == [0], outcome.output
    words = ("abc", "bdf", "cge", "hca", "dab", "gab", "fgh", "cab")
    asked = [{"question": f"first {word}", "choices": [word[0], word[1]], "answer": 0} for word in words]
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    (tmp_path / "letters.yaml").write_text(TASK.format(path=tmp_path / "letters.jsonl"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = outcome.folder / "model"
    command = [
        "lm_eval",
        "--model",
        "hf",
        "--model_args",
        f"pretrained={model}",
        "--tasks",
        "letters",
        "--device",
        "cpu",
    ]
    more = ["--include_path", str(tmp_path), "--apply_chat_template", "--output_path", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-m", *command, *more], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["letters"]["acc,none"]
    assert found == pytest.approx(sum(prefers_first(model, line) for line in asked) / len(asked))


def prefers_first(folder, line: dict) -> bool:
    """Return True if the saved model finds the first letter more likely than the second."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": line["question"]}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        logits = model(**ids).logits[0, -1]
    first, second = (logits[tokenizer.encode(choice, add_special_tokens=False)[0]] for choice in line["choices"])
    return bool(first > second)
