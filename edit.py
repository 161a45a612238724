import pathlib, re
def sub(path, *pairs):
    p = pathlib.Path(path); s = p.read_text()
    for old, new in pairs:
        if s.count(old) != 1: print("MISS", path, s.count(old), old[:80]); continue
        s = s.replace(old, new)
    p.write_text(s)
sub("src/ronde/bench/log_state.py",('''    # Ranks of a process: nccl-tests' JSON lists the first, but in a release that has all.
    num_each: int = 1
''','''    num_each: int = 1  # ranks of a process, of which nccl-tests' JSON lists the first
'''),('''        each = 1 if any(rank % self.num_each for rank in numbers) else self.num_each
        if self.is_cut or not numbers or numbers != [*range(0, len(numbers) * each, each)]:
            return None
''','''        # One release lists them all there.
        each = 1 if any(rank % self.num_each for rank in numbers) else self.num_each
        is_whole = numbers == list(range(0, len(numbers) * each, each))
        if self.is_cut or not numbers or not is_whole:
            return None
'''),
('''    first = math.ceil(low - 1e-9)
    if not math.isfinite(high) or not math.isfinite(middle):
        return RankCount(low=max(first, 1))
    last = math.floor(high + 1e-9)
    if first > last:
        return RankCount()
    value = min(max(round(middle), first), last)
    return RankCount(value, RankSource.RATIO, first, last)
''','''    first = math.ceil(low - 1e-9)
    if not math.isfinite(high) or not math.isfinite(middle):
        return RankCount(low=max(first, 1))
    last = math.floor(high + 1e-9)
    value = min(max(round(middle), first), last)
    return RankCount(value, RankSource.RATIO, first, last) if first <= last else RankCount()
'''),
('''def _half_unit(printed: float) -> float:
    """Return the rounding error of a figure printed six characters wide."""
    return 0.005 if printed < 1000 else 0.05 if printed < 10000 else 0.5


''',''),
('''            a, b = _half_unit(algbw), _half_unit(busbw)
''','''            # The rounding errors of figures that are printed six characters wide.
            a, b = (0.005 if x < 1e3 else 0.05 if x < 1e4 else 0.5 for x in (algbw, busbw))
'''),
('''def _could_be(factor: Factor, interval: _Interval, num_ranks: int | None) -> bool:
    if num_ranks is not None or factor is Factor.ONE:
        return interval.allows(factor.value_for(num_ranks or 1))
    low, high, _ = interval.num_ranks(factor)
    return math.isfinite(low) and high >= max(2, math.ceil(low))


''',''),
('''        low, high, middle = (
            limit / (limit - ratio) if ratio < limit else math.inf
            for ratio in (max(self.low, 0.0), self.high, self.middle)
        )
        return low, high, middle
''','''        low, high, middle = (
            limit / (limit - ratio) if ratio < limit else math.inf
            for ratio in (max(self.low, 0.0), self.high, self.middle)
        )
        return low, high, middle

    def could_be(self, factor: Factor, num_ranks: int | None) -> bool:
        if num_ranks is not None or factor is Factor.ONE:
            return self.allows(factor.value_for(num_ranks or 1))
        low, high, _ = self.num_ranks(factor)
        return math.isfinite(low) and high >= max(2, math.ceil(low))
'''),
('''        if _could_be(known.factor, best, num_ranks)
''','''        if best.could_be(known.factor, num_ranks)
'''),
)
sub("src/ronde/bench/comparison.py",
('''def _median(entry: Sequence[tuple[Side, int | None]]) -> _Figures:
    times = [side.time_us for side, _ in entry if side.time_us is not None]
    ranks = {num_ranks for _, num_ranks in entry}
    busbw = statistics.median(side.busbw_gb_per_s or 0.0 for side, _ in entry)
    time_us = statistics.median(times) if len(times) == len(entry) else None
    return _Figures(busbw, time_us, ranks.pop() if len(ranks) == 1 else None)
''','''def _median(entry: Sequence[tuple[Side, int | None]]) -> _Figures:
    times = [side.time_us for side, _ in entry if side.time_us is not None]
    ranks = {num_ranks for _, num_ranks in entry}
    busbw = statistics.median(side.busbw_gb_per_s or 0.0 for side, _ in entry)
    time_us = statistics.median(times) if len(times) == len(entry) else None
    return _Figures(busbw, time_us, ranks.pop() if len(ranks) == 1 else None)
'''),
('''            halves = zip(PLACES, (row.out_of_place, row.in_place), strict=True)
            for place, side in halves:
                if side is not None and side.busbw_gb_per_s is not None:
                    entry = found.setdefault((key, place), [])
                    entry.append((side, run.ranks.value))
''','''            for place in PLACES:
                side: Side | None = getattr(row, place)
                if side is not None and side.busbw_gb_per_s is not None:
                    entry = found.setdefault((key, place), [])
                    entry.append((side, run.ranks.value))
'''),
('''        left, right = (
            sorted({run.ranks.value or 0 for run in each if run.test == test})
            for each in (a, b)
        )
        if left != right:
            numbers = (", ".join(str(n or "unknown") for n in c) for c in (left, right))
            found.append(
                "{}: {} ranks in the first, {} in the second".format(
                    test or "the test", *numbers
                )
            )
''','''        left, right = (
            ", ".join(
                str(number or "unknown")
                for number in sorted({r.ranks.value or 0 for r in runs if r.test == test})
            )
            for runs in (a, b)
        )
        if left != right:
            ranks = f"{left} ranks in the first, {right} in the second"
            found.append(f"{test or 'the test'}: {ranks}")
'''),
)
