from engine.model.families.registry import MODELS
from runtime.checkpoint.families import FAMILIES


def test_each_family_has_a_class() -> None:
    assert MODELS.keys() == FAMILIES.keys()
