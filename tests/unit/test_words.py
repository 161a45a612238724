"""The source speaks the field's English: first lines, words and names."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "ronde"
CLAUSE = r"(?i)\b(what|whatever|who|whoever|whom|whose|whether|how)\b"
WORDS = r"(?i)\b(nobody|somebody|whoever|whatever|(is|are) told|(is|are|was) to be)\b"
NAMES = (
    "_*(what|places?|aside|meet|introduce|told|says|take_.+|Look|Dealer|Dealt|Barred"
    "|Offer|Drain|Seal|Transcript|Tick|Resumable|Carrier)"
)


def find_offences(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        name, line = "", getattr(node, "lineno", 1)
        match node:
            case ast.arg(arg=name):
                pass
            case ast.Name(id=name, ctx=ast.Store()):
                pass
            case ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case ast.Module() | ast.ClassDef() | ast.FunctionDef():
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                if found := re.search(CLAUSE, first):
                    yield line, f"a first line has no clause with {found[0]!r}: {first}"
                name = getattr(node, "name", "")
                name = "" if name == "place" else name  # of a function: the verb
            case _:
                pass
        if re.fullmatch(NAMES, name):
            yield line, f"{name} is no word of the field"
    # To read tokens takes long, and most files have none of the words.
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    for token in tokens if re.search(WORDS, text) else ():
        is_text = token.type in (tokenize.COMMENT, tokenize.STRING)
        if is_text and (found := re.search(WORDS, token.string)):
            yield token.start[0], f"write without {found[0]!r}"


def test_the_source_speaks_plain_english() -> None:
    offences = [
        f"{path.relative_to(SOURCE.parents[1])}:{line}: {reason}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, reason in find_offences(path.read_text())
    ]
    assert not offences, "\n".join(offences)
