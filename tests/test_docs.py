"""README and docs agree with the code: flags, metrics, commands, links, examples; and the site builds."""

import ast
import contextlib
import functools
import re
import shlex
import shutil
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import dqn_atari
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import tyro
import yaml

from benchmark import publish
from cleanrl_utils import report
from cleanrl_utils.checks import annotations

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("teachers/*/README.md"))]
SCRIPTS = [ROOT / f"cleanrl/{algorithm}.py" for algorithm in ("dqn_atari", "dqn_atari_jax")]
SCRIPTS += [ROOT / f"cleanrl/qdagger_dqn_atari{library}_impalacnn.py" for library in ("", "_jax")]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def read(path: Path) -> str:
    """Return the text of a file, which is UTF-8 on every system."""
    return path.read_text(encoding="utf-8")


@functools.cache
def flags_of(file: Path) -> dict[str, str | None]:
    """Return names and defaults, as source text, of the ``Args`` of a program, without importing its libraries."""
    classes = [node for node in ast.parse(read(file)).body if getattr(node, "name", "") == "Args"]
    fields = [field for node in classes for field in node.body if isinstance(field, ast.AnnAssign)]
    flags = [field for field in fields if "ClassVar" not in ast.unparse(field.annotation)]
    return {flag.target.id: flag.value and ast.unparse(flag.value) for flag in flags}


def has_flag(flags: dict[str, str | None], word: str) -> bool:
    """Return whether ``--name`` or, of a boolean, ``--no-name`` is one of ``flags``."""
    name = word[2:].partition("=")[0].replace("-", "_")
    return name in flags or flags.get(name.removeprefix("no_")) in ("True", "False")


