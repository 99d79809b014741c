"""A model that really calls a tool, made once."""

from pathlib import Path

import pytest

from examples.environments.calculator import Calculator, demonstration
from examples.environments.tiny import make_model

EXAMPLES = Path(__file__).parents[2] / "examples" / "environments"


@pytest.fixture(scope="session")
def caller(tmp_path_factory) -> Path:
    """Folder of a tiny model that calls the calculator at about half of the questions; no test writes into it."""
    folder = tmp_path_factory.mktemp("caller") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return make_model(folder, demonstration, [Calculator.multiply], steps=200)
