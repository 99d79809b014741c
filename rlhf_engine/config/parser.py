"""Flat option dataclasses, checked on construction, and one parser from flags and YAML to them.

A config class derives from `Options`; its fields are made with `option(default, help, ge=…, lt=…)`. Types and
bounds are checked in `__post_init__`: a config made in Python, by flags or from a file obeys the same rules.

Flags follow the conventions of transformers' HfArgumentParser, with errors that name the option:
`--flag value`, `--flag=value`, `--a-flag` for `--a_flag`, `--switch` / `--no_switch` / `--switch false`,
`--list a b c`, `none` for an optional value. `--config file.yaml` supplies values that flags override; it may have a
section for each value of one option, such as each algorithm (`SECTIONS`). `--print_config` shows the resolved YAML,
`--help` the options that are used most and `--help_all` all of them, by class; these three exit with 0.

It does not use argparse to read the flags, because argparse takes `-1e-3` and `- a prompt` for options.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import errno
import inspect
import itertools
import json
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import yaml

from rlhf_engine.errors import ConfigError

C = TypeVar("C", bound="Options")
_REQUIRED = object()
_LARGEST_INT = 2**31 - 1  # largest whole number of an option that has no smaller bound: nothing counts further
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")
_NONE = ("none", "null")
_SPECIAL = ("config", "print_config", "help", "help_all")
_OURS = """
model=model_name_or_path dataset=dataset_name reward_model=reward_model_path bf16=dtype:bfloat16 torch_dtype=dtype
lr=learning_rate epochs=num_train_epochs num_epochs=num_train_epochs num_iterations=num_ppo_epochs kl_coef=beta
batch_size=per_device_train_batch_size steps_per_generation=num_mini_batches warmup_ratio=warmup_steps
target_modules=lora_target_modules max_new_tokens=max_completion_length response_length=max_completion_length
num_return_sequences=num_generations epsilon=cliprange epsilon_high=cliprange eval_strategy=eval_steps
save_strategy=save_steps logging_dir=output_dir fsdp=shard_base deepspeed=shard_base use_vllm=vllm_server_base_url
vllm_mode=vllm_server_base_url vllm_server_host=vllm_server_base_url vllm_server_port=vllm_server_base_url
gpu_memory_utilization=kv_cache_memory vllm_gpu_memory_utilization=kv_cache_memory
"""
"""Names of options elsewhere, and the option here, with a value where it takes that one."""
_WITHOUT = {
    "packing padding_free": "rows are always packed, without padding",
    "use_liger_kernel use_liger_loss": "losses never hold the logits; kernels says whose kernels run",
    "attn_implementation": "attention is the engine's own; `rlhf-engine doctor` shows it",
    "use_peft": "adapters are trained, unless the method is full_ppo or sft is --full",
    "gradient_accumulation_steps": "gradients of a minibatch always add up over its micro-batches",
    "fp16": "dtype is float32 or bfloat16",
    "per_device_eval_batch_size": "16 rows at a time are evaluated, in groups that memory holds",
    "vllm_tensor_parallel_size tensor_parallel_size": "it is an option of the vLLM server",
    "shard_base=always": "a vLLM server draws for a base that is larger than a GPU (vllm_server_base_url)",
    "adam_beta1 adam_beta2": "they are 0.9 and 0.999",
    "dataset_streaming": "rows of the Hub are streamed where dataset_name says how many, as NAME[:N]",
    "load_in_4bit load_in_8bit": "quantization 4bit or 8bit",
    "logging_steps": "every step has a line of metrics",
    "outtype to=gguf": "llama.cpp's convert_hf_to_gguf.py makes it of a merged folder, see docs/guides/export.md",
    "use_rslora": "lora_alpha times √lora_r does the same",
    "ignore_eos": "min_completion_length as large as max_completion_length does it",
    "judge_requests": "eight requests are sent to the judge at once",
    "overwrite_output_dir": "resume_from_checkpoint restart",
    "target_kl": "cliprange and num_ppo_epochs bound an update",
    "vllm_importance_sampling_correction vllm_importance_sampling_mode": "off_policy_correction, of a server too",
    "vllm_importance_sampling_clip_max off_policy_clip_max": "off_policy_correction token_truncate=3, of a server too",
    "critic_warmup critic_warmup_steps": "actor and critic learn from the first step on",
    "async_policy ray_generators": "async overlap,newest, overlap,in_flight or ray=4",
    "vllm_server_timeout": "an answer has 240 seconds, and one for every ten tokens of max_completion_length",
    "whiten_advantages whiten_rewards": "scale_rewards none leaves advantages as they are",
}
"""Names and values of elsewhere, and the reason why they are none here."""


def option(
    default: Any,
    help: str,
    *,
    switches: Sequence[str] = (),
    alias: str | None = None,
    is_text: bool = False,
    form: tuple[str, str] | None = None,
    **bounds: float,
) -> Any:
    """Make a dataclass field with its line of `--help`, its bounds (`ge`, `gt`, `le`, `lt`) and its names as a flag.

    Of a field with a fixed set of values, those in `switches` are also flags of their own (`--full`). `alias` is a
    second name of the flag and of the key in a file. Texts (`is_text`) have any length and name no file. `form` is a
    regular expression of a whole string, and how messages describe it.
    """
    metadata = {"help": help, "bounds": bounds, "switches": tuple(switches), "alias": alias, "is_text": is_text}
    metadata |= {"form": form}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def required(help: str, **more: Any) -> Any:
    """Make an `option` without a default."""
    return option(dataclasses.MISSING, help, **more)


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base of the config classes, whose construction raises ConfigError for a wrong type, bound or combination.

    A class that derives from it is a frozen dataclass without being told so.
    """

    FIRST: ClassVar[tuple[str, ...]] = ()  # options that `--help` shows; none: all
    EXAMPLE: ClassVar[str] = ""  # a command line, in `--help`
    POSITIONAL: ClassVar[tuple[str, ...]] = ()
    """Options whose values may stand first, without their flags; an option with a list takes all that is left."""
    SECTIONS: ClassVar[str] = ""
    """Option whose values may be sections of a file, with options for when it has that value; "": none."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _typed(field.name, hints[field.name], getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            if value == [] and _default(field) != []:
                raise ConfigError(f"{field.name}: expected something that is not empty, got []")
            if not field.metadata["is_text"]:
                _require_names(field.name, value)
            _require_form(field.name, field.metadata["form"], value)
            bounds = dict(field.metadata["bounds"])
            if type(value) is int and not {"le", "lt"} & set(bounds):
                bounds["le"] = _LARGEST_INT
            for bound, limit in bounds.items():
                if value is not None and not getattr(operator, bound)(value, limit):
                    kind, shown = _describe(hints[field.name]), limit if isinstance(limit, int) else f"{limit:g}"
                    raise ConfigError(f"{field.name}: expected {kind} {_BOUNDS[bound]} {shown}, got {value!r}")

    def require(self, name: str, is_fine: bool, expected: str) -> None:
        """Raise ConfigError, naming the option, what was expected and its value, unless that is fine."""
        if not is_fine:
            value = getattr(self, name)
            raise ConfigError(f"{name}: expected {expected}, got {'none' if value is None else repr(value)}")

    def require_unset(self, names: Iterable[str], why: str) -> None:
        """Raise ConfigError for an option whose value is not the default."""
        for name in names:
            self.require(name, getattr(self, name) == _default(_fields(type(self))[name]), f"it unset {why}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name; functions are `module:name`."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def to_yaml(self) -> str:
        """YAML of all options, which `--config` reads back to an equal config."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def parse_config(cls: type[C], argv: Sequence[str], *, prog: str | None = None) -> C:
    """Build a config from command-line tokens. Relative paths start at the working folder.

    `--help`, `--help_all` and `--print_config` print their text and exit.

    Args:
        cls: config class of the command.
        argv: tokens of the command line, without the program's name.
        prog: name of the command in `--help`; None: that of the program.

    Returns:
        The config, with the values of `--config` under those of the flags.

    Raises:
        ConfigError: an unknown or missing option, a value that does not fit, or a file that cannot be read.
        SystemExit: `--help`, `--help_all` or `--print_config`, with code 0.
    """
    flags = _scan(cls, _with_flags(cls, argv))
    if "help" in flags or "help_all" in flags:
        print(_help(cls, prog, everything="help_all" in flags or not cls.FIRST), end="")
        raise SystemExit(0)
    show = flags.pop("print_config", False)
    path = flags.pop("config", None)
    config = _made(cls, flags, path, "--")
    if show:
        print(config.to_yaml(), end="")
        raise SystemExit(0)
    return config


