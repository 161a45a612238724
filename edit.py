import pathlib, re
def sub(path, *pairs):
    p = pathlib.Path(path); s = p.read_text()
    for old, new in pairs:
        if s.count(old) != 1: print("MISS", path, s.count(old), old[:80]); continue
        s = s.replace(old, new)
    p.write_text(s)
T="src/ronde/bench/log_text.py"
sub(T,('''      | >[ ]?                                        # a quotation in a mail
''',''),('''        bare = raw.rstrip()
        has_prefix = ":" in bare or "]" in bare or bare[:1] == ">"
        if has_prefix and (prefix''','''        bare = raw.rstrip()
        if bare[:1] == ">":
            bare = bare.lstrip("> ")  # a quotation in a mail
        if (":" in bare or "]" in bare) and (prefix'''))
p=pathlib.Path("tests/bench/test_log_failures.py"); s=p.read_text()
s=s.replace('"14: a time or rate that is negative or no number in 1 row, the first of 4096"','"14: a time or rate that is negative or no number in 1 row"')
p.write_text(s)
# one place for the two variants of a table's titles
V="src/ronde/bench/variables.py"
sub(V,('''_OPERATORS = {
    "AND": int.__and__,
    "OR": int.__or__,
    "MOD": int.__mod__,
    "DIV": int.__floordiv__,
}
''','''_OPERATORS = dict(
    AND=int.__and__, OR=int.__or__, MOD=int.__mod__, DIV=int.__floordiv__
)
'''))
