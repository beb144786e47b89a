"""Work through the Scaling Workbook: open a chapter, check your answers, and see what comes next."""

import codecs
import difflib
import io
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from lib.workbook.book.catalog import ROOT, BookError, find, routes

if TYPE_CHECKING:
    from lib.workbook.tools.check import Result
    from lib.workbook.tools.progress import Line

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False, soft_wrap=False)

What = Annotated[str, typer.Argument(help="A chapter or an exercise: 2, rope, 2.4 or apply_rope.")]


def port_number(text: str | int) -> int:
    """Read a port; the message names a wrong one."""
    if not str(text).isdecimal() or not 1 <= int(text) <= 65_535:
        raise typer.BadParameter(f"{text!r}: expected a port from 1 to 65535")
    return int(text)


@app.command()
def lab(
    chapter: Annotated[str | None, typer.Argument(help="The chapter to open: 2 or rope.")] = None,
    browser: Annotated[bool, typer.Option(help="Open it in the browser.")] = True,
    port: Annotated[
        int | None, typer.Option(help="Use this port instead of the first free one.", parser=port_number)
    ] = None,
) -> None:
    """Open a chapter in JupyterLab, with the file that you write beside it."""
    from lib.workbook.tools import lab as jupyterlab

    raise typer.Exit(jupyterlab.start(chapter, browser=browser, port=port))


@app.command()
def check(
    what: Annotated[
        str | None, typer.Argument(help="A chapter or an exercise: 2, rope, 2.4 or apply_rope; left out with --route.")
    ] = None,
    route: Annotated[
        str | None, typer.Option("--route", help="Check a route through the book, such as kernels.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Check again whenever you save a file in lib/.")] = False,
    mine: Annotated[bool, typer.Option("--mine", help="Use your own answers for the other chapters too.")] = False,
) -> None:
    """Check your answers to a chapter, to one exercise, or along a route."""
    if (what is None) == (route is None):
        raise BookError(
            "check takes either a chapter or an exercise, as in `workbook check 2`, or --route with its key"
        )
    if route is not None:
        if watch:
            raise BookError("--watch follows a chapter or an exercise, not a route")
        raise typer.Exit(_check_route(route, mine))
    assert what is not None
    if not watch:
        raise typer.Exit(_check_once(what, mine))
    from watchfiles import watch as changes

    status = 1
    saves = changes(ROOT / "lib", ROOT / "tests", raise_interrupt=True, rust_timeout=100, yield_on_timeout=True)
    try:
        next(saves)  # from here on no save is missed, not even during a check
        status = _check_once(what, mine)
        console.print("[dim]watching lib/ and tests/; press Ctrl-C to stop[/dim]")
        for files in saves:
            if files:
                console.rule(style="dim")
                status = _check_once(what, mine)
    except KeyboardInterrupt:
        pass
    raise typer.Exit(status)


def _check_route(key: str, mine: bool) -> int:
    from lib.workbook.tools import check as checks

    if key not in routes():
        raise BookError(f"no route is called {key!r}: expected one of {', '.join(routes())}")
    route = routes()[key]
    result = checks.run_route(route, mine=mine)
    status = _show(result)
    passed = [e for e in route.exercises if (e.module, e.name) in result.passed]
    minutes = sum(e.size.minutes for e in route.exercises if e not in passed)
    console.print(f"{route.title}: {len(passed)} of {len(route.exercises)} passed, about {minutes} minutes to go")
    return status


def _check_once(what: str, mine: bool) -> int:
    from lib.workbook.tools import check as checks

    return _show(checks.run(what, mine=mine))


def _show(result: "Result") -> int:
    """Print the table of a check's result and its first report; returns the exit status."""
    from rich.text import Text

    from lib.workbook.tools import check as checks

    console.print(checks.table(result.rows))
    if result.first_report:
        console.print(Text(result.first_report), soft_wrap=True)
        console.print()
    return result.status


@app.command()
def progress() -> None:
    """Show all chapters at a glance, and the next exercise."""
    from lib.workbook.tools import progress as progresses

    found, following = progresses.glance()
    for row in found:
        _show_chapter(row)
    _show_routes({(row.chapter.module, name): graded["state"] for row in found for name, graded in row.rows.items()})
    if following is None:
        console.print("\nEverything passes. You have written the whole book.")
        return
    if problem := next((row.problem for row in found if row.chapter.module == following.module), ""):
        console.print(f"\nnext: fix the file of chapter {following.chapter}: {problem}", markup=False, soft_wrap=True)
        return
    console.print(
        f"\nnext: [bold]{following.number} {following.name}[/bold]: {following.summary}\n"
        f"      write it in lib/{following.module}.py, then run: workbook check {following.name}"
    )


def _show_chapter(row: "Line") -> None:
    from rich.text import Text

    from lib.workbook.tools import check as checks

    line = Text(f"{row.chapter.number:>3}  {row.chapter.title:<30} ")
    if row.problem:
        line.append(row.problem, "red")
    else:
        for exercise in row.chapter.exercises:
            sign, colour = checks.SIGNS[row.rows.get(exercise.name, {"state": "not started"})["state"]]
            line.append(sign + " ", colour)
        passed = sum(graded["state"] == "passed" for graded in row.rows.values())
        line.append(f" {passed} of {len(row.chapter.exercises)}")
    console.print(line, soft_wrap=True)


