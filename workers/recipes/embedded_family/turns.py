"""Instruction-style turns made from the corpus: signature -> body, question -> paragraph, English <-> Greek.

Each turn list is a conversation as `[(role, content), ...]`; the tokenizer's chat template renders the same text
as `render`, which a test asserts. Answers are short so that the end of a turn is seen often.
"""

from __future__ import annotations

import ast
import random
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from .sources import Document
from .tasks import calendar_turns, self_turns, task_turns, tool_turns

Turns = list[tuple[str, str]]


@dataclass(frozen=True)
class Conversation:
    """Turns of one category (code, prose, greek, other); `key` decides train or held-out."""

    category: str
    key: str
    turns: Turns


def render(turns: Turns) -> str:
    """The text of a conversation in Gemma 4's turn format (spec section 3), beginning with <bos>."""
    return "<bos>" + "".join(f"<|turn>{role}\n{content.strip()}<turn|>\n" for role, content in turns)


def prompt(turns: Turns) -> str:
    """Everything before the last model turn, then the generation prompt."""
    return render(turns[:-1]) + "<|turn>model\n"


def functions(document: Document) -> Iterator[tuple[str, str, str, str]]:
    """(qualified name, signature, docstring, source) of short documented functions of a module."""
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError):
        return
    lines = document.text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - node.lineno < 24:
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            doc = ast.get_docstring(node)
            if len(source) < 900:
                signature = f"{node.name}({ast.unparse(node.args)})"
                yield node.name, signature, (doc or "").split("\n\n")[0], source


def code_turns(document: Document, rng: random.Random) -> Iterator[Turns]:
    """Signature -> body, name -> docstring, first lines -> rest."""
    module = document.key.removesuffix(".py").replace("/", ".")
    for name, signature, doc, source in functions(document):
        lines = source.splitlines()
        kind = rng.random()
        if doc and kind < 0.35:
            ask = rng.choice(["Write the Python function", "Implement", "Give me the code of"])
            summary = " ".join(doc.split())[:200]
            yield [("user", f"{ask} `{signature}`.\n{summary}"), ("model", f"```python\n{source}\n```")]
        elif doc and kind < 0.6:
            yield [("user", f"What does `{name}` in `{module}` do?"), ("model", " ".join(doc.split())[:400])]
        elif len(lines) > 5 and kind < 0.9:
            half = len(lines) // 2
            head, tail = "\n".join(lines[:half]), "\n".join(lines[half:])
            yield [("user", f"Complete this code:\n```python\n{head}\n```"), ("model", f"```python\n{tail}\n```")]


def verses(document: Document) -> list[tuple[str, str]]:
    """(number, text) of a chapter document."""
    return [tuple(line.split(" ", 1)) for line in document.text.splitlines()[2:] if " " in line]  # type: ignore[misc]


def halves(text: str) -> tuple[str, str] | None:
    """Split a verse after its middle comma or semicolon; None when it has none."""
    cuts = [m.end() for m in re.finditer(r"[,;·:] ", text) if 20 < m.end() < len(text) - 15]
    if not cuts:
        return None
    cut = min(cuts, key=lambda at: abs(at - len(text) // 2))
    return text[:cut].strip(), text[cut:].strip()


def scripture_turns(document: Document, rng: random.Random) -> Iterator[Turns]:
    """Quote a verse; carry on a verse. The Greek chapters are asked in Greek."""
    name, rows, greek = document.text.splitlines()[0], verses(document), document.kind == "greek"
    for number, text in rows:
        split = halves(text)
        if split and rng.random() < 0.5:
            ask = "Συνέχισε" if greek else rng.choice(["Continue", "Carry on", "Finish this verse"])
            yield [("user", f"{ask}: {split[0]}"), ("model", split[1])]
        elif rng.random() < 0.3:
            ask = f"Γράψε το χωρίο {name}:{number}." if greek else f"What does {name}:{number} say?"
            yield [("user", ask), ("model", text)]


def manual_turns(document: Document, rng: random.Random) -> Iterator[Turns]:
    """Heading -> first paragraph; documented object -> its description."""
    for match in re.finditer(r"(?m)^([^\n]{4,70})\n[-=~^*]{4,}\n\n((?:[^\n]+\n){1,8})\n", document.text):
        title, body = match[1].strip(), match[2].strip()
        if not body.startswith((".. ", "#", "=", "+", "*", "-", ">>>")):
            ask = rng.choice(["Explain this topic", "Write a short paragraph about", "Tell me about"])
            yield [("user", f"{ask}: {title}"), ("model", body)]
    pattern = r"(?m)^\.\. (?:function|method|class|data|attribute|exception):: ([^\n]+)\n\n?((?: {3}[^\n]+\n){1,8})\n"
    for match in re.finditer(pattern, document.text):
        body = textwrap.dedent(match[2]).strip()
        if len(body) > 30 and not body.startswith((".. ", ":")):
            yield [("user", f"What is `{match[1].strip()}`?"), ("model", body)]


def help_turns(document: Document, rng: random.Random) -> Iterator[Turns]:
    """Heading -> the paragraph below it, asked in the page's language."""
    asks = {
        "prose": ["Explain this topic", "What does the help say about", "Tell me about"],
        "greek": ["Εξήγησε το θέμα", "Τι λέει η βοήθεια για", "Πες μου για"],
    }
    for match in re.finditer(r"(?:^|\n\n)([^\n]{4,70})\n\n([^\n]{40,500})\n", document.text):
        yield [("user", f"{rng.choice(asks[document.kind])}: {match[1].strip(':')}"), ("model", match[2])]


def message_turns(pairs: list[tuple[str, str]], rng: random.Random) -> Iterator[Turns]:
    """English <-> Greek interface messages."""
    for english, greek in pairs:
        yield [("user", f"Translate to Greek: {english}"), ("model", greek)]
        if rng.random() < 0.5:
            yield [("user", f"Translate to English: {greek}"), ("model", english)]


def conversations(
    documents: list[Document], pairs: list[tuple[str, str]], rng: random.Random
) -> Iterator[Conversation]:
    """Every conversation, in the documents' order; the keys keep a document's turns on its side of the split."""
    for document in documents:
        source = document.key.split("/")[0]
        if document.kind == "code":
            made = code_turns(document, rng)
        elif source in ("web", "sblgnt"):
            made = scripture_turns(document, rng)
        elif source == "python-doc":
            made = manual_turns(document, rng)
        elif source == "office-help":
            made = help_turns(document, rng)
        else:
            continue
        for turns in made:
            yield Conversation(document.kind, document.key, turns)
    for number, turns in enumerate(message_turns(pairs, rng)):
        yield Conversation("greek", f"message-turn/{number}", turns)
    for category, maker, count in (
        ("greek", calendar_turns, 9000),
        ("code", task_turns, 12000),
        ("other", self_turns, 1500),
        ("other", tool_turns, 5000),
    ):
        for number in range(count):
            yield Conversation(category, f"{maker.__name__}/{number}", maker(rng))
