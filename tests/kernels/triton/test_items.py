"""How many items the interpreter's lane has; `tests.test_measures` holds the other measures."""

from pathlib import Path

import pytest

from tests.conftest import PER_PUSH
from tests.test_measures import CEILINGS


def test_items_of_this_lane_are_below_their_ceiling(request):
    if request.config.args != [str(Path(__file__).parent.relative_to(request.config.rootpath))]:
        pytest.skip("counts the items of the whole folder, and this is a part")
    assert request.config.stash[PER_PUSH] <= CEILINGS["tests: items in the interpreter"]
