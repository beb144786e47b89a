"""What is dropped from a corpus and why: chapter 26's rules on one document, and the count of what each rule does."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lib.data import c4_clean, extract_text, gopher_quality, mask_pii
from lib.runs.data.store import Document

N_EXAMPLES, SHOWN = 10, 300
"""Examples of each rule, and the characters that are shown of each."""
PAGE = re.compile(r"\s*(<\?xml[^>]*>\s*)?<(!doctype html|html|head|body)\b", re.IGNORECASE)
"""How a text begins that is an HTML page."""


def size(document: Document | None) -> int:
    """Bytes of a document's text; 0 for one that was dropped."""
    return len(document.text.encode()) if document else 0


@dataclass
class Tally:
    """What each step got and passed on, and what each of its rules did, with examples.

    Attributes:
        steps: For each step: documents and bytes in and out, and for each rule the documents that it dropped or changed
            and the bytes that they lost.
        examples: For each step and rule, the first documents: place, and what the rule saw.
    """

    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    examples: dict[str, list[list[str]]] = field(default_factory=dict)

    def count(self, step: str, before: Document, after: Document | None, rules: dict[str, str]) -> None:
        """Count a document in a step.

        Args:
            step: Name of the step.
            before: The document that the step got.
            after: What it passed on; None if it dropped the document.
            rules: The rules that applied, and what each saw, as an example.
        """
        row = self.steps.setdefault(step, _empty())
        row["documents_in"] += 1
        row["bytes_in"] += size(before)
        row["documents_out"] += after is not None
        row["bytes_out"] += size(after)
        for name, seen in rules.items():
            rule = row["rules"].setdefault(name, {"documents": 0, "bytes_in": 0, "bytes_out": 0})
            rule["documents"] += 1
            rule["bytes_in"] += size(before)
            rule["bytes_out"] += size(after)
            examples = self.examples.setdefault(f"{step}: {name}", [])
            if len(examples) < N_EXAMPLES:
                examples.append([before.place, seen[:SHOWN]])

    def add(self, other: "Tally") -> None:
        """Add what was counted on later documents."""
        for step, theirs in other.steps.items():
            ours = self.steps.setdefault(step, _empty())
            for name in _empty().keys() - {"rules"}:
                ours[name] += theirs[name]
            for rule, counts in theirs["rules"].items():
                old = ours["rules"].setdefault(rule, dict.fromkeys(counts, 0))
                ours["rules"][rule] = {name: old[name] + n for name, n in counts.items()}
        for name, examples in other.examples.items():
            self.examples[name] = (self.examples.get(name, []) + examples)[:N_EXAMPLES]

    def table(self) -> list[str]:
        """One line a step, and below it one a rule, by the number of its documents."""
        lines = [f"{'step and rule':32} {'documents':>19} {'share':>6} {'bytes in':>15} {'bytes out':>15}"]
        for step, row in self.steps.items():
            kept = f"{row['documents_in']:,} to {row['documents_out']:,}"
            lines.append(f"{step:32} {kept:>19} {'':6} {row['bytes_in']:15,} {row['bytes_out']:15,}")
            for name, rule in sorted(row["rules"].items(), key=lambda item: (-item[1]["documents"], item[0])):
                share, n = rule["documents"] / row["documents_in"], f"{rule['documents']:,}"
                lines.append(f"  {name:30} {n:>19} {share:6.1%} {rule['bytes_in']:15,} {rule['bytes_out']:15,}")
        return lines

    def page(self) -> str:
        """The table and the examples, as Markdown."""
        lines = ["# What was dropped, and why", "", "```text", *self.table(), "```", ""]
        for name, examples in self.examples.items():
            lines += [f"## {name}", ""]
            for place, seen in examples:
                lines += [f"`{place}`", "", "```text", seen.replace("```", "` ` `"), "```", ""]
        return "\n".join(lines)


def _empty() -> dict[str, Any]:
    return {"documents_in": 0, "documents_out": 0, "bytes_in": 0, "bytes_out": 0, "rules": {}}


# ---- one document ----------------------------------------------------------------------------------------------------

Judged = tuple[Document | None, dict[str, str]]
"""What a rule leaves of a document, and the names of the rules that applied, each with what it saw."""


def _changed(document: Document, text: str) -> Document:
    return Document(document.place, text, document.is_code)


def extract(document: Document) -> Judged:
    """A page's text; other documents stay as they are."""
    if not PAGE.match(document.text):
        return document, {}
    text = extract_text(document.text)
    if not text:
        return None, {"no_text": document.text}
    return _changed(document, text), {"page": document.text}


def quality(document: Document) -> Judged:
    """Gopher's rules, which are made for prose: code stays."""
    reason = None if document.is_code else gopher_quality(document.text)
    return (None, {reason: document.text}) if reason else (document, {})


def c4(document: Document) -> Judged:
    """C4's rules for lines and pages of prose: code stays."""
    if document.is_code:
        return document, {}
    text, reason = c4_clean(document.text)
    if reason:
        return None, {reason: document.text}
    if text == document.text:
        return document, {}
    kept = set(text.splitlines())
    dropped = [line for line in document.text.splitlines() if line.strip() and line.strip() not in kept]
    return _changed(document, text), {"lines": "\n".join(dropped)}


def personal(document: Document) -> Judged:
    """Masks in place of addresses and numbers."""
    text, counts = mask_pii(document.text)
    if not sum(counts.values()):
        return document, {}
    lines = zip(document.text.splitlines(), text.splitlines(), strict=False)
    seen = "\n".join(f"{before}\n-> {after}" for before, after in lines if before != after)
    return _changed(document, text), {kind: seen for kind, n in counts.items() if n}


RULES: dict[str, Callable[[Document], Judged]] = {
    "extract": extract,
    "quality": quality,
    "c4": c4,
    "personal": personal,
}
"""The steps that need to see no other document, in the order in which they are applied."""


def judge(document: Document, names: tuple[str, ...], tally: Tally) -> Document | None:
    """Apply the named ones of ``RULES``, one after the other; None if one drops the document."""
    for name, rule in RULES.items():
        if name in names:
            after, found = rule(document)
            tally.count(name, document, after, found)
            if after is None:
                return None
            document = after
    return document
