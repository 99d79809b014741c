"""Several LoRAs on one head where Triton serves: a sweep per slot, so the bits are those of each alone."""

from tests.kernels.test_head_runs import (  # noqa: F401
    test_a_bf16_head_does_not_round_its_loras,
    test_a_frozen_slot_costs_no_gradient_beside_a_trained_one,
    test_a_run_has_the_bits_that_it_has_alone,
    test_a_slot_without_rows_has_no_gradient,
    test_one_run_over_all_rows_is_the_call_with_one_lora,
)
