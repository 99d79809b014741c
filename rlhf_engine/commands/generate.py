"""`rlhf-engine generate`: answers of a model, with or without an adapter."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_engine.commands.common import as_request_errors, check_kernels, prepare, print_what_was_left_out
from rlhf_engine.config import GenerateConfig, parse_config


def run(argv: Sequence[str]) -> int:
    config = parse_config(GenerateConfig, argv, prog="rlhf-engine generate")
    prepare(config.kernels)
    from rlhf_kernels.runtime import registry, tuning

    from rlhf_engine.commands.terminal import show_answers
    from rlhf_engine.devices import DTYPES, resolve_device
    from rlhf_engine.rollout import exactness
    from rlhf_engine.rollout.answer import AnswerSession

    with as_request_errors():
        device_type = resolve_device(config.device).type
        check_kernels(config.kernels, device_type, DTYPES[config.dtype])
        registry.begin_run(exact=exactness.by_default(device_type) if config.exact is None else config.exact)
        tuning.begin_run()
        session = AnswerSession(config)
    print_what_was_left_out([session.report])
    return show_answers(session)
