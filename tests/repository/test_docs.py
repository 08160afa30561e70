"""Documents name only existing paths, keys and targets, and their tables match the folders."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from packaging.specifiers import SpecifierSet
from torch.distributed.run import parse_args

from gearbox import ROOT
from gearbox.config.gear import gear_path, load_gear
from gearbox.config.loader import load_recipe, recipe_keys
from gearbox.launch import topology
from gearbox.launch.cli import split_arguments
from support.repository import GUIDES

SKILLS = sorted((ROOT / ".agents" / "skills").glob("*/SKILL.md"))
DOCUMENTS = [
    *GUIDES,
    *SKILLS,
    *(ROOT / name for name in ("CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
TRAINERS = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *TRAINERS]  # decisions are records, not pages
README = GUIDES[0].read_text()


def of_this_repository(document: Path) -> str:
    """Return a document without the files of other trainers, and with shipped files for a skill's placeholders."""
    text = document.read_text()
    if document in TRAINERS:
        return re.sub(r"python src/launch\.py single \S+\.ya?ml|`[\w./]+/sft/\w+\.yaml`", "", text)
    if document in SKILLS:
        for word, shipped in {"NAME": "fsdp", "NEAR": "zero3", "MINE": "tiny", "GEAR": "ddp"}.items():
            text = re.sub(rf"\b{word}\b", "zero3" if word == "NAME" and "ds_configs" in text else shipped, text)
        text = text.replace("ORG--MODEL", "Qwen--Qwen3-4B")
    return text


