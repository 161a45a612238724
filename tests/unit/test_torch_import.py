"""torch is imported without garbage collections, and left out of later ones."""

import gc

import pytest

import ronde.memory


@pytest.mark.parametrize("is_collecting", [True, False])
def test_collecting_goes_on_as_before(monkeypatch, is_collecting):
    during = []

    def fail_to_import(name):
        during.append((name, gc.isenabled()))
        raise ImportError(name)

    monkeypatch.setattr(ronde.memory, "import_module", fail_to_import)
    (gc.enable if is_collecting else gc.disable)()
    try:
        with pytest.raises(ImportError):
            ronde.memory.import_torch()
        assert gc.isenabled() is is_collecting
    finally:
        gc.enable()
    assert during == [("torch", False)]


def test_what_import_has_loaded_is_frozen():
    num_frozen = gc.get_freeze_count()
    kept = [[] for _ in range(1000)]
    ronde.memory.import_torch()
    assert gc.get_freeze_count() >= num_frozen + len(kept)
