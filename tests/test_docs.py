"""README and docs name what there is: flags, defaults, metrics, commands, files, links; and the site builds."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cleanrl_utils import report
from cleanrl_utils.run import MAY_CHANGE

ROOT = Path(__file__).resolve().parent.parent
README, QDAGGER, DQN = ROOT / "README.md", ROOT / "docs/qdagger.md", ROOT / "docs/dqn.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *DOCS, *sorted(ROOT.glob("teachers/*/README.md"))]
SCRIPTS = sorted((ROOT / "cleanrl").glob("*.py"))
TORCH, JAX = ROOT / "cleanrl/qdagger_dqn_atari_impalacnn.py", ROOT / "cleanrl/qdagger_dqn_atari_jax_impalacnn.py"
FOREIGN = {"--help", "--index-url", "--no-…"}
"""Flags that pages name and that no ``Args`` has"""


def flags_of(file: Path) -> dict[str, Any]:
    """Names and defaults of a program's ``Args``, without importing its libraries."""
    flags = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    try:
                        flags[field.target.id] = ast.literal_eval(field.value) if field.value else None
                    except ValueError:
                        flags[field.target.id] = file.stem if field.target.id == "exp_name" else ...
    return flags


def section(page: Path, title: str) -> str:
    """What stands below a heading of the second level."""
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page.read_text(), re.DOTALL | re.MULTILINE)
    return match[1]


def rows(text: str, first: str | tuple[str, ...] = "`") -> list[list[str]]:
    """The cells of the tables in a text, of the rows that begin so: less heads."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in cells if row[0].startswith(first)]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command in the page's shell blocks."""
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split(" && "):
                yield shlex.split(command, comments=True)


def documented_flags(script: Path) -> dict[str, Any]:
    """Names and defaults of a script's flags by the table of flags."""
    flags = {}
    for name, default, text in rows(section(QDAGGER, "Flags")):
        if text.startswith("PyTorch only") and script == JAX:
            continue
        torch, _, jax = default.partition(", JAX: ")
        value = (jax if script == JAX and jax else torch).replace(",", "")
        special = {"the script's name": script.stem, "empty": ""}
        if value.startswith("`"):
            flags[name.strip("`")] = value.strip("`")
        else:
            flags[name.strip("`")] = special[value] if value in special else ast.literal_eval(value)
    return flags


@pytest.mark.parametrize("script", [TORCH, JAX], ids=["torch", "jax"])
def test_the_table_of_flags_is_that_of_the_script(script: Path) -> None:
    """Every flag with its default, and no other."""
    assert documented_flags(script) == flags_of(script)


@pytest.mark.parametrize("jax", [False, True])
def test_flags_of_dqn_have_the_defaults_of_qdagger(jax: bool) -> None:
    """So docs/dqn.md says, which has no table of its own."""
    script = ROOT / f"cleanrl/dqn_atari{'_jax' * jax}.py"
    assert flags_of(script).items() <= (documented_flags(JAX if jax else TORCH) | {"exp_name": script.stem}).items()


def test_every_metric_is_documented() -> None:
    """The tags that scripts write are those that the pages name."""
    tags = {script: set(re.findall(r'add_scalar\(\s*"([^"]+)"', script.read_text())) for script in SCRIPTS}
    table = {row[0].strip("`") for row in rows(section(QDAGGER, "Metrics"))}
    assert tags[TORCH] == tags[JAX] == table
    named = set(re.findall(r"`((?:charts|losses|eval)/\w+)`", section(DQN, "Train one")))
    assert tags[ROOT / "cleanrl/dqn_atari.py"] == tags[ROOT / "cleanrl/dqn_atari_jax.py"] == named