def config_of(cls: type[C], content: Mapping[str, Any], where: str, *, argument: str = "config") -> C:
    """Build a config from values as a file has them. Raises ConfigError as `parse_config` does.

    where: name of their source. argument: one of them that is the path of a file with more.
    """
    values = _yaml_values(cls, {name: value for name, value in content.items() if name != argument}, where)
    return _made(cls, values, content.get(argument), "", argument)


def _made(cls: type[C], values: Mapping[str, Any], path: str | None, prefix: str, argument: str = "config") -> C:
    """A config of these values and, under them, those of a file."""
    values = {**(_read_yaml(cls, Path(path), values, argument) if path is not None else {}), **values}
    missing = [f for f in _fields(cls).values() if _default(f) is _REQUIRED and f.name not in values]
    if missing:
        names = [prefix + f.name + "".join(f" or --{switch}" for switch in f.metadata["switches"]) for f in missing]
        raise ConfigError(f"missing required option{'s' * (len(names) > 1)}: {', '.join(names)}")
    return cls(**values)


# ---- types -------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}" if callable(value) else copy.deepcopy(value)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """`int | None` → (int, NoneType); anything else → a tuple of itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _describe(hint: Any) -> str:
    plain = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "none"}
    parts = []
    for kind in _alternatives(hint):
        if typing.get_origin(kind) is Literal:
            parts.append("one of " + ", ".join(repr(v) for v in typing.get_args(kind)))
        elif typing.get_origin(kind) is dict:
            parts.append("a JSON object")
        elif typing.get_origin(kind) is list:
            parts.append("a list of strings" if typing.get_args(kind)[0] not in (int, float) else "a list of numbers")
        elif typing.get_origin(kind) is Callable:
            parts.append("a function")
        else:
            parts.append(plain[kind])
    return " or ".join(parts)


