"""A model that really calls a tool, made once."""

from pathlib import Path

import pytest

from examples.environments.calculator import make_model


@pytest.fixture(scope="session")
def caller(tmp_path_factory) -> Path:
    """Folder of a tiny model that calls the calculator at about half of the questions; no test writes into it."""
    return make_model(tmp_path_factory.mktemp("caller") / "model", steps=200)
