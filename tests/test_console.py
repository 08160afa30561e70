"""Test what a screen shows: names from files as they are, and a status while something takes time."""

import ast
import io
import os
import time
from contextlib import suppress

import pytest
from rich.cells import cell_len
from rich.table import Table

from gearbox import ROOT, console
from gearbox.console import Screen, format_time, make_console, printable, status, styled
from gearbox.launch import cli

NAMES = ["[/]", "[bold]x", "[red]a[/red]", ":smile:", "a\\[b]", "[link=https://a.b]c[/link]", "[/][", "{x}", "100%"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_printed_as_it_is(capsys, name):
    table = Table(name, box=None)
    table.add_row(name)
    for shown in (name, f"in {name}", styled((name, "bold"), name), table):
        make_console(speaks=True).print(shown)
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [name, f"in {name}", name * 2, name, name]


@pytest.mark.parametrize("shown", ["a\x1b[2Jb", styled("a\x1b[2Jb"), styled(("a\x1b[2Jb", "red"))])
def test_a_name_does_not_command_the_terminal(capsys, shown):
    make_console(speaks=True).print(shown)
    assert capsys.readouterr().out == r"a\x1b[2Jb" + "\n"


def test_lines_stay_lines():
    assert printable("a\n\tb\r\u2028é漢") == "a\n\\tb\\r\\u2028é漢"


def test_text_of_any_script_stays():
    assert printable(text := "漢\u3000字 👨\u200d👩\u200d👧 a\u00a0b") == text
    assert printable("a\u202eb") == "a\\u202eb", "text that runs backwards hides what is written"


def test_only_one_module_makes_consoles_and_none_uses_markup():
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        text, tree = path.read_text(), ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        makes = any(isinstance(call.func, ast.Name) and call.func.id in ("Console", "Screen") for call in calls)
        marks = any(keyword.arg == "markup" for call in calls for keyword in call.keywords)
        if makes or marks or "rich.markup" in text or "from_markup" in text or "rich.print" in text or "[/]" in text:
            found.add(path.name)
    assert found == {"console.py"}


def shown(**settings) -> str:
    screen = Screen(file=io.StringIO(), width=40, highlight=False, color_system=None, **settings)
    with status(screen, "tokenizing", "documents") as work:
        work.at(25, 100)
        time.sleep(0.5)
    screen.print("next")
    return screen.file.getvalue()


def test_a_status_is_a_line_in_a_log_and_is_replaced_on_a_terminal(monkeypatch):
    assert shown(force_terminal=False) == "tokenizing\nnext\n"
    first, second, *_, last = shown(force_terminal=True).split("\r")[1:]
    assert first.strip() == "tokenizing" and last == "next\n"
    assert second.startswith("tokenizing  [####............] 25%  25 "), "cut off to the width"
    monkeypatch.setattr("gearbox.console.REPEAT_SECONDS", -1.0)
    assert "  25 documents  " in shown(force_terminal=False), "a log gets a line now and then"


def test_only_what_matters_is_printed_when_asked(monkeypatch, capsys):
    monkeypatch.setattr("gearbox.console._is_brief", False)
    cli.without_quiet([])
    make_console(speaks=True).print("shown")
    assert cli.without_quiet(["a.yaml", "--quiet", "b=1"]) == ["a.yaml", "b=1"]
    screen = make_console(speaks=True)
    screen.print("hidden")
    screen.print_always("a warning")
    make_console(speaks=False).print_always("another rank")
    with status(screen, "hidden too"):
        pass
    assert capsys.readouterr().out == "shown\na warning\n"


@pytest.mark.parametrize(("seconds", "text"), [(9.4, "9 s"), (61, "1:01"), (3600, "1:00:00"), (90061, "1 d 01:01:01")])
def test_times_are_short(seconds, text):
    assert format_time(seconds) == text


def test_only_one_rank_shows_it(capsys):
    with status(make_console(speaks=False), "importing torch"):
        pass
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["full", "closed"])
def test_a_screen_that_cannot_be_written_stops_nothing(monkeypatch, kind):
    if kind == "full":
        number = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, number = os.pipe()
        os.close(reader)
    stream = os.fdopen(number, "w", buffering=1)
    monkeypatch.setattr(console, "_streams", (stream, stream))
    screen = make_console(speaks=True)
    for _ in range(3):
        screen.print("a step")
        console.report("an error")
        assert not screen._buffer, "lines that are lost take no memory"
    with suppress(OSError):
        stream.close()


def test_a_file_is_no_terminal_and_wide_letters_fit_one(monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(console, "_streams", (log, log))
        assert make_console(speaks=True).is_terminal and not make_console(speaks=True).is_live
    screen = Screen(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    screen.show("学習" * 30)
    screen.show("")
    assert [cell_len(line) for line in screen.file.getvalue().split("\r")] == [0, 39, 39, 0]