def _matches(kind: Any, value: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is list:
        kinds = _alternatives(typing.get_args(kind)[0])
        return isinstance(value, (list, tuple)) and all(any(_matches(k, v) for k in kinds) for v in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if typing.get_origin(kind) is Callable:
        return callable(value)
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # also an int that is no float
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _convert(kind: Any, value: Any) -> Any:
    if kind is float:
        return float(value)
    if typing.get_origin(kind) is list:
        return [_convert(typing.get_args(kind)[0], v) for v in value]
    return value


def _typed(name: str, hint: Any, value: Any) -> Any:
    """`value` as the first alternative of `hint` that it is. Ints become floats, and one entry a list of it."""
    for kind in _alternatives(hint):
        if _matches(kind, value):
            return _convert(kind, value)
    for kind in _alternatives(hint):
        if typing.get_origin(kind) is list and _matches(kind, [value]):
            return _convert(kind, [value])
    raise ConfigError(f"{name}: expected {_describe(hint)}, got {value!r}{_meant(name, hint, value)}")


def _reason(name: str) -> str | None:
    """The reason why a name of elsewhere, or `name=value`, is none here."""
    return next((why for names, why in _WITHOUT.items() if name in names.split()), None)


def _meant(name: str, hint: Any, value: Any) -> str:
    """The end of the message: what a value of before became, or the nearest choice."""
    if why := _reason(f"{name}={value}"):
        return f"; {why}"
    choices = [c for kind in _alternatives(hint) if typing.get_origin(kind) is Literal for c in typing.get_args(kind)]
    if not isinstance(value, str) or not choices:
        return ""
    close = [c for c in choices if value and value in c] or difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _require_names(name: str, value: Any) -> None:
    """Refuse strings that no file could be called, before anything looks for one of that name, and empty ones."""
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str):
            continue
        if not text:
            raise ConfigError(f"{name}: expected something that is not empty, got {value!r}")
        try:
            os.stat(text)
        except ValueError as error:  # a null byte
            raise ConfigError(f"{name}: expected what a file could be called, got {text!r}: {error}") from error
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
                shown = text if len(text) <= 60 else f"{text[:59]}…"
                raise ConfigError(f"{name}: expected a path, got {shown!r}: {error.strerror}") from error


def _require_form(name: str, form: tuple[str, str] | None, value: Any) -> None:
    """Raise ConfigError for a string of another form."""
    if form is not None and isinstance(value, str) and re.fullmatch(form[0], value) is None:
        raise ConfigError(f"{name}: expected {form[1]}, got {value!r}")


# ---- flags -------------------------------------------------------------------------------------------------


def _fields(cls: type[Options]) -> dict[str, dataclasses.Field]:
    return {f.name: f for f in dataclasses.fields(cls)}


def _aliases(cls: type[Options]) -> dict[str, str]:
    """Second name → field name."""
    return {f.metadata["alias"]: f.name for f in dataclasses.fields(cls) if f.metadata["alias"]}


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return _REQUIRED if field.default is dataclasses.MISSING else field.default


def _unknown(what: str, name: str, cls: type[Options], prefix: str) -> ConfigError:
    switches = [s for f in dataclasses.fields(cls) for s in f.metadata["switches"]]
    known = [*_fields(cls), *_aliases(cls), *switches, *_SPECIAL, *(() if prefix else _sections(cls))]
    ours, _, value = dict(pair.split("=") for pair in _OURS.split()).get(name, "").partition(":")
    close = [ours] if ours in known else difflib.get_close_matches(name, known, n=1)
    why = _reason(name.removeprefix("no_"))
    if close and (ours or why is None):
        why = f"did you mean {prefix}{close[0]}{value and (' ' if prefix else ': ') + value}?"
    return ConfigError(f"unknown {what} {prefix}{name}" + (f"; {why}" if why else ""))


def _with_flags(cls: type[Options], argv: Sequence[str]) -> list[str]:
    """The tokens, with a flag before each value that stands first without one."""
    hints = typing.get_type_hints(cls)
    words = list(itertools.takewhile(lambda token: not token.startswith("-"), argv)) if cls.POSITIONAL else []
    rest, flagged = list(argv[len(words) :]), list[str]()
    for name in cls.POSITIONAL:
        n = len(words) if typing.get_origin(hints[name]) is list else 1
        if words:
            flagged += [f"--{name}", *words[:n]]
        words = words[n:]
    return [*words, *flagged, *rest]


def _scan(cls: type[Options], argv: Sequence[str]) -> dict[str, Any]:
    """Tokens → values by field name, plus `config`, `print_config`, `help` where given."""
    fields, hints, aliases = _fields(cls), typing.get_type_hints(cls), _aliases(cls)
    switches = {s: (f.name, s) for f in fields.values() for s in f.metadata["switches"]}
    switches |= {f"no_{n}": (n, False) for n in fields if bool in _alternatives(hints[n])}
    switches |= {name: (name, True) for name in ("help", "help_all", "print_config")}
    values: dict[str, Any] = {}
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        token = "--help" if token == "-h" else token
        if not token.startswith("--"):
            raise ConfigError(f"unexpected argument {token!r}: expected an option that starts with --")
        name, equals, attached = token[2:].partition("=")
        name = name.replace("-", "_")
        name = aliases.get(name, name)
        raw = [attached] if equals else []
        while not equals and tokens and not tokens[0].startswith("--") and tokens[0] != "-h":
            raw.append(tokens.pop(0))
        if name in switches:
            if raw:
                raise ConfigError(f"{name}: expected no value, got {' '.join(raw)!r}")
            key, value = switches[name]
        elif name == "config":
            key, value = name, _only(name, "the path of a YAML file", raw)
        elif name in fields:
            key, value = name, _from_strings(name, hints[name], raw)
        else:
            raise _unknown("option", name, cls, "--")
        if key in values and values[key] != value:
            raise ConfigError(f"{key}: given twice, as {values[key]!r} and as {value!r}")
        values[key] = value
    return values


def _only(name: str, expected: str, raw: list[str]) -> str:
    if len(raw) != 1:
        raise ConfigError(f"{name}: expected {expected}, got {' '.join(raw)!r}" if raw else f"{name}: needs a value")
    return raw[0]


def _from_strings(name: str, hint: Any, raw: list[str]) -> Any:
    """The strings that followed `--name` as a value of `hint`; what no alternative can read is an error."""
    kinds = _alternatives(hint)
    if len(raw) == 1 and (empty := _emptied(hint, raw[0])) != raw[0]:
        return empty
    if bool in kinds and not raw:
        return True
    as_list = next((k for k in kinds if typing.get_origin(k) is list), None)
    if as_list is not None and raw:
        # `str | list[str]`: one word without commas stays a word (`all-linear`)
        words = [w for r in raw for w in r.split(",")] if str in kinds else raw
        if len(words) == 1 and str in kinds:
            return words[0]
        return [_from_string(name, hint, typing.get_args(as_list)[0], word) for word in words]
    text = _only(name, _describe(hint), raw)
    return _from_string(name, hint, kinds[0], text)


def _emptied(hint: Any, value: Any) -> Any:
    """None, or an empty list, where `none` stands for it; else the value as it is."""
    is_none = isinstance(value, str) and value.lower() in _NONE
    if is_none and any(typing.get_origin(k) is Literal and value in typing.get_args(k) for k in _alternatives(hint)):
        return value  # a choice of that name
    kinds = [typing.get_origin(kind) or kind for kind in _alternatives(hint)] if is_none else []
    return None if type(None) in kinds else [] if list in kinds else value


def _from_string(name: str, hint: Any, kind: Any, text: str) -> Any:
    if kind is bool:
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
    elif kind in (int, float) or typing.get_origin(kind) is dict:
        try:
            if typing.get_origin(kind) is dict:
                if _matches(kind, value := json.loads(text)):
                    return value
            elif "_" not in text:  # Python takes 1_0 for 10
                return kind(text)
        except (ValueError, RecursionError):
            pass  # reported below, with the option's name
    else:
        return text
    raise ConfigError(f"{name}: expected {_describe(hint)}, got {text!r}{_meant(name, hint, text)}")


# ---- files and help ----------------------------------------------------------------------------------------


class _YamlLoader(yaml.SafeLoader):
    """YAML's safe loader, which takes no key twice: of two values the last would win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and first.setdefault(key.value, key) is not key:
                lines = f"{first[key.value].start_mark.line + 1} and {key.start_mark.line + 1}"
                text = f"expected each key once, got {key.value!r} in lines {lines}"
                raise yaml.constructor.ConstructorError(problem=text)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _read_yaml(cls: type[Options], path: Path, flags: Mapping[str, Any], argument: str) -> dict[str, Any]:
    """Values of a file by field name, those of the section that is chosen over those of the file's top."""
    _require_names(argument, str(path))
    if not path.is_file():
        raise ConfigError(f"{argument}: expected the path of a YAML file, but there is no file {str(path)!r}")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _YamlLoader)  # a SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{argument}: {path} is not valid YAML: {' '.join(str(error).split())}") from error
    except OSError as error:
        message = f"{argument}: expected a file that can be read, got {str(path)!r}: {error.strerror}"
        raise ConfigError(message) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{argument}: {path}: expected `name: value` lines, got a {type(content).__name__}")
    names = _sections(cls)
    values = _yaml_values(cls, {k: v for k, v in content.items() if k not in names}, str(path))
    sections = {}
    for name in (key for key in content if key in names):
        if not isinstance(content[name], dict):
            section = content[name]
            raise ConfigError(f"config: {path}: expected `name: value` lines in section {name!r}, got {section!r}")
        sections[name] = _yaml_values(cls, content[name], f"section {name!r} of {path}")
        if cls.SECTIONS in sections[name]:
            raise ConfigError(f"config: {path}: expected {cls.SECTIONS} outside of section {name!r}, got it in there")
    if sections:
        default = _default(_fields(cls)[cls.SECTIONS])
        chosen = flags.get(cls.SECTIONS, values.get(cls.SECTIONS, default))
        values |= sections.pop(chosen, {})
        if sections and os.environ.get("RANK", "0") == "0":
            left = "; ".join(f"{name} ({', '.join(left_out) or 'empty'})" for name, left_out in sections.items())
            print(f"note: {cls.SECTIONS} {chosen!r} leaves out of {path} the sections {left}", file=sys.stderr)
    return values


