"""The ``workbook`` command: lab, check, progress, solution, reset, update, stubs, site, test."""

import codecs
import difflib
import io
import os
import subprocess
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from lib.workbook.book.catalog import ROOT, BookError, find

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False, soft_wrap=False)

What = Annotated[str, typer.Argument(help="a chapter or an exercise: 2, rope, 2.4 or apply_rope")]


@app.command()
def lab(
    chapter: Annotated[str | None, typer.Argument(help="the chapter to open, as 2 or rope")] = None,
    browser: Annotated[bool, typer.Option(help="open the browser")] = True,
    port: Annotated[int | None, typer.Option(help="instead of the first free one")] = None,
):
    """Open a chapter in JupyterLab beside the file that you write."""
    from lib.workbook.tools import lab as jupyterlab

    raise typer.Exit(jupyterlab.start(chapter, browser=browser, port=port))


@app.command()
def check(
    what: What,
    watch: Annotated[bool, typer.Option("--watch", help="check again whenever a file of lib/ is saved")] = False,
    mine: Annotated[bool, typer.Option("--mine", help="your answers for the other chapters' names too")] = False,
):
    """Grade a chapter or an exercise of yours."""
    if not watch:
        raise typer.Exit(_check_once(what, mine))
    from watchfiles import watch as changes

    status = 1
    saves = changes(ROOT / "lib", ROOT / "tests", raise_interrupt=True, rust_timeout=100, yield_on_timeout=True)
    try:
        next(saves)  # from here on no save is missed, also not during a check
        status = _check_once(what, mine)
        console.print("[dim]watching lib/ and tests/; Ctrl-C ends it[/dim]")
        for files in saves:
            if files:
                console.rule(style="dim")
                status = _check_once(what, mine)
    except KeyboardInterrupt:
        pass
    raise typer.Exit(status)


def _check_once(what: str, mine: bool) -> int:
    from rich.text import Text

    from lib.workbook.tools import check as checks

    result = checks.run(what, mine=mine)
    console.print(checks.table(result.rows))
    if result.first_report:
        console.print(Text(result.first_report), soft_wrap=True)
        console.print()
    return result.status


@app.command()
def progress():
    """All chapters at a glance, and the next exercise."""
    from rich.text import Text

    from lib.workbook.tools import check as checks
    from lib.workbook.tools import progress as progresses

    found, following = progresses.glance()
    for row in found:
        line = Text(f"{row.chapter.number:>3}  {row.chapter.title:<30} ")
        if row.problem:
            line.append(row.problem, "red")
            console.print(line, soft_wrap=True)
            continue
        for exercise in row.chapter.exercises:
            sign, colour = checks.SIGNS[row.rows.get(exercise.name, {"state": "not started"})["state"]]
            line.append(sign + " ", colour)
        passed = sum(graded["state"] == "passed" for graded in row.rows.values())
        line.append(f" {passed} of {len(row.chapter.exercises)}")
        console.print(line, soft_wrap=True)
    if following is None:
        console.print("\nEverything passes. What is left is the part without exercises.")
        return
    if problem := next((row.problem for row in found if row.chapter.module == following.module), ""):
        console.print(f"\nnext: mend chapter {following.chapter}: {problem}", markup=False, soft_wrap=True)
        return
    console.print(
        f"\nnext: [bold]{following.number} {following.name}[/bold]: {following.summary}\n"
        f"      write it in lib/{following.module}.py, then: workbook check {following.name}"
    )


@app.command()
def solution(
    what: What,
    diff: Annotated[bool, typer.Option("--diff", help="how it differs from yours")] = False,
):
    """Show the reference's answer, or how it differs from yours."""
    from lib.workbook.book.sources import read_mine
    from lib.workbook.book.stubs import BEGIN, END, source_of, where_it_breaks

    chapter, exercise = find(what)
    whole = chapter.numbered()
    reference = whole if exercise is None else source_of(whole, exercise.name)
    text = "\n".join(line for line in (reference or "").splitlines() if line.strip() not in (BEGIN, END))
    if not diff:
        _print_source(text, "python")
        return
    own = read_mine(chapter) if chapter.mine.exists() else ""
    try:
        yours = own if exercise is None else source_of(own, exercise.name) or ""
    except SyntaxError as error:
        raise BookError(f"{where_it_breaks(chapter, error)}; mend that line first") from error
    names = f"lib/{chapter.module}.py (yours)", f"solutions/{chapter.module}.py"
    lines = list(difflib.unified_diff(yours.splitlines(), text.splitlines(), *names, lineterm=""))
    if lines:
        _print_source("\n".join(lines), "diff")
    else:
        console.print("yours is the reference's, to the letter")


