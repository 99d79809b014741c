"""`rlhf-engine generate`: answers of a model, with or without an adapter."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_engine.commands.common import as_request_errors, begin_drawing, prepare, print_what_was_left_out
from rlhf_engine.config import GenerateConfig, parse_config


def run(argv: Sequence[str]) -> int:
    config = parse_config(GenerateConfig, argv, prog="rlhf-engine generate")
    prepare(config.kernels)
    from rlhf_engine.commands.terminal import show_answers
    from rlhf_engine.rollout.answer import AnswerSession

    with as_request_errors():
        begin_drawing(config)
        session = AnswerSession(config)
    print_what_was_left_out([session.report])
    return show_answers(session)
