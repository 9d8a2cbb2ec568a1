"""Names of drafters: built-in, registered, offered by packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from pyspec.config import SpeculationParams
from pyspec.drafters import Drafter, Plan, registry
from pyspec.drafters.registry import BUILTIN, get, names, register
from pyspec.errors import ConfigError
from pyspec.types import DraftRequest


class Nothing(Drafter):
    name = "nothing"

    @classmethod
    def plan(cls, target: Any, draft: Any, params: SpeculationParams, n_seq: int) -> Plan:
        return Plan()

    def draft(self, requests: list[DraftRequest]) -> None:
        pass


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No packages' drafters, nothing registered."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_plugins", {})


def offer(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    found = [EntryPoint(name, value, registry.GROUP) for name, value in points]
    monkeypatch.setattr(registry, "_plugins", None)
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == "pyspec.drafters" else [])


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_names_lead_to_classes_of_that_name(name: str) -> None:
    cls = get(name)
    assert issubclass(cls, Drafter)
    assert cls.name == name


def test_names_start_with_what_needs_no_model() -> None:
    assert names()[:2] == ["grammar", "prediction"]
    assert names()[2].startswith("ngram")
    assert set(names()) >= {"draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark"}


def test_register_and_get() -> None:
    assert register(Nothing) is Nothing
    assert register(Nothing) is Nothing
    assert get("nothing") is Nothing
    assert names()[-1] == "nothing"


def test_duplicates_are_refused() -> None:
    register(Nothing)
    other = type("Other", (Nothing,), {})
    with pytest.raises(ConfigError, match=r"'nothing' is taken by .*Nothing"):
        register(other)
    with pytest.raises(ConfigError, match=r"'draft-simple' is taken by the built-in"):
        register(type("Mine", (Nothing,), {"name": "draft-simple"}))


@pytest.mark.parametrize("bad", [object, int, "draft-simple", Nothing.draft])
def test_only_drafters_can_be_registered(bad: Any) -> None:
    with pytest.raises(ConfigError, match="subclass"):
        register(bad)


def test_a_name_is_needed() -> None:
    with pytest.raises(ConfigError, match="'name'"):
        register(type("NoName", (Nothing,), {"name": ""}))


def test_unknown_name_lists_all_and_a_close_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown speculation type 'draft-eagle'.*did you mean 'draft-eagle3'") as e:
        get("draft-eagle")
    for name in BUILTIN:
        assert name in str(e.value)
    with pytest.raises(ConfigError) as e:
        get("zzz")
    assert "did you mean" not in str(e.value)


def test_packages_offer_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, ("mine", f"{__name__}:Nothing"))
    assert "mine" in names()
    assert get("mine").__name__ == "Nothing"
    with pytest.raises(ConfigError, match="'mine' is taken by"):
        register(type("Mine", (Nothing,), {"name": "mine"}))


def test_packages_cannot_take_a_builtin_name(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    offer(monkeypatch, ("draft-simple", f"{__name__}:Nothing"))
    assert get("draft-simple").__name__ == "DraftSimple"
    assert names().count("draft-simple") == 1
    assert "left out" in caplog.text


def test_one_name_from_two_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, ("mine", "a.b:C"), ("mine", "d.e:F"), ("other", f"{__name__}:Nothing"))
    with pytest.raises(ConfigError, match=r"several: a\.b:C, d\.e:F"):
        get("mine")
    assert get("other").__name__ == "Nothing"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module_x:Y", "cannot be loaded: ModuleNotFoundError"),
        (f"{__name__}:NoSuchName", "cannot be loaded: AttributeError"),
        (f"{__name__}:offer", "not a subclass"),
    ],
)
def test_broken_packages_break_only_their_name(monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    offer(monkeypatch, ("broken", value))
    with pytest.raises(ConfigError, match=message):
        get("broken")
    assert "broken" in names()
    get("ngram-simple")