def _sections(cls: type[Options]) -> tuple[str, ...]:
    if not cls.SECTIONS:
        return ()
    return typing.get_args(typing.get_type_hints(cls)[cls.SECTIONS])


def _yaml_values(cls: type[Options], content: Mapping[Any, Any], where: str) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        name = _aliases(cls).get(name, name)
        if name not in _fields(cls):
            raise _unknown(f"key in {where}:", name, cls, "")
        if name in values:
            raise ConfigError(f"{name}: given twice in {where}, as {values[name]!r} and as {value!r}")
        # YAML 1.1 reads `1e-4` (no dot) and `none` as strings, which nobody means by them
        value = _emptied(hints[name], value)
        kinds = _alternatives(hints[name])
        if str not in kinds and (float in kinds or list[float] in kinds):
            texts = value if isinstance(value, list) else [value]
            numbers = [_from_string(name, hints[name], float, x) if isinstance(x, str) else x for x in texts]
            value = numbers if isinstance(value, list) else numbers[0]
        values[name] = value
    return values


def _help(cls: type[Options], prog: str | None, *, everything: bool) -> str:
    """`--help` and `--help_all`, laid out by argparse. Of the latter each section is the class that has its options."""
    name = prog or os.path.basename(sys.argv[0])
    parser = argparse.ArgumentParser(
        usage=f"{name} [--flag value …]",
        description=(cls.__doc__ or "").split("\n")[0],
        epilog=f"example: {cls.EXAMPLE}" if cls.EXAMPLE else None,
        add_help=False,
    )
    fields, hints, shown = _fields(cls), typing.get_type_hints(cls), set[str]()
    sections: list[tuple[str, Sequence[str]]] = [] if everything else [("options that are used most", cls.FIRST)]
    for section in cls.__mro__ if everything else ():
        title = "of this command" if section is cls else (section.__doc__ or "").split("\n")[0].rstrip(".")
        sections.append((title, [n for n in fields if n in inspect.get_annotations(section)]))
    for title, names in sections:
        group = parser.add_argument_group(title)  # one without options is not shown
        for each in [n for n in names if n not in shown]:
            _add_to_help(group, fields[each], hints[each])
        shown |= set(names)
    group = parser.add_argument_group("of every command")
    group.add_argument("--config", metavar="FILE", help="YAML file with any of these options; flags override it")
    group.add_argument("--print_config", action="store_true", help="print the resolved options as YAML and stop")
    more = len(fields) - len(shown)
    if more:
        group.add_argument("--help_all", action="store_true", help=f"the other {more} options as well, by section")
    return parser.format_help()


def _add_to_help(group: argparse._ArgumentGroup, field: dataclasses.Field, hint: Any) -> None:
    default = _default(field)
    text = f"{field.metadata['help']} ({'required' if default is _REQUIRED else f'default: {default}'})"
    kinds = _alternatives(hint)
    if typing.get_origin(kinds[0]) is Literal:
        shown = "{" + ",".join(str(v) for v in typing.get_args(kinds[0])) + "}"
    elif any(typing.get_origin(k) is list for k in kinds):
        shown = "VALUE ..."
    else:
        shown = {bool: "[BOOL]", int: "INT", float: "FLOAT", dict: "JSON"}.get(
            typing.get_origin(kinds[0]) or kinds[0], "TEXT"
        )
    alias = field.metadata["alias"]
    names = [f"--{n}" for n in ((alias,) if alias else ()) + (field.name, *field.metadata["switches"])]
    group.add_argument(*names, dest=field.name, metavar=shown, help=text.replace("%", "%%"))


_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_size(name: str, text: str) -> int:
    """Number of bytes of a size such as `80GB` or `24 GiB`, of option `name`; ConfigError for any other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{name}: expected a size such as 80GB or 24GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].lower()])