def _show_routes(states: dict[tuple[str, str], str]) -> None:
    """How far each route is, and how long the rest takes, from the state of each exercise (module, name)."""
    console.print()
    for route in routes().values():
        left = [e for e in route.exercises if states.get((e.module, e.name)) != "passed"]
        hours = round(sum(e.size.minutes for e in left) / 60)
        done = len(route.exercises) - len(left)
        console.print(f"{route.title:<22} {done:>3} of {len(route.exercises):<4} {hours:>3} h to go")


@app.command()
def solution(
    what: What,
    diff: Annotated[bool, typer.Option("--diff", help="Show how it differs from your answer.")] = False,
) -> None:
    """Show one good answer, or how it differs from yours."""
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
        raise BookError(f"{where_it_breaks(chapter, error)}; fix that line first") from error
    names = f"lib/{chapter.module}.py (yours)", f"solutions/{chapter.module}.py"
    lines = list(difflib.unified_diff(yours.splitlines(), text.splitlines(), *names, lineterm=""))
    if lines:
        _print_source("\n".join(lines), "diff")
    else:
        console.print("your answer is the same as the reference, letter for letter")


def _print_source(text: str, language: str) -> None:
    """Print code in colour and leave long lines to the terminal, so that a pipe gets them unbroken."""
    highlighted = Syntax("", language, background_color="default").highlight(text)
    highlighted.rstrip()
    console.print(highlighted, soft_wrap=True)


@app.command()
def reset(
    what: What,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before resetting a whole chapter.")] = False,
) -> None:
    """Start an exercise, or a whole chapter, over; a dated copy of your answer is kept."""
    from lib.workbook.book import stubs

    chapter, exercise = find(what)
    mine = f"lib/{chapter.module}.py"
    if exercise is None and not yes and stubs.is_begun(chapter):
        if not sys.stdin.isatty():
            raise BookError(f"this resets all of {mine}; if you want that, add --yes (a dated copy is kept)")
        typer.confirm(f"Reset all of {mine}? A dated copy is kept.", abort=True)
    copy = stubs.reset(chapter, exercise.name if exercise else None)
    typer.echo(f"{mine}: {exercise.name if exercise else 'the whole file'} is a stub again")
    if copy is not None:
        typer.echo(f"your answer is kept; to get it back: cp {copy.relative_to(ROOT)} {mine}")


@app.command()
def update(
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="REMOTE/BRANCH", help="Update from here instead of the branch that this one follows."
        ),
    ] = None,
) -> None:
    """Bring the book up to date; everything you have written stays as it is."""
    from lib.workbook.tools import update as updates

    updates.update(source, typer.echo)


@app.command()
def stubs(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with status 1 if anything differs.")
    ] = False,
) -> None:
    """Write what is derived: the stubs of lib/ and the numbers of figures (for maintainers)."""
    from lib.workbook.book.labels import number_figures
    from lib.workbook.book.stubs import write_stubs

    lines = write_stubs(check=check) + number_figures(check=check)
    for line in lines:
        typer.echo(line)
    if check and lines:
        typer.echo("run `workbook stubs`: it writes lib/ from solutions/, and the numbers of figures")
        raise typer.Exit(1)
    if not lines:
        typer.echo("every stub matches the reference, and the figures are numbered in order")


@app.command()
def site(destination: Annotated[str, typer.Argument(help="The folder for the pages.")] = "_build/html") -> None:
    """Build the book's site; every cell runs on the reference solutions."""
    from lib.workbook.tools import site as sites

    sites.build(destination)


@app.command()
def pdf(
    target: Annotated[str, typer.Argument(help="The file to write.")] = "_build/scaling-workbook.pdf",
    site: Annotated[str, typer.Option(help="The folder of the site's pages, which are built first.")] = "_build/html",
) -> None:
    """Print the whole book as one PDF, with contents, figures and page numbers."""
    from lib.workbook.tools import paper
    from lib.workbook.tools import site as sites

    sites.build(site)
    n_pages = paper.write(ROOT / site, ROOT / target)
    typer.echo(f"{target}: {n_pages} pages")


@app.command()
def test() -> None:
    """Run the reference solutions against every test, and test the machinery (for maintainers)."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    folders = [path for path in (ROOT / "tests").iterdir() if (path / "__init__.py").exists()]
    longest_first = sorted((str(path.relative_to(ROOT)) for path in folders), reverse=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        *longest_first,
        "--reference",
        "-m",
        "not browser and not exhaustive",
        "-q",
        "--durations=40",
    ]
    # three on two cores: while one waits for its ranks or its server, the others compute
    command += ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
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
"""Replacements for signs that a terminal cannot show; any other sign becomes a question mark."""


def plainly(error: UnicodeError) -> tuple[str, int]:
    """Handle an encoding error: print the nearest sign that the terminal has instead of raising."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def main() -> None:
    """The console script: a mistake in its use is reported in one line, without a traceback."""
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
