"""torch is imported without garbage collections, and left out of later ones."""

import gc
import sys

import pytest

from ronde.memory import import_torch


@pytest.mark.parametrize("is_collecting", [True, False])
def test_collecting_goes_on_as_before(monkeypatch, is_collecting):
    during = []

    class Finder:
        @staticmethod
        def find_spec(name, path, target=None):
            during.append((name, gc.isenabled()))

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder])
    (gc.enable if is_collecting else gc.disable)()
    try:
        with pytest.raises(ImportError):
            import_torch()
        assert gc.isenabled() is is_collecting
    finally:
        gc.enable()
    assert during == [("torch", False)]


def test_what_import_has_loaded_is_frozen():
    num_frozen = gc.get_freeze_count()
    kept = [[] for _ in range(1000)]
    import_torch()
    assert gc.get_freeze_count() >= num_frozen + len(kept)