def _print_source(text: str, language: str) -> None:
    """Print code in colours, every line whole: a narrow terminal breaks it, and a pipe gets it as it is."""
    highlighted = Syntax("", language, background_color="default").highlight(text)
    highlighted.rstrip()
    console.print(highlighted, soft_wrap=True)


@app.command()
def reset(
    what: What,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask before a whole chapter is started anew")] = False,
):
    """Put the stub of an exercise, or of a whole chapter, back; what was there is kept in a dated copy."""
    from lib.workbook.book import stubs

    chapter, exercise = find(what)
    mine = f"lib/{chapter.module}.py"
    if exercise is None and not yes and stubs.is_begun(chapter):
        if not sys.stdin.isatty():
            raise BookError(f"this starts all of {mine} anew: if you mean it, add --yes (a dated copy is kept)")
        typer.confirm(f"Start all of {mine} anew? A dated copy is kept.", abort=True)
    copy = stubs.reset(chapter, exercise.name if exercise else None)
    typer.echo(f"{mine}: {exercise.name if exercise else 'all of it'} is a stub again")
    if copy is not None:
        typer.echo(f"what was there is kept; to have it back: cp {copy.relative_to(ROOT)} {mine}")


@app.command()
def update(
    source: Annotated[
        str | None, typer.Option("--from", metavar="REMOTE/BRANCH", help="instead of what this branch follows")
    ] = None,
):
    """Bring the book up to date; what you have begun stays as you wrote it."""
    from lib.workbook.tools import update as updates

    updates.update(source, typer.echo)


@app.command()
def stubs(check: Annotated[bool, typer.Option("--check", help="change nothing; exit 1 if a stub differs")] = False):
    """Write the stubs of lib/ from the reference (for maintainers)."""
    from lib.workbook.book.stubs import write_stubs

    lines = write_stubs(check=check)
    for line in lines:
        typer.echo(line)
    if check and lines:
        typer.echo("run `workbook stubs`: it makes lib/ and its record from solutions/")
        raise typer.Exit(1)
    if not lines:
        typer.echo("every stub is as the reference says")


@app.command()
def site(destination: Annotated[str, typer.Argument(help="where the pages go")] = "_build/html"):
    """Build the book's site, every cell executed on the reference."""
    from lib.workbook.tools import site as sites

    sites.build(destination)


@app.command()
def test():
    """What `make test` runs: the reference against every test, and the machinery."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    folders = [path for path in (ROOT / "tests").iterdir() if (path / "__init__.py").exists()]
    longest_first = sorted((str(path.relative_to(ROOT)) for path in folders), reverse=True)
    command = [sys.executable, "-m", "pytest", *longest_first, "--reference", "-m", "not browser", "-q"]
    command += ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    raise typer.Exit(subprocess.run(command, cwd=ROOT, env=environment).returncode)


PLAIN = {
    "✓": "+",
    "✗": "x",
    "·": ".",
    "–": "-",
    "—": "-",
    "−": "-",
    "…": "...",
    "×": "x",
    "→": "->",
    "≤": "<=",
    "≥": ">=",
}
"""What stands for a sign on a terminal that cannot show it; any other becomes a question mark."""


def plainly(error: UnicodeError) -> tuple[str, int]:
    """A handler of encoding errors: the nearest sign that the terminal has, instead of an exception."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def main() -> None:
    """The console script: an error of the user's is one line, without a traceback."""
    codecs.register_error("plainly", plainly)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plainly")
    try:
        app()
    except BookError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"workbook: {error}", markup=False)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
