"""Several models on the same prompts: answers drawn, scored and judged, then one table of all.

Adapters of one base are slots of one backbone and draw in one batch; adapter off is the base. A whole model is loaded
by itself, one after the other. Answers draw from the same random numbers, whichever model draws them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_engine import data
from rlhf_engine.config import EvaluateConfig
from rlhf_engine.config.commands import BASE, REWARD
from rlhf_engine.data.read import with_options
from rlhf_engine.data.tokenize import eos_token_ids, load_tokenizer, text_of
from rlhf_engine.data.types import Kind, Text, recast
from rlhf_engine.devices import DTYPES, resolve_device
from rlhf_engine.errors import ConfigError, EngineError, NonFiniteError, as_request_errors
from rlhf_engine.hydra import OFF, HydraModel, PackedBatch, RoleSpec
from rlhf_engine.hydra.loading import read_context_length, read_vocabulary
from rlhf_engine.hydra.outputs import LogprobPair, Logprobs, Output
from rlhf_engine.rollout import exactness
from rlhf_engine.rollout.answer import build_answer_model, load_own_tokenizer, tokenize_own_prompts
from rlhf_engine.rollout.engine import RolloutEngine
from rlhf_engine.rollout.request import EngineOptions, Request, SamplingConfig, StopTexts
from rlhf_engine.scoring.rewards import AnswerScorer
from rlhf_engine.tools import candidates as kept
from rlhf_engine.tools.candidates import Candidate, CandidateAnswer, find_candidates
from rlhf_engine.tools.judges import Pair, by_reward, make_judge

T = TypeVar("T")
Progress = Callable[[str, int, int], None]  # called with (what is done, how many are, of how many)
_PAIRS: tuple[Kind, ...] = ("preference", "implicit_preference", "unpaired_preference")
KINDS: tuple[Kind, ...] = ("prompt_completion", *_PAIRS, "prompt_only")


@dataclass(kw_only=True)
class Outcome:
    """Answers of one candidate and their numbers. Lists are by prompt and draw unless said otherwise."""

    candidate: Candidate
    answers: list[list[CandidateAnswer]] = field(default_factory=list)
    rewards: list[list[float | None]] | None = None  # weighted; None for an answer that a source left out
    sources: dict[str, list[list[float | None]]] = field(default_factory=dict)  # rewards by source
    kl: list[list[float]] | None = None  # exact KL from the base in nats, summed over an answer's tokens
    surprise: list[float] | None = None  # −log p of each reference, in nats, summed over its tokens
    reference_tokens: list[int] = field(default_factory=list)  # of each reference
    preferences: list[list[float | None]] | None = None
    """1 where the answer was preferred to that of `against`, 0 where the other was; None without a verdict.

    Lists are by prompt and pair. Pair k has the k-th answer of both; the fewer answers are taken again from the first.
    """
    missing: dict[str, str] = field(default_factory=dict)  # metric → why it is not there

    def by_prompt(self, values: Sequence[T]) -> list[list[T]]:
        """One value for each answer, grouped as the answers are."""
        left = iter(values)
        return [[next(left) for _ in row] for row in self.answers]


class Evaluation:
    """One evaluation. Construction finds all that can be wrong with the request before anything is drawn."""

    def __init__(self, config: EvaluateConfig) -> None:
        """Read the prompts, find the candidates, and open the files."""
        self.config = config
        self.candidates = find_candidates(config)
        self.report = data.Tally(source=config.dataset_name, argument="dataset_name", max_bad_rows=config.max_bad_rows)
        rows = data.load_rows(config.dataset_name, self.report, config, kinds=KINDS, limit=config.max_prompts)
        self.tokenizer = load_own_tokenizer(config)
        self._vocabulary = read_vocabulary(config.model_name_or_path)
        self._context = read_context_length(config.model_name_or_path, config.whole_reward_model)
        as_prompts = [recast(row, data.PromptOnly) for row in rows]
        self.prompts = tokenize_own_prompts(config, as_prompts, self.tokenizer, self.report)
        self.n_prompts = len(self.prompts.ids)
        by_place = {row.place: row for row in rows}
        self._rows = [by_place[row.place] for row in self.prompts.rows]
        answers = map(_reference, self._rows)
        self.references = [None if answer is None else text_of(answer) for answer in answers]  # None: a row without one
        self.scorer = AnswerScorer(config.sources, config.reward_weights) if config.sources else None
        if self.scorer is not None:
            n = range(min(2, len(self.prompts.ids)))
            self.scorer.dry_run(self.prompts.written(list(n)), self.prompts.columns(list(n)))
        self.judge = make_judge(config) if config.judged_by not in (None, REWARD) else None
        self._written = {c.name: self._written_answers(c) for c in self.candidates if not c.is_drawn}
        self.output = Path(config.output_dir)
        self.output.mkdir(parents=True, exist_ok=True)
        digests = kept.answer_digests(config, self.candidates, self.prompts.ids, self._written)
        self._answers = kept.Kept(self.output / kept.ANSWERS_FILE, digests, resume=config.resume)
        digests = kept.verdict_digests(config, digests)
        self._verdicts = kept.Kept(self.output / kept.VERDICTS_FILE, digests, resume=config.resume)

    def run(self, progress: Progress = lambda stage, done, total: None) -> dict[str, Outcome]:
        """Draw what is missing, score and judge; name → what is known, in the order of the candidates."""
        measured = {c.name: Outcome(candidate=c) for c in self.candidates}
        for candidate in self.candidates:
            if candidate.kind == "model":
                self._run_other(measured[candidate.name], progress)
        self._run_on_base(measured, progress)
        self._judge_all(measured, progress)
        return measured

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def _run_on_base(self, measured: Mapping[str, Outcome], progress: Progress) -> None:
        """The base, its adapters, answers that are written already, and every reward."""
        config = self.config
        on_base = [c for c in self.candidates if c.kind in ("base", "adapter")]
        adapters: dict[str, str | None] = {c.role: c.place or None for c in on_base}
        wants_reward = self.scorer is not None and self.scorer.uses_reward_model
        if on_base or wants_reward:
            with as_request_errors():
                model = build_answer_model(
                    config, {**adapters, "reference": None}, reward_for="reward_funcs" if wants_reward else None
                )
                exactness.settle(config.exact, model.role_backbone("reference"))
        if on_base:
            self._draw(model, on_base, self.tokenizer, self.prompts.ids, progress)
        for candidate in self.candidates:
            of = measured[candidate.name]
            of.answers = of.answers or self._answers_of(candidate)
            if candidate in on_base:
                self._measure_kl(model, of)
                self._measure_surprise(model, of, self.tokenizer)
            elif not candidate.is_drawn:
                of.missing |= dict.fromkeys(("kl", "perplexity"), "no model is here")
        if self.scorer is not None:
            for i, of in enumerate(measured.values()):
                self._reward(of, model if wants_reward else None)
                progress("scoring", i + 1, len(measured))

    def _run_other(self, of: Outcome, progress: Progress) -> None:
        """A whole model: its answers, its perplexity, and its KL where it has the base's tokens."""
        config, candidate = self.config, of.candidate
        tokenizer = load_tokenizer(candidate.place)
        same = tokenizer.get_vocab() == self.tokenizer.get_vocab()
        roles = {candidate.role: RoleSpec(slot=OFF)}
        with as_request_errors():
            model = HydraModel.from_pretrained(
                candidate.place,
                roles={**roles, "reference": RoleSpec(backbone="reference", slot=OFF)} if same else roles,
                backbones={"reference": config.model_name_or_path} if same else {},
                dtype=DTYPES[config.dtype],
                device=resolve_device(config.device),
            )
            exactness.settle(config.exact, model.role_backbone(candidate.role))
        ids = self.prompts.ids
        if not same:
            tally = data.Tally(source=config.dataset_name, argument="dataset_name", max_bad_rows=0)
            ids = data.tokenize_prompts(
                self.prompts.rows,
                tokenizer,
                tally,
                context_length=read_context_length(candidate.place),
                max_completion_length=config.max_completion_length,
            ).ids
        self._draw(model, [candidate], tokenizer, ids, progress)
        of.answers = self._answers_of(candidate)
        self._measure_surprise(model, of, tokenizer)
        if same:
            self._measure_kl(model, of)
        else:
            of.missing["kl"] = f"its tokens are not those of {BASE}"

    def _draw(
        self,
        model: HydraModel,
        candidates: Sequence[Candidate],
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Sequence[int]],
        progress: Progress,
    ) -> None:
        """Answers that are missing, of candidates on one backbone; each is kept as it finishes."""
        each = self.config.num_generations
        wanted = itertools.product(range(self.n_prompts), candidates, range(each))
        missing = [(c, i, draw) for i, c, draw in wanted if (c.name, i, draw, 0) not in self._answers.rows]
        total = len(candidates) * self.n_prompts * each
        if not missing:
            return
        requests = [
            Request(prompt=tuple(prompts[i]), sample_id=i * each + draw, role=c.role, greedy=self.config.greedy)
            for c, i, draw in missing
        ]
        ends = eos_token_ids(tokenizer, model.role_backbone(candidates[0].role).model)
        sampling = SamplingConfig.of(self.config, ends)

        def decode(tokens: Any) -> str:
            return str(tokenizer.decode(tokens))

        stops = StopTexts(sampling.stop, decode)
        backbone = model.roles[candidates[0].role].backbone
        engine = RolloutEngine.of(model, backbone, EngineOptions.of(self.config))
        first = engine.submit(requests, sampling, decode=decode).start
        own = tokenizer.get_vocab() == self.tokenizer.get_vocab()
        what = "answers" if len(candidates) > 1 else f"answers of {candidates[0].name}"
        done = total - len(missing)
        for answer in engine.run():
            candidate, i, draw = missing[answer.index - first]
            text = stops.cut(str(tokenizer.decode(list(answer.tokens), skip_special_tokens=True)))
            finished = answer.finish_reason != "length"
            room = self._context - len(self.prompts.ids[i])
            ids = list(answer.tokens) if own else self._encode(i, text, finished)[:room]
            self._answers.add(candidate.name, i, draw, text=text, ids=ids, finished=finished)
            done += 1
            progress(what, done, total)

    def _answers_of(self, candidate: Candidate) -> list[list[CandidateAnswer]]:
        if not candidate.is_drawn:
            return self._written[candidate.name]
        draws = range(self.config.num_generations)
        rows = [[self._answers.rows[candidate.name, i, draw, 0] for draw in draws] for i in range(self.n_prompts)]
        return [[CandidateAnswer(row["text"], tuple(row["ids"]), row["finished"]) for row in some] for some in rows]

    # ---- answers that are written already ---------------------------------------------------------------------------

    def _written_answers(self, candidate: Candidate) -> list[list[CandidateAnswer]]:
        """Answers to each prompt, of the data or of a file. Raises ConfigError where a prompt has none."""
        if candidate.kind == "references":
            answers = [[] if text is None else [self._as_written(i, text)] for i, text in enumerate(self.references)]
            where = f"{candidate.name}: expected an answer (completion or chosen) for every row of dataset_name"
        else:
            tally = data.Tally(source=candidate.place, argument="models")
            rows = data.load_rows(candidate.place, tally, kinds=("prompt_completion",))
            by_prompt: dict[str, list[data.PromptCompletion]] = {}
            for row in sorted(rows, key=_index):
                assert isinstance(row, data.PromptCompletion)
                asked = row if isinstance(row.prompt, str) else with_options(row, self.config)
                by_prompt.setdefault(_key(asked.prompt), []).append(row)
            # `generate --out` writes the text of the chat template as the prompt
            answers = [
                [
                    self._as_written(i, text_of(written.completion), written.columns)
                    for written in by_prompt.get(_key(row.prompt)) or by_prompt.get(text, [])
                ]
                for i, (row, text) in enumerate(zip(self._rows, self.prompts.prompts, strict=True))
            ]
            where = f"models: expected an answer to every prompt in {candidate.place!r}"
        lacking = [row.place for row, some in zip(self.prompts.rows, answers, strict=True) if not some]
        if lacking:
            raise ConfigError(f"{where}, got none for {len(lacking)} of {len(answers)}, such as {lacking[0]}")
        return answers

    def _as_written(self, i: int, text: str, columns: Mapping[str, Any] = MappingProxyType({})) -> CandidateAnswer:
        """An answer to prompt i as drawn, as far as columns tell; ids that do not read as the text do not count."""
        reason, ids = columns.get("finish_reason"), columns.get("completion_ids")
        is_known = isinstance(ids, list) and all(type(x) is int and 0 <= x < self._vocabulary for x in ids)
        read = str(self.tokenizer.decode(ids, skip_special_tokens=True)) if ids and is_known else None
        is_same = read is not None and (read.startswith(text) if reason == "stop" else read == text)
        tokens: list[int] = ids if ids and is_same else self._encode(i, text, reason != "length")
        return CandidateAnswer(text, tuple(tokens[: self._context - len(self.prompts.ids[i])]), reason != "length")

    def _encode(self, i: int, text: str, finished: bool) -> list[int]:
        """Token ids of an answer to prompt i, with its end where it ended."""
        return _tokenized(self.prompts.rows[i], text, self.tokenizer).answers[0][: None if finished else -1]

    # ---- scores -----------------------------------------------------------------------------------------------------

    def _measure_kl(self, model: HydraModel, of: Outcome) -> None:
        """KL from the base over the whole vocabulary, in nats at temperature 1, summed over each answer's tokens."""
        flat = [(self.prompts.ids[i], answer.ids) for i, row in enumerate(of.answers) for answer in row if answer.ids]
        kl = iter(_sums(model, flat, LogprobPair(role=of.candidate.role, reference="reference"), "kl"))
        of.kl = [[next(kl) if answer.ids else 0.0 for answer in row] for row in of.answers]

    def _measure_surprise(self, model: HydraModel, of: Outcome, tokenizer: PreTrainedTokenizerBase) -> None:
        """−log p of the data's own answers in their context, in nats at temperature 1, cut where the context ends."""
        references = list(map(_reference, self._rows))
        if None in references:
            of.missing["perplexity"] = "the data have no answers of their own"
            return
        place = of.candidate.place if of.candidate.kind == "model" else self.config.model_name_or_path
        limit = read_context_length(place)
        encoded = []
        for row, cut, reference in zip(self.prompts.rows, self.prompts.ids, references, strict=True):
            whole = _tokenized(row, reference or "", tokenizer)
            prompt = cut if tokenizer is self.tokenizer and isinstance(row.prompt, str) else whole.prompt
            encoded.append((prompt, whole.answers[0][: limit - len(prompt)]))
        logprobs = _sums(model, encoded, Logprobs(role=of.candidate.role), "logprob")
        of.surprise, of.reference_tokens = [-value for value in logprobs], [len(ids) for _, ids in encoded]

    def _reward(self, of: Outcome, model: HydraModel | None) -> None:
        """Rewards of all answers of a candidate, by every source."""
        assert self.scorer is not None
        places = [i for i, row in enumerate(of.answers) for _ in row]
        flat = [answer for row in of.answers for answer in row]
        prompts = [self.prompts.ids[i] for i in places]
        learned = None
        if model is not None:
            batch = PackedBatch.from_lists(prompts, [answer.ids for answer in flat], device=model.device)
            rewards_N = model.score(batch, ("reward",)).rewards_N
            assert rewards_N is not None
            learned = rewards_N.float().cpu()
            if not learned.isfinite().all():
                place = int((~learned.isfinite()).int().argmax())
                raise NonFiniteError(f"reward of answer {place} is {float(learned[place])}")
        scored = self.scorer(
            self.prompts.written(places),
            [answer.text for answer in flat],
            [list(answer.ids) for answer in flat],
            self.prompts.columns(places),
            [True] * len(flat),  # scores of what did not end are as they are: the EOS rule is one of training
            learned,
        )
        of.rewards = of.by_prompt(scored.totals)
        of.sources = {name: of.by_prompt(values) for name, values in scored.sources.items()}

    # ---- verdicts ---------------------------------------------------------------------------------------------------

    def _judge_all(self, measured: Mapping[str, Outcome], progress: Progress) -> None:
        """Preferences of each candidate's answers over those of `against`, draw by draw."""
        against = measured[self.config.against]
        for of in measured.values():
            if of is against or self.config.judged_by is None:
                continue
            if self.judge is None:
                assert of.rewards is not None
                assert against.rewards is not None
                of.preferences = [
                    [by_reward(*pair) for pair in pairs(mine, theirs)]
                    for mine, theirs in zip(of.rewards, against.rewards, strict=True)
                ]
            else:
                of.preferences = self._judged(of, against, progress)

    def _judged(self, of: Outcome, against: Outcome, progress: Progress) -> list[list[float | None]]:
        assert self.judge is not None
        name = of.candidate.name
        answers = [pairs(mine, theirs) for mine, theirs in zip(of.answers, against.answers, strict=True)]
        keys = [(name, i, draw, order) for i, row in enumerate(answers) for draw in range(len(row)) for order in (0, 1)]
        missing = [key for key in keys if key not in self._verdicts.rows]
        asked = []
        for _, i, draw, order in missing:
            first, second = (answer.text for answer in answers[i][draw][:: 1 if order == 0 else -1])
            asked.append(Pair(self.prompts.prompts[i], first, second))
        allowed = self.config.max_bad_verdicts * len(keys)
        bad = sum(self._verdicts.rows[key]["preference"] is None for key in keys if key in self._verdicts.rows)
        done = len(keys) - len(missing)
        for place, verdict in self.judge.verdicts(asked):
            _, i, draw, order = missing[place]
            preference = verdict.preference
            if order == 1 and preference is not None:
                preference = 1.0 - preference
            self._verdicts.add(name, i, draw, order, preference=preference, reply=verdict.reply)
            bad += preference is None
            done += 1
            progress(f"verdicts on {name}", done, len(keys))
            if bad > allowed:
                raise EngineError(
                    f"judge: expected A, B or TIE in the last line of a reply (max_bad_verdicts "
                    f"{self.config.max_bad_verdicts:g}), got {bad} verdicts without it, such as {verdict.reply!r}; "
                    f"{done} of {len(keys)} verdicts are kept, --resume with a larger max_bad_verdicts goes on"
                )
        return [[self._mean_of_both_orders(name, i, draw) for draw in range(len(row))] for i, row in enumerate(answers)]

    def _mean_of_both_orders(self, name: str, i: int, draw: int) -> float | None:
        first, second = (self._verdicts.rows[name, i, draw, order]["preference"] for order in (0, 1))
        return None if first is None or second is None else (first + second) / 2


