"""lm-evaluation-harness on a HydraModel: any role, so the base and every adapter, without merging or copies.

    import lm_eval
    from rlhf_engine.integrations.lm_eval import HydraLM

    lm = HydraLM.from_pretrained("Qwen/Qwen3-0.6B", adapter="runs/ppo/final")
    results = lm_eval.simple_evaluate(model=lm, tasks=["arc_easy"])

Texts are tokenized and cut as by the harness's own class for transformers models, so that scores are comparable.
Log-likelihoods come from hidden states without logits; answers from the rollout engine, all rows in one batch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from rlhf_engine.hydra import OFF, HydraModel, Logprobs, PackedBatch, RoleSpec, peft_io
from rlhf_engine.hydra.loading import context_length
from rlhf_engine.hydra.roles import require_role
from rlhf_engine.rollout.engine import EngineOptions, RolloutEngine
from rlhf_engine.rollout.request import Request, SamplingConfig
from rlhf_engine.rollout.stopping import StopTexts
from rlhf_engine.tokenizing import eos_token_ids, load_tokenizer

_ANSWER_TOKENS = 256
"""Tokens of an answer where a task does not say, as in the harness's own class."""
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p")
_Encoded = tuple[tuple[str, str], list[int], list[int]]


class HydraLM(TemplateLM):
    """A role of a HydraModel as a model of the harness."""

    def __init__(
        self,
        model: HydraModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        role: str = "actor",
        options: EngineOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Wrap a role.

        Args:
            model: a model with the role.
            tokenizer: its tokenizer.
            role: role with an LM head.
            options: how answers are drawn; None: the defaults.
            seed: seed of answers of tasks that sample.

        Raises:
            ValueError: a role that does not exist.
        """
        super().__init__()
        require_role(model.roles, role)
        self.model, self.tokenizer, self.role = model, tokenizer, role
        self._options, self._seed = options, seed
        backbone = model.role_backbone(role).model
        self.max_length = context_length(backbone.config)
        """Most tokens of a text."""
        self._ends = eos_token_ids(tokenizer, backbone)

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str | os.PathLike[str],
        *,
        adapter: str | os.PathLike[str] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> HydraLM:
        """Load a base, with or without an adapter.

        Args:
            model_name_or_path: folder of the base, or its name on the Hub.
            adapter: PEFT folder of an adapter; None: the base alone.
            dtype: dtype of the base.
            device: device of all.
            **options: as of the constructor, without `model`, `tokenizer` and `role`.

        Returns:
            The model of the harness.

        Raises:
            ValueError: a folder that cannot be loaded.
        """
        slots = {} if adapter is None else {"actor": peft_io.read_slot_config(adapter)}
        roles = {"actor": RoleSpec(slot=OFF if adapter is None else "actor")}
        model = HydraModel.from_pretrained(model_name_or_path, roles=roles, slots=slots, dtype=dtype, device=device)
        return cls(model, load_tokenizer(os.fspath(model_name_or_path)), **options)

    # ---- what the harness reads -------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return int(self.tokenizer.eos_token_id)  # type: ignore[arg-type]

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context: the beginning-of-sequence token where there is one."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)  # type: ignore[arg-type]

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for the harness's cache."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Text of messages.

        Args:
            chat_history: messages {role, content}.
            add_generation_prompt: whether the assistant's turn is begun.

        Returns:
            The chat template's text.
        """
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text.

        Args:
            string: the text.
            add_special_tokens: whether a beginning is added; None: as the tokenizer does, except where the text has it.
            **kwargs: nothing that is read.

        Returns:
            Token ids.
        """
        if add_special_tokens is None and string.startswith(str(self.tokenizer.decode([self.prefix_token_id]))):
            add_special_tokens = False
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **given))  # type: ignore[arg-type]

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests: list[_Encoded], **kwargs: Any) -> list[tuple[float, bool]]:
        scored = self._score([self._cut(context, continuation) for _, context, continuation in requests])
        for (texts, _, _), result in zip(requests, scored, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, result)
        return scored

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of the longest context.

        Args:
            requests: texts.
            disable_tqdm: not read; there is no progress bar.

        Returns:
            One number for each, in nats.
        """
        windows, counts = [], []
        for (text,) in (request.args for request in requests):
            found = [
                make_disjoint_window(pair)
                for pair in get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length - 1,  # the last token goes through the model as well
                    context_len=1,
                )
            ]
            windows += found
            counts.append(len(found))
        left = iter(self._score(windows))
        totals = [sum(next(left)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, greedy unless a task samples.

        Args:
            requests: (context, options) pairs with until, max_gen_toks, do_sample, temperature, top_k, top_p, min_p.
            disable_tqdm: not read; there is no progress bar.

        Returns:
            Texts, without their stop texts.

        Raises:
            ValueError: an option that is not served.
        """
        by_options: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            by_options.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        texts = [""] * len(requests)
        for places in by_options.values():
            options = requests[places[0]].args[1]
            contexts = [requests[i].args[0] for i in places]
            for i, text in zip(places, self._answers(contexts, options, places), strict=True):
                texts[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return texts

    def _answers(self, contexts: Sequence[str], options: Mapping[str, Any], places: Sequence[int]) -> list[str]:
        given = dict(options)
        until = given.pop("until", None) or []
        stop = [until] if isinstance(until, str) else list(until)
        most = int(given.pop("max_gen_toks", None) or _ANSWER_TOKENS)
        sampled = {name: given.pop(name, None) for name in _SAMPLING}
        if given:
            raise ValueError(f"generation_kwargs: expected until, max_gen_toks and {', '.join(_SAMPLING)}, got {given}")
        if most >= self.max_length:
            raise ValueError(
                f"max_gen_toks: expected fewer than the model's context of {self.max_length} tokens, got {most}"
            )
        draws = bool(sampled["do_sample"]) and sampled["temperature"] != 0
        filters = {name: sampled[name] for name in ("top_k", "top_p", "min_p") if draws and sampled[name]}
        end = str(self.tokenizer.decode([self.eot_token_id]))

        def decode(tokens: Any) -> str:
            return str(self.tokenizer.decode(tokens))

        sampling = SamplingConfig(
            max_completion_length=most,
            eos_token_ids=self._ends,
            temperature=float(sampled["temperature"] or 1.0) if draws else 1.0,
            stop=tuple(text for text in stop if text and text != end),
            seed=self._seed,
            **filters,
        )
        longest = self.max_length - most
        requests = [
            Request(prompt=tuple(self.tok_encode(context)[-longest:]), sample_id=i, role=self.role, greedy=not draws)
            for context, i in zip(contexts, places, strict=True)
        ]
        engine = RolloutEngine(self.model, sampling, requests, options=self._options, decode=decode)
        stops = StopTexts(sampling.stop, decode)
        texts = [""] * len(requests)
        for answer in engine.run():
            texts[answer.index] = stops.cut(str(self.tokenizer.decode(list(answer.tokens), skip_special_tokens=True)))
        return texts

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The last tokens that the context length allows; at least one of them comes before the continuation."""
        whole = (context + continuation)[-self.max_length :]
        kept = max(1, len(whole) - len(continuation))
        return whole[:kept], whole[kept:]

    @torch.no_grad()
    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(log-likelihood, whether every token is the likeliest) of continuations."""
        if not pairs:
            return []
        batch = PackedBatch.from_lists([p for p, _ in pairs], [c for _, c in pairs], device=self.model.device)
        output = Logprobs(role=self.role, outputs=("logprob", "is_top1"))
        results = []
        for part, (found,) in self.model.in_parts(batch, (output,)):
            lengths = [length - prompt for length, prompt in zip(part.lengths, part.prompt_lens, strict=True)]
            sums = [float(x.sum(dtype=torch.float64)) for x in found.logprob.split(lengths)]
            tops = [bool(x.all()) for x in found.is_top1.split(lengths)]
            results += list(zip(sums, tops, strict=True))
        return results
