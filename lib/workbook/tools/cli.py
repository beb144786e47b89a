"""The ``workbook`` command: lab, check, progress, solution, reset, stubs, site, test."""

import difflib
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
    for chapter, rows in found:
        line = Text(f"{chapter.number:>3}  {chapter.title:<30} ")
        for exercise in chapter.exercises:
            sign, colour = checks.SIGNS[rows.get(exercise.name, {"state": "not started"})["state"]]
            line.append(sign + " ", colour)
        passed = sum(row["state"] == "passed" for row in rows.values())
        line.append(f" {passed} of {len(chapter.exercises)}")
        console.print(line)
    if following is None:
        console.print("\nEverything passes. What is left is the part without exercises.")
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
    from lib.workbook.book.stubs import BEGIN, END, source_of

    chapter, exercise = find(what)
    whole = chapter.numbered()
    reference = whole if exercise is None else source_of(whole, exercise.name)
    text = "\n".join(line for line in (reference or "").splitlines() if line.strip() not in (BEGIN, END))
    if not diff:
        console.print(Syntax(text, "python", background_color="default"))
        return
    own = chapter.mine.read_text(encoding="utf-8") if chapter.mine.exists() else ""
    try:
        yours = own if exercise is None else source_of(own, exercise.name) or ""
    except SyntaxError as error:
        raise BookError(f"lib/{chapter.module}.py:{error.lineno}: {error.msg}; mend that line first") from error
    names = f"lib/{chapter.module}.py (yours)", f"solutions/{chapter.module}.py"
    lines = list(difflib.unified_diff(yours.splitlines(), text.splitlines(), *names, lineterm=""))
    console.print(
        Syntax("\n".join(lines), "diff", background_color="default")
        if lines
        else "yours is the reference's, to the letter"
    )


@app.command()
def reset(what: What):
    """Put the stub of an exercise, or of a whole chapter, back; what was there is kept in a dated copy."""
    from lib.workbook.book import stubs

    chapter, exercise = find(what)
    copy = stubs.reset(chapter, exercise.name if exercise else None)
    console.print(f"lib/{chapter.module}.py: {exercise.name if exercise else 'all of it'} is a stub again")
    if copy is not None:
        console.print(f"what was there is kept in {copy.relative_to(ROOT)}")


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


def main() -> None:
    """The console script: an error of the user's is one line, without a traceback."""
    try:
        app()
    except BookError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"workbook: {error}", markup=False)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
