"""The model of the trainers behind TRL."""

import pytest

from tests.training.test_data import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))