def test_flags_that_may_change_are_documented() -> None:
    """Those that a resumed run may be given other values of."""
    named = re.findall(r"`--([\w-]+)`", section(ROOT / "docs/resuming.md", "What may change"))
    assert {name.replace("-", "_") for name in named} == MAY_CHANGE - {"resume"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    """Scripts, modules, their flags, targets of make, extras of pip, and files named in commands."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for words in commands(page):
        program = words[:1]
        if words[:2] == ["python", "-m"] and words[2] != "pytest":
            program = [ROOT / f"{words[2].replace('.', '/')}.py"]
        elif words[:1] == ["python"] and words[1] != "-m":
            program = [ROOT / words[1]]
        elif words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        elif words[:2] == ["pip", "install"]:
            for named in re.findall(r"\.\[(.*?)\]", " ".join(words)):
                assert set(named.split(",")) <= extras.keys(), words
        for file in program:
            if isinstance(file, Path):
                flags = flags_of(file) | (flags_of(file.parent / "playing.py") if file.parent.name == "evals" else {})
                for word in words:
                    if word.startswith("--"):
                        name = word[2:].partition("=")[0].replace("-", "_")
                        assert name in flags or (flags.get(name.removeprefix("no_")) is not None), (word, file.name)
        for word in words:
            if re.match(r"(teachers|benchmark|requirements|tests)/", word):
                assert (ROOT / word).exists(), word


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_in_the_text_exist(page: Path) -> None:
    """Whatever is written as `--flag` is one of some program's."""
    programs = [*SCRIPTS, *(ROOT / "cleanrl_utils").rglob("*.py")]
    known = {name for program in programs for name in flags_of(program)}
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`(--[^`]+)`", text):
        for word in span.split():
            if word.startswith("--") and word not in FOREIGN:
                name = word[2:].replace("-", "_")
                assert name in known or name.removeprefix("no_") in known, word


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links, and anchors in them."""
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_module_has_its_place_in_the_table() -> None:
    """That a stranger finds what he looks for."""
    text = section(ROOT / "docs/contributing.md", "Which file holds what")
    for file in [*SCRIPTS, *(ROOT / "cleanrl_utils").glob("*.py")]:
        assert file.name == "__init__.py" or f"`{file.relative_to(ROOT)}`" in text, file.name


def test_readme_is_short() -> None:
    assert len(README.read_text().split()) <= 700  # as `wc -w` counts


def test_results_are_those_of_the_committed_runs(tmp_path: Path) -> None:
    """The table of the docs is the report's, and README's is of its numbers."""
    report.main(report.Args([ROOT / "benchmark/runs"], tmp_path))
    of_report, of_docs = (
        [line for line in page.read_text().splitlines() if re.match(r"\| (game|\w+NoFrameskip)", line)]
        for page in (tmp_path / "table.md", ROOT / "docs/results.md")
    )
    assert of_docs == of_report
    names, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in of_report)
    runs = {(row[0], row[1]): dict(zip(names, row, strict=True)) for row in rows}
    of_readme = []
    for game in sorted({game for game, _ in runs}):
        cells = [game.removesuffix("NoFrameskip-v4")]
        longer = "-150k-final-1e-5" if "BeamRider" in game else "-100k-final-1e-5"
        for ending in ("", longer, "-from-scratch"):
            run = runs[game, f"qdagger_dqn_atari_impalacnn{ending}"]
            cells.append(run["return"] + (f" ({run['seeds']})" if run["seeds"] != "3" else ""))
        of_readme.append([*cells, runs[game, "qdagger_dqn_atari_impalacnn"]["teacher"]])
    table = re.findall(r"^\| (?:BeamRider|Breakout|Pong) .*$", README.read_text(), flags=re.MULTILINE)
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in table] == of_readme


@pytest.fixture(scope="module")
def groups() -> report.Groups:
    """The committed runs, by game and script."""
    return report.read_groups([ROOT / "benchmark/runs"], {})


def test_every_seed_is_that_of_the_committed_runs(groups: report.Groups) -> None:
    """The table of what was tried has the returns of all runs, seed by seed, and no row without one."""
    of_docs = {}
    for name, _, *cells in rows(section(ROOT / "docs/results.md", "What was tried"), ("teacher", "QDagger", "`")):
        for game, cell in zip(("Pong", "Breakout", "BeamRider"), cells, strict=True):
            if cell:
                of_docs[f"{game}NoFrameskip-v4", name.strip("`").removeprefix("QDagger")] = cell
    measured = {}
    for game, scripts in groups.items():
        for script, runs in scripts.items():
            if "jax" not in script:
                name = script.removeprefix("qdagger_dqn_atari_impalacnn")
                measured[game, name] = [run.score for run in runs]
                if not name:
                    measured[game, "teacher"] = [report.mean([run.last(report.TEACHER) for run in runs])]
    assert of_docs == {
        of: " · ".join(f"{score:,.{0 if score >= 1000 else 1}f}" for score in scores) for of, scores in measured.items()
    }


