import pathlib, re
def sub(path, *pairs):
    p = pathlib.Path(path); s = p.read_text()
    for old, new in pairs:
        if s.count(old) != 1: print("MISS", path, s.count(old), old[:80]); continue
        s = s.replace(old, new)
    p.write_text(s)
sub("src/ronde/bench/variables.py",('''_OPERATORS = {"AND": and_, "OR": or_, "MOD": mod, "DIV": floordiv}
''','''_OPERATORS = {
    "AND": int.__and__,
    "OR": int.__or__,
    "MOD": int.__mod__,
    "DIV": int.__floordiv__,
}
'''),('''from operator import and_, floordiv, mod, or_
''',''))
p=pathlib.Path("src/ronde/render/plot.py"); s=p.read_text()
s=re.sub(r"        axes.yaxis.set_major_formatter\(\n?\s*lambda time_us, _: format_duration\(time_us / 1e6\)\n?\s*\)\n","        axes.yaxis.set_major_formatter(_time_label)\n",s)
s=s.replace('''def _figure_class()''','''def _time_label(time_us: float, _place: int | None) -> str:
    return format_duration(time_us / 1e6)


def _figure_class()''')
p.write_text(s)
