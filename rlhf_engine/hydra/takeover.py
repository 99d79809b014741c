"""Taking a user's model over without a trace where it is refused: its modules as they were, its config its own.

A backbone exchanges linears, attention and dropout of the model that it is given. A model that turns out not to be
served gets all of that back. The config object that a model was built from is never changed, because other models may
hold it, too.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


@contextlib.contextmanager
def undone_on_error(*models: nn.Module) -> Iterator[None]:
    """Put every module of the models back as it was if the block raises.

    That is its class, attributes, hooks, children, training mode, and which parameters have gradients. Numbers in
    parameters and buffers are not looked after.
    """
    modules = {id(module): (module, type(module), _state(module)) for model in models for module in model.modules()}
    gradients = [(p, p.requires_grad) for model in models for p in model.parameters()]
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            for module, kind, state in modules.values():
                module.__class__ = kind
                module.__dict__.clear()
                module.__dict__.update(state)
            for parameter, required in gradients:
                parameter.requires_grad_(required)


def _state(module: nn.Module) -> dict[str, Any]:
    """A module's attributes; of its tables of children, parameters, buffers and hooks a copy."""
    return {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()}


def base_model(model: PreTrainedModel) -> nn.Module:
    """The part of a model that makes hidden states of tokens.

    A model whose `base_model_prefix` names none of its parts is its own base model for transformers. Then it is the
    innermost model that holds the input embeddings.
    """
    named: nn.Module = model.base_model
    if named is not model:
        return named
    embeddings = model.get_input_embeddings()
    models = [x for x in model.modules() if isinstance(x, PreTrainedModel)]  # parents come before their children
    return [x for x in models if any(part is embeddings for part in x.modules())][-1]


def give_own_configs(model: nn.Module) -> None:
    """Exchange the config objects of a model's modules for copies; modules that shared one share its copy."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))
