import pathlib, re
def sub(path, *pairs):
    p = pathlib.Path(path); s = p.read_text()
    for old, new in pairs:
        if s.count(old) != 1: print("MISS", path, s.count(old), old[:80]); continue
        s = s.replace(old, new)
    p.write_text(s)
T="src/ronde/bench/log_text.py"
sub(T,
('''        listed = self._state.listed
        if self._columns is None and text[-1] in _DOTS and _ELISION.search(text):
            listed.is_cut = bool(listed.devices)
''','''        if self._columns is None and text.endswith(_DOTS):
            self._state.listed.is_cut = bool(self._state.listed.devices)
'''),
('''        if line[-1] in _DOTS and _ELISION.fullmatch(text.strip()):
''','''        if line.endswith(_DOTS) and not text.strip(" .\\u2026"):
'''),
('''_DOTS = ".\\u2026"
_ELISION = re.compile(r"[.\\u2026]*(?:\\.{3}|\\u2026)$")
''','''_DOTS = ("...", "\\u2026")
'''))
p=pathlib.Path("tests/bench/test_compare.py"); s=p.read_text()
s=re.sub(r'r"ronde: standard input:[^"]*the log ends"', 'r"ronde: standard input:15: run 1 has no footer"', s); p.write_text(s)