def section(page: Path, title: str) -> str:
    """Return the text below a heading of the second level."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", read(page), re.DOTALL | re.MULTILINE)[1]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command in the shell blocks of a page; those for Windows as on Linux."""
    for shell, block in re.findall(r"^```(bash|bat)\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE):
        text = block.replace("\\\n", " ") if shell == "bash" else block.replace(".venv\\Scripts\\", "")
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            yield words[words.index("python") :] if "python" in words else words


def test_all_scripts_have_the_same_defaults() -> None:
    """The docs list the flags of QDagger in PyTorch only, and name those that JAX lacks."""
    expected = flags_of(SCRIPTS[2])
    for script in SCRIPTS:
        flags = flags_of(script)
        for name in flags.keys() & expected.keys() - {"exp_name", "teacher_model_exp_name"}:  # these have the library
            assert flags[name] == expected[name], name
    (sentence,) = re.findall(r"It has the same flags except (.*)\n", read(DOCS / "qdagger.md"))
    named = {name.replace("-", "_") for name in re.findall(r"`--([\w-]+)`", sentence)}
    assert expected.keys() - named == flags_of(SCRIPTS[3]).keys()


def test_the_sweep_can_run() -> None:
    """The commands that W&B's agent makes of the example are those of the script, and its metric is logged."""
    (example,) = re.findall(r"^```yaml\n(program: .*?)^```", read(DOCS / "qdagger.md"), re.DOTALL | re.MULTILINE)
    sweep = yaml.safe_load(example)
    assert sweep["program"] == SCRIPTS[2].relative_to(ROOT).as_posix()
    assert f'"{sweep["metric"]["name"]}"' in read(SCRIPTS[2])
    *program, last = sweep["command"]
    assert program[:3] == ["${env}", "${interpreter}", "${program}"]
    assert last == "${args}"
    for i in range(2):
        values = {name: parameter["values"][i] for name, parameter in sweep["parameters"].items()}
        args = tyro.cli(qdagger.Args, args=[*program[3:], *(f"--{name}={value}" for name, value in values.items())])
        assert args.track
        assert vars(args).items() >= values.items()


def test_flags_that_may_change_are_documented() -> None:
    named = re.findall(r"`--([\w-]+)`", section(DOCS / "resuming.md", "Flags that may change"))
    may_change = {name for script in (qdagger, dqn_atari) for name in annotations(script.Args, str)}
    assert {name.replace("-", "_") for name in named} == may_change


@each_page
def test_commands_exist(page: Path) -> None:
    """Programs, their flags, targets of make, extras and files in commands exist, or the page makes them."""
    extras = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    copies = {words[2]: words[1] for words in commands(page) if words[:1] == ["cp"]}
    written = re.findall(r"^The test `([^`]+)`", read(page), re.MULTILINE)
    for line in commands(page):
        words = [copies.get(word, word) for word in line]
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", read(ROOT / "Makefile"), re.MULTILINE), words
        elif words[:1] in (["pip"], ["poetry"], ["uv"]):
            named = re.findall(r"(?:\.\[| -E | --extra )([\w,]+)", " ".join(words))
            assert set(",".join(named).split(",")) - {""} <= extras.keys(), words
        elif words[:1] == ["python"] and words[1:3] != ["-m", "pytest"]:
            file = ROOT / (f"{words[2].replace('.', '/')}.py" if words[1] == "-m" else words[1])
            assert file.is_file(), words
            assert not [word for word in words if word.startswith("--") and not has_flag(flags_of(file), word)], words
        for word in words:
            if re.match(r"(cleanrl|teachers|benchmark|requirements|tests)/", word) and word not in written:
                assert list(ROOT.glob(word)), word


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links are those of files; `make docs` checks their anchors."""
    for path in re.findall(r"\]\(([^)#]+)", read(page)):
        assert "://" in path or (page.parent / path).exists(), path


def test_examples_of_a_changed_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each diff applies to both scripts, and the test of its copies fails before it and succeeds after it."""
    pattern = re.compile(r"^### Example: (.*?)\n(.*?)(?=^###? )", re.DOTALL | re.MULTILINE)
    examples = dict(pattern.findall(read(DOCS / "contributing.md")))
    assert [*examples] == ["double DQN", "margin loss"]
    test = re.search(r'^```python\n(""".*?)^```', examples["double DQN"], re.DOTALL | re.MULTILINE)[1]
    monkeypatch.setattr(sys, "path", [*sys.path])  # a script inserts its folder
    for title, text in examples.items():
        edited = test.replace("td_loss", "distill_loss") if title == "margin loss" else test
        for line in re.findall(r"`(EXPECTED = .*?)`", text):
            edited = re.sub(r"EXPECTED = .*", line, edited)
        sources = {script: read(script) for script in SCRIPTS[2:]}
        changed = {}
        diffs = re.findall(r"^```diff\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for (script, source), diff in zip(sources.items(), diffs, strict=True):
            removed, added = ("".join(re.findall(rf"^{sign}(.*\n)", diff, re.MULTILINE)) for sign in ("-", r"\+"))
            assert source.count(removed) == 1, (title, script.name)
            changed[script] = source.replace(removed, added)
        for copies, works in ((sources, False), (changed, True)):
            for name, source in zip(("qdagger_double", "qdagger_double_jax"), copies.values(), strict=True):
                module = types.ModuleType(name)
                module.__file__ = str(tmp_path / f"{name}.py")
                monkeypatch.setitem(sys.modules, name, module)
                exec(source, vars(module))
            functions: dict = {}
            exec(edited, functions)
            for name in ("test_pytorch", "test_jax"):
                with contextlib.nullcontext() if works else pytest.raises(AssertionError):
                    functions[name]()


@pytest.mark.parametrize("page", publish.PAGES, ids=lambda page: page.name)
def test_tables_of_results_are_those_of_the_csv(page: Path, tmp_path: Path) -> None:
    """Each marked part of a page is what benchmark/publish.py writes there."""
    runs = publish.labelled(publish.read_results())
    assert {*re.findall(r"<!-- publish\.py: (.*) -->", read(page))} <= publish.tables(runs).keys()
    copy = Path(shutil.copy(page, tmp_path))
    publish.write_tables(copy, runs)
    assert read(copy) == read(page)


def test_published_results_are_read_and_written_again(tmp_path: Path) -> None:
    """Each variant has a label."""
    runs = publish.read_results()
    report.write_data(runs, tmp_path)
    assert (tmp_path / "results.csv").read_bytes() == (publish.BENCHMARK / "results.csv").read_bytes()
    assert publish.LABELS.keys() - {"qdagger-2.5M"} == {*runs.exp_name} - {"qdagger-2.5M"}