def test_what_the_results_say_of_single_runs_is_so(groups: report.Groups) -> None:
    """That it does not fall too early, for how long it was 0 in the two runs that are named, and how far students came
    when it had faded; and which were warned of.
    """
    text = section(ROOT / "docs/results.md", "What was tried")
    all_runs = [run for scripts in groups.values() for runs in scripts.values() for run in runs]
    warned = {run.script.removeprefix("qdagger_dqn_atari_impalacnn") for run in all_runs if run.warned}
    assert warned == set(re.findall(r"`(-[^`]+)`", re.search(r"^\* \*\*Collapse.*$", text, re.MULTILINE)[0]))
    for run in all_runs:
        returns = run.points[report.TRAINING][:, 1]
        if run.points[report.LAMBDA][:, 1].any() and len(returns) >= 20:
            assert returns[:10].mean() <= returns[10:20].mean(), run.path
    for game, name, seed in (("BeamRider", "-100k", 2), ("Breakout", "-target-100", 1)):
        run = groups[f"{game}NoFrameskip-v4"][f"qdagger_dqn_atari_impalacnn{name}"][seed - 1]
        steps, values = run.points[report.LAMBDA].T
        at_0 = run.last_step - steps[np.flatnonzero(values)[-1] + 1]
        assert re.search(f"`{name}`, seed {seed},.* 0 for the last {round(at_0, -3):,.0f} steps", text), at_0
    assert f"one of {run.points[report.TRAINING][:, 1].max():.0f} held it" in text
    pong, beam_rider, demo = (
        groups[f"{game}NoFrameskip-v4"][f"qdagger_dqn_atari_impalacnn{name}"]
        for game, name in (("Pong", "-100k-final-1e-5"), ("BeamRider", "-150k-final-1e-5"), ("Pong", "-demo"))
    )
    assert f"within {max(run.last(report.TEACHER) - run.score for run in pong):.1f} of its teacher's score" in text
    margins = [round(run.score - run.last(report.TEACHER), -1) for run in beam_rider]
    assert f"by {min(margins):.0f} to {max(margins):.0f} points" in text
    ends = [(run.last(report.RANDOM), run.last(report.TEACHER)) for run in demo]
    ways = [100 * (run.score - random) / (teacher - random) for run, (random, teacher) in zip(demo, ends, strict=True)]
    assert "came {:.0f}, {:.0f} and {:.0f} %".format(*ways) in text
    assert (demo[0].final_games[0] <= -10).sum() == 7


def test_the_site_builds(tmp_path: Path) -> None:
    """Without a dead link or anchor, its formulas as MathML; no page loads anything from another host."""
    pytest.importorskip("material", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    pages = {path.stem: path.read_text() for path in tmp_path.glob("*.html")}
    assert pages.keys() >= {page.stem for page in DOCS}
    assert pages["qdagger"].count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') == 3
    for name, page in pages.items():
        assert "\\(" not in page, name
        assert "\\[" not in page, name
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"?([^\" >]+)", page)
        loaded += re.findall(r"<link[^>]* href=\"?([^\" >]+)", page)
        assert not [address for address in loaded if "//" in address], name