LINES = sorted(
    {
        line.replace("\\\n", " ").removeprefix("$ ")
        for guide in GUIDES
        for block in re.findall(r"```(?:text|bash)\n(.*?)```", of_this_repository(guide), re.S)
        for line in re.sub(r"\\\n\s*", " ", block).splitlines()
        if re.match(r"(\$ )?(accelerate launch|torchrun|python src/launch\.py) ", line)
    }
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_keys_and_targets_exist(document):
    made_by_use = {
        "recipes/mine.yaml",
        "cluster/kubernetes/jobs/mine",
        "benchmarks/mfu.json",
        "benchmarks/overhead.json",
    }
    tops = r"\.agents|recipes|accelerate_configs|ds_configs|src|tests|docs|benchmarks|cluster"  # runs/ comes with use
    words = re.findall(rf"(?:{tops})/[\w./-]*|\b[A-Z]\w+\.md\b", of_this_repository(document))
    missing = [word for word in words if not (ROOT / word.rstrip(".")).exists() and word.rstrip(".") not in made_by_use]
    assert missing == []
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([\w-]+)", document.read_text())) <= targets
    groups = {key.split(".")[0] for key in recipe_keys()}
    files = {".yaml", ".json", ".jsonl", ".log", ".py", ".sbatch"}
    for key in re.findall(rf"`((?:{'|'.join(groups)})\.\w+)", document.read_text()):
        assert key in recipe_keys() or f".{key.split('.')[1]}" in files, key


def gear_table(document: str) -> dict[str, tuple[str, int]]:
    """Return the engine and the number of processes of each gear in a document's table."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (\d+) \|", document, re.M)
    return {name: (engine, int(count)) for name, engine, count in rows}


def test_the_gear_tables_are_the_folder():
    gears = {path.stem: load_gear(path) for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    table, excerpt = gear_table((ROOT / "docs/parallelism.md").read_text()), gear_table(README)
    assert {name: count for name, (_, count) in table.items()} == {n: g.num_processes for n, g in gears.items()}
    for name, (engine, _) in table.items():
        stage = re.search(r"ZeRO-(\d)", engine)
        assert gears[name].zero_stage == (int(stage[1]) if stage else 0)
    assert list(excerpt) == ["single", "ddp", "fsdp", "zero3", "tp"]
    assert excerpt.items() <= table.items()


def test_the_recipe_table_is_the_folder():
    named = set(re.findall(r"^\| `(recipes/\w+\.yaml)`", README, re.M))
    assert named == {str(path.relative_to(ROOT)) for path in (ROOT / "recipes").glob("*.yaml")}


@pytest.mark.cold
def test_the_error_shown_is_the_error_given():
    command, said = re.search(r"^\$ (python .*)\n(gearbox: .*)$", README, re.M).groups()
    outcome = subprocess.run(
        [sys.executable, *command.split()[1:]], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert (outcome.returncode, outcome.stderr.strip()) == (2, said)


@pytest.mark.parametrize("line", LINES)
def test_the_documents_launches_are_parsed_by_the_launchers(monkeypatch, line):
    """Parse the launch lines with the launchers' own parsers: lines for many machines cannot run in a test."""
    for names in (*topology.NODE_FLAGS.values(), topology.NUM_NODES_VARIABLES, [topology.RANKS_PER_NODE]):
        for name in names:
            monkeypatch.delenv(name, raising=False)
    words = shlex.split(line)
    if words[0] == "torchrun":
        parsed = parse_args(words[1:])
        script, arguments = parsed.training_script, parsed.training_script_args
    elif words[0] == "accelerate":
        parsed = launch_command_parser().parse_args(words[2:])
        script, arguments = parsed.training_script, parsed.training_script_args
        flags = {"num_processes": str(parsed.num_processes)} if parsed.num_processes else {}
        load_gear(ROOT / parsed.config_file, flags)
    else:
        flags, place = topology.node_from_flags(
            dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
        )
        assert place is None or place.flags(1)
        load_gear(gear_path(words[2]), flags)
        script, arguments = words[1], [word for word in words[3:] if not word.startswith("--")]
    assert (ROOT / script).is_file()
    if script == "src/train.py" or words[0] == "python":
        recipe, overrides = split_arguments([word for word in arguments if "lrr" not in word])
        load_recipe(ROOT / recipe, overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_begins_with_its_command_and_ends_with_what_to_read_next(page):
    text = page.read_text()
    before = text.partition("```")[0]
    assert re.match(r"# \S", before) and "\n#" not in before, "the command comes before the first section"
    assert len(before.split()) <= 80, "one or two sentences come before the command"
    section, _, last = text.rstrip().rpartition("\n## ")
    assert section and re.fullmatch(r"Read next\n\n(- \[[^]]+\]\([^)]+\): .+(\n  .+)*\n?){2,4}", last), last[:200]


def test_the_index_names_every_page():
    index = (ROOT / "docs/README.md").read_text()
    linked = set(re.findall(r"\]\(([\w./-]+\.md)\)", index))
    assert {str(page.relative_to(ROOT / "docs")) for page in PAGES} - {"README.md"} <= linked


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_pictures_exist(document):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("skill", SKILLS, ids=lambda path: path.parent.name)
def test_a_skill_has_the_head_that_agents_read(skill):
    """Follow the Agent Skills format: a name that is the folder's, and a description of when to use it."""
    head, body = re.fullmatch(r"---\n(.*?)---\n(.*)", skill.read_text(), re.S).groups()
    fields = yaml.safe_load(head)
    assert fields.keys() == {"name", "description"} and fields["name"] == skill.parent.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"]) and len(fields["name"]) <= 64
    assert len(fields["description"]) <= 1024 and "Use it" in fields["description"]
    assert len(body.splitlines()) <= 60
    assert f"`.agents/skills/{skill.parent.name}/SKILL.md`" in (ROOT / "AGENTS.md").read_text()


@pytest.mark.parametrize("skill", SKILLS, ids=lambda path: path.parent.name)
def test_the_names_and_commands_of_a_skill_exist(skill):
    """Check functions, tables and flags: what is written next to a Python file is defined in it."""
    text = of_this_repository(skill)
    named = re.findall(r"`(\w+)`(?: and `(\w+)`)? (?:in|of) `((?:src|tests)/[\w/]+\.py)`", text)
    named += [(name, "", file) for file, name in re.findall(r"^\| `(tests/\S+\.py)` \| in `(\w+)`", text, re.M)]
    for *names, file in named:
        for name in filter(None, names):
            assert re.search(rf"^\s*(def )?{name}\b", (ROOT / file).read_text(), re.M), f"{file} has no {name}"
    scripts = re.findall(r"\.venv/bin/python (src/\w+\.py)(.*)", text)
    for script, arguments in scripts:
        source = (ROOT / script).read_text() + (ROOT / "src/gearbox/launch/cli.py").read_text()
        assert {flag for flag in re.findall(r" (--\w+)", arguments) if flag not in source} == set()
        for override in re.findall(r"\b([a-z]+\.[a-z_]+=\S+)", arguments):
            load_recipe(ROOT / "recipes/tiny.yaml", [override])
    for tests in re.findall(r"\.venv/bin/pytest (.*)", text):
        assert all((ROOT / word).exists() for word in re.findall(r"tests/\S+", tests.replace("`", " ")))
    assert len(named) + len(scripts) >= 4


def test_there_are_three_skills():
    assert len(SKILLS) == 3


def test_the_lines_by_hand_are_there():
    assert any("--num_machines 2" in line for line in LINES) and any("--nnodes=2" in line for line in LINES)


def test_setup_takes_the_pythons_of_the_package():
    """A Python that pip would refuse is refused before an environment is made with it."""
    (test,) = re.findall(r"sys\.exit\((.*?) and \"", (ROOT / "Makefile").read_text())
    (bounds,) = re.findall(r'requires-python = "(.*)"', (ROOT / "pyproject.toml").read_text())
    for minor in range(9, 17):
        is_refused = eval(test.replace("sys.version_info", f"(3, {minor}, 1)"))
        assert is_refused != SpecifierSet(bounds).contains(f"3.{minor}.1"), minor
