"""The HTML of an exercise on a page: an editor that a script brings to life, and a recorded run without one."""

import html
import inspect
from pathlib import Path
from typing import Any

from lib.given.show.tokens import Html
from lib.workbook.book.catalog import BookError, Exercise, find
from lib.workbook.grading.mistakes import Mistake, mistakes_of
from lib.workbook.tools.notebook import contract
from lib.workbook.tools.tryit import kit as kits
from lib.workbook.tools.tryit.judge import Judge

STYLE = Path(__file__).with_name("tryit.css")


def tryit(name: str, recorded: str, start: str) -> Html:
    """An exercise that its reader solves on the page.

    Args:
        name: The exercise's name; `assets.EXERCISES` has it, too.
        recorded: The first words of the known mistake whose run is shown where no script runs.
        start: The first words of the known mistake with which somebody may begin: a line to mend takes a minute on a
            telephone, where a dozen to write take many.
    """
    kit = kits.make(name)
    _, exercise = find(name)
    assert exercise is not None
    page = (
        f'<section class="workbook-try" data-exercise="{name}" aria-label="Exercise {exercise.number}: {name}">'
        f"<style>{STYLE.read_text(encoding='utf-8')}</style>"
        f"{_live(kit, exercise, start)}{_recorded(kit, exercise, recorded)}</section>"
    )
    return Html(page, f"Exercise {exercise.number}: {name}\n\n{kit['stub']}")


def _live(kit: dict[str, Any], exercise: Exercise, start: str) -> str:
    """What the script shows: the editor, its buttons, and where the result is said. A page without script hides it."""
    n_lines = len(kit["stub"].splitlines()) + 11
    home = kit["reads"][""]["page"]
    return f"""<div class="try-live" hidden>
<label><span>Exercise {exercise.number}, <code>{exercise.name}</code>: write it here</span>
<textarea rows="{n_lines}" spellcheck="false" autocapitalize="off" autocomplete="off" autocorrect="off"
 aria-describedby="try-keys-{exercise.name}">{html.escape(kit["stub"], quote=False)}</textarea></label>
<div class="try-buttons"><button type="button" class="try-check">Check</button>
<button type="button" class="try-mend">Mend one line instead</button>
<button type="button" class="try-reset">Start over</button>
<span id="try-keys-{exercise.name}">Ctrl+Enter checks; Tab leaves the box.</span></div>
<progress aria-label="Python is loading" max="1" value="0" hidden></progress>
<div class="try-said" role="status" aria-live="polite"></div>
<details><summary>The contract, and hints</summary>{contract(exercise.doc)}
<p>The chapter has <a href="{home}">three hints</a>, and everything that leads to this function.</p></details>
<template><p>That is what a check of this book does, and you have written a piece of a real tokenizer.
<a href="{home}">Chapter {exercise.chapter}</a> goes on from here: the next exercise trains one.</p></template>
<pre class="try-start" hidden>{html.escape(_text(_mistake(exercise, start), exercise), quote=False)}</pre></div>"""


def _recorded(kit: dict[str, Any], exercise: Exercise, words: str) -> str:
    """A run of a known mistake, made when the page was."""
    wrong = _mistake(exercise, words)
    text = _text(wrong, exercise)
    result = Judge(kit)(text)
    if ("looks like", wrong.sentence) not in result["rows"]:
        raise BookError(f"the recorded run of {exercise.name} should look like {wrong.sentence!r}, but is {result}")
    rows = "".join(f"<dt>{html.escape(label)}</dt><dd>{html.escape(said)}</dd>" for label, said in result["rows"])
    return f"""<div class="try-recorded"><p>A recorded run: a first answer to exercise {exercise.number},
and what the check says of it.</p>
<pre>{html.escape(text, quote=False)}</pre>
<div class="try-report try-wrong"><p><strong>{exercise.name}: {html.escape(result["problem"])}</strong>
({result["passed"]} of {result["total"]} checks pass)</p><dl>{rows}</dl></div></div>"""


def _text(wrong: Mistake, exercise: Exercise) -> str:
    return kits.shortened(inspect.getsource(wrong.implementation), exercise).strip()


def _mistake(exercise: Exercise, words: str) -> Mistake:
    found = [m for m in mistakes_of(exercise.module, exercise.name) if m.sentence.startswith(words)]
    if len(found) != 1:
        raise BookError(f"{len(found)} mistakes of {exercise.name} begin with {words!r}, expected one")
    return found[0]
