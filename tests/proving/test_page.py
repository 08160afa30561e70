"""Test the page, the badge, the record and the comparison of exports without training."""

import xml.etree.ElementTree as ET

import pytest
import torch
from safetensors.torch import save_file

import prove as script
from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from gearbox.proving import description, exports, page, prover, settings
from gearbox.proving.record import Compared, Facts, GearResult, Proof, read_proof


def proof_of(*results: GearResult, shown: str = "«a»", model: str = "m") -> Proof:
    facts = Facts(
        family="llama", architecture="LlamaForCausalLM", model=model, config="c", tokenizer="t", template="t", data="d",
        shown=shown, place="p", tokens=[1],
    )  # fmt: skip
    return Proof(key="k", recipe="recipes/mine.yaml", method="full", steps=4, facts=facts, gears=[*results])


def result(name: str, **more) -> GearResult:
    return GearResult(name=f"{name}-1", gear=name, num_ranks=1, losses=[1.0], **more)


@pytest.mark.parametrize(
    ("results", "text"),
    [
        ([result("single")], "proved: 1 gear"),
        ([result("single"), result("ddp"), result("tp", outcome="refused")], "proved: 2 gears"),
        ([result("single"), result("ddp", outcome="failed")], "failed: 1 of 2 gears"),
    ],
)
def test_the_badge_counts_gears(tmp_path, results, text):
    picture = page.write(proof_of(*results), tmp_path / "new" / "mine.md")
    content = picture.read_text()
    assert ET.fromstring(content).get("aria-label") == f"Gearbox: {text}"
    assert (page.FAILED in content) == text.startswith("failed")
    assert f"![{text}](" in (tmp_path / "new/mine.md").read_text()


def test_text_from_files_cannot_change_the_page_or_the_badge():
    text = page.markdown(
        proof_of(result("single"), shown="a\n```\n# b\n````", model="<img src=x>|[a](b)"), *[script.Path("x.md")] * 2
    )
    assert "`````text\na\n```\n# b\n````\n`````" in text
    assert r"\<img src=x\>\|\[a\](b)" in text
    assert ET.fromstring(page.badge("<&>", '"<b>', True)).get("aria-label") == '<&>: "<b>'


def test_the_smallest_difference_is_not_bit_for_bit():
    none, some = (
        Compared(origin="x", largest={"loss": 0.0, "weights": number}, is_exact=not number) for number in (0.0, 1e-12)
    )
    unseen = Compared(origin="x", largest={"loss": 0.0, "weights": 0.0})
    assert [page.largest(one) for one in (none, some, unseen, None)] == ["bit for bit", "1e-12", "0", "-"]


def test_links_work_with_any_name_and_from_any_folder(monkeypatch, tmp_path):
    proof = proof_of(result("single")).model_copy(update={"recipe": "my `(best)` recipe.yaml"})
    monkeypatch.chdir(ROOT / "docs")
    picture, written = page.paste(proof, script.Path("mine/my (best) [1].md"), script.Path("mine/my (best) [1].svg"))
    assert picture == "![proved: 1 gear](docs/mine/my%20%28best%29%20%5B1%5D.svg)"
    assert written == "[`my '(best)' recipe` under every gear](docs/mine/my%20%28best%29%20%5B1%5D.md)"


def test_the_page_shows_no_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert description.short(f"{tmp_path}/mine.yaml: {ROOT}/recipes/tiny") == "~/mine.yaml: recipes/tiny"


def test_tables_share_the_numbers_of_reasons():
    reasons = ["b"]
    first = result("tp", outcome="refused", problems=["a", "b", "a"])
    assert page.marks(first, reasons) == " [2] [1] [2]"
    assert page.notes(reasons) == ["", "1. `b`", "2. `a`"] and page.notes([]) == []


@pytest.mark.parametrize("name", ["mine.txt", "README.md", "folder.md", "logo.md", "logo.svg/new.md"])
def test_no_other_file_is_replaced(tmp_path, name):
    (tmp_path / "README.md").write_text("# Mine\n")
    (tmp_path / "folder.md").mkdir()
    (tmp_path / "logo.svg").write_text("my logo")
    with pytest.raises(UserError, match=r"^--page: "):
        script.main(["recipes/tiny.yaml", "--gears", "single,ddp", "--page", str(tmp_path / name)])
    script.check_page(tmp_path / "new" / "new.md")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_proof_is_a_rehearsal():
    with pytest.raises(UserError, match=r"^run\.rehearse: a proof is always a rehearsal; remove it$"):
        script.main(["recipes/tiny.yaml", "--gears", "single,ddp", "run.rehearse=false"])


def test_changed_files_of_a_recipe_start_a_proof_over(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    recipe = load_recipe(script.Path("recipes/tiny.yaml"), [f"data.path={tmp_path}", f"model.name={tmp_path}/model"])
    keys, files = [], ["chats.jsonl", "model/config.json", "model/chat_template.jinja"]
    for content in ("{}", "{ }"):
        for name in files:
            (tmp_path / name).write_text(content)
            request = prover.Request(script.Path("recipes/tiny.yaml"), recipe, [], [], [], tmp_path)
            keys.append(request.key())
    assert len({*keys}) == len(keys)


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"key": 1}', b"\xff", b"[]"])
def test_a_damaged_record_is_not_used(tmp_path, content):
    path = tmp_path / "proof.json"
    if content is not None:
        path.write_bytes(content)
    assert read_proof(path) is None


def test_a_record_is_read_as_it_was_written(tmp_path):
    infinite = Compared(origin="x", largest={"loss": float("inf")})
    proof = proof_of(result("single"), result("ddp", outcome="failed", parity=infinite))
    proof.write(tmp_path / "proof.json")
    assert read_proof(tmp_path / "proof.json") == proof


def test_exports_are_compared_by_bytes(tmp_path):
    tensors = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0), "c": torch.tensor([0.0])}
    changes = {
        "same": {},
        "other": {"a": torch.tensor([1.0, 2.5])},
        "sign": {"c": torch.tensor([-0.0])},
        "type": {"b": torch.tensor(3.0, dtype=torch.bfloat16)},
        "more": {"d": torch.tensor([1.0])},
    }
    for name, change in changes.items():
        (tmp_path / name).mkdir()
        save_file(tensors | change, tmp_path / name / "model.safetensors")

    def compare(name: str) -> tuple[int, float]:
        found = exports.compare(tmp_path / "same", tmp_path / name)
        return found.num_equal, found.largest

    assert (compare("same"), compare("other"), compare("sign")) == ((3, 0.0), (2, 0.5), (2, 0.0))
    with pytest.raises(UserError, match=r"^b is exported as bfloat16 \[1\], but by the first gear as float32"):
        compare("type")
    with pytest.raises(UserError, match=r"different tensors, such as d$"):
        compare("more")


def test_a_proof_is_short_and_comparable_unless_the_command_line_says_otherwise():
    gears = settings.load_gears(["single", "ddp:4"])
    given = ["adapter.method=lora", "adapter.dropout=0.1", "batch.rows=64", "perf.compile=true"]

    def changes(*more: str) -> dict[str, str]:
        recipe = load_recipe(script.Path("recipes/fsdp_2gpu.yaml"), [*given, *more])
        return {one.key: one.value for one in settings.changes_of_proof(recipe, gears, 512)}

    assert changes() == {
        "adapter.dropout": "0",
        "batch.micro_rows": "1",
        "batch.row_tokens": "512",
        "optim.eps": "0.001",
    }
    assert "batch.row_tokens" not in changes("batch.row_tokens=2048")
