"""How much a training micro-batch gives a GPU's host to do: launches of a layer, and reads of the device."""

import pytest
import torch
from rlhf_kernels.lora.group import OP
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.triton_support import INTERPRETED

if not INTERPRETED:
    pytest.skip("launches are counted in Triton's interpreter", allow_module_level=True)

from tests.devices.launches import counted_device, of_a_layer

BEFORE = (53, 133)
"""Forward and backward of a layer at 2fc7b02f, counted by the same file there."""


@pytest.fixture(scope="module")
def device():
    with counted_device() as device:
        yield device


def test_a_layer_by_default(device):
    found = of_a_layer(device)
    assert (found.forward.total(), found.backward.total(), found.reads) == (30, 83, 0)
    assert found.forward["mm"] == found.backward["mm"] == 7
    assert found.backward["add_"] == 14, "gradients of the second micro-batch are added to those of the first"


def test_a_layer_with_groups(device):
    with registry.use_op_backend(OP, "triton"):
        found = of_a_layer(device)
    forward, backward = found.forward.total(), found.backward.total()
    assert (forward, backward, found.reads) == (24, 51, 0)
    assert forward <= 0.6 * BEFORE[0]
    assert backward <= 0.45 * BEFORE[1]
    assert found.forward["_group_shrink_kernel"] == found.forward["_group_expand_y_kernel"] == 4
    assert found.backward["_group_columns_kernel"] == 8
    assert found.backward["_group_expand_x_kernel"] == 4


def test_a_read_of_the_device_is_counted(device):
    """What the others find to be 0."""
    from tests.devices import stand_in

    with stand_in.counted() as traffic:
        torch.ones(3, device=device).sum().item()
    assert traffic.reads.total() == 1
