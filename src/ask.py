"""Ask a trained model a question: python src/ask.py FOLDER "question" [max_new_tokens=64] [trust_remote_code=true]"""

from __future__ import annotations

from pathlib import Path

from gearbox.errors import UserError
from gearbox.launch import cli


def main(arguments: list[str]) -> None:
    """Load the model in a folder and print its greedy answer."""
    limits = [a.partition("=")[2] for a in arguments if a.startswith("max_new_tokens=")]
    trust = "trust_remote_code=true" in arguments
    words = [a for a in arguments if not a.startswith(("max_new_tokens=", "trust_remote_code="))]
    if len(words) != 2 or not all(limit.isdigit() for limit in limits):
        raise UserError('usage: python src/ask.py FOLDER "question" [max_new_tokens=64] [trust_remote_code=true]')
    folder = Path(words[0])
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder}: contains no model; a run saves its model to runs/<name>/model")

    from gearbox.model.loading import load_for_answers

    model, tokenizer = load_for_answers(folder, trust)
    text = words[1]
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
    inputs = inputs.to(model.device)
    limit = int(limits[0]) if limits else 64
    tokens = model.generate(**inputs, max_new_tokens=limit, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())


if __name__ == "__main__":
    cli.run(main)