def pairs(mine: Sequence[T], theirs: Sequence[T]) -> list[tuple[T, T]]:
    """Pairs of two models' answers to a prompt; the shorter list is repeated."""
    return [(mine[k % len(mine)], theirs[k % len(theirs)]) for k in range(max(len(mine), len(theirs)))]


def _reference(row: data.Row) -> Text | None:
    """The answer that the data have: a completion, the chosen one, or one that was liked."""
    if isinstance(row, data.PromptCompletion) or (isinstance(row, data.UnpairedPreference) and row.label):
        return row.completion
    return row.chosen if isinstance(row, data.Preference) else None


def _tokenized(row: data.Row, answer: Text, tokenizer: PreTrainedTokenizerBase) -> data.Tokenized:
    """Token ids of a row and of an answer to it, in text or in messages, with its end."""
    if isinstance(answer, str) and not isinstance(row.prompt, str):
        answer = ({"role": "assistant", "content": answer},)
    try:
        return data.tokenize_row(recast(row, data.PromptCompletion, completion=answer), tokenizer)
    except data.RowError as error:
        raise ConfigError(f"dataset_name: {row.place}: {error}") from error


@torch.no_grad()
def _sums(
    model: HydraModel, rows: Sequence[tuple[Sequence[int], Sequence[int]]], output: Output, name: str
) -> list[float]:
    """One result of an output, summed over the tokens of each answer. rows: token ids of prompt and answer."""
    batch = PackedBatch.from_lists([prompt for prompt, _ in rows], [ids for _, ids in rows], device=model.device)
    return [
        float(part_M.sum(dtype=torch.float64))
        for part in model.parts(batch)
        for part_M in getattr(model(part, (output,))[0], name).split(list(part.completion_lens))
    ]


def _index(row: data.Row) -> int:
    """Place among the answers of `generate --out`, whose lines come as answers end: the short ones first."""
    place = row.columns.get("index")
    return place if isinstance(place, int) else 0


def _key(prompt: Text) -> str:
    return prompt if isinstance(prompt, str) else json.dumps([dict(m) for m in prompt], sort_keys=True)
