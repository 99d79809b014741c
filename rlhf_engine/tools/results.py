"""Results of an evaluation: figures with intervals by prompt, as JSON, as a table, and as a page.

The page is one HTML file that needs nothing but a browser. It has the table, answers side by side, and answers to be
rated without names. It holds neither paths nor addresses. Ratings stay in the browser until they are saved as a JSONL
file with prompt, completion and label, which `rlhf-engine reward` reads.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.markup import escape
from rich.table import Table

from rlhf_engine.io import json_digest
from rlhf_engine.runs.metrics import write_atomic
from rlhf_engine.runs.page import COLOURS, render
from rlhf_engine.runs.statistics import best_of_n_curve, mean_by_prompt, ratio_by_prompt
from rlhf_engine.runs.text import show_controls, summary_table
from rlhf_engine.scoring.rewards import mean_or_none
from rlhf_engine.tools.evaluate import Evaluation, Outcome

ROUGE = ("rouge1", "rouge2", "rougeL")
"""Overlaps with reference answers: of words, of pairs of words, of the longest common subsequence."""
MOST_PROMPTS = 400  # prompts on the page; of more, every so many-th
_LINES = (
    ("win_rate", "win rate", ".1%"), ("kl", "KL from the base, nats", ".3f"), ("kl_per_token", "… per token", ".4f"),
    ("perplexity", "perplexity of references", ".2f"), ("tokens", "tokens per answer", ".1f"),
    ("characters", "characters per answer", ".1f"), ("finished", "ended by themselves", ".1%"),
    *((name, name.replace("rouge", "ROUGE-"), ".3f") for name in ROUGE),
)  # fmt: skip
"""Lines of the table below those of rewards: key of the figure, label, form of numbers."""


def summarise(evaluation: Evaluation, measured: Mapping[str, Outcome]) -> dict[str, Any]:
    """Figures of an evaluation as plain values for JSON; one with an interval is [value, low, high]."""
    config = evaluation.config
    against = measured[config.against]
    return {
        "prompts": evaluation.n_prompts,
        "answers_per_prompt": config.num_generations,
        "against": config.against,
        "judge": config.judged_by,
        "interval": "95 %, percentile bootstrap over prompts",
        "models": {name: _figures(evaluation, of, against) for name, of in measured.items()},
    }


def _figures(evaluation: Evaluation, of: Outcome, against: Outcome) -> dict[str, Any]:
    seed = evaluation.config.seed
    answers = [answer for row in of.answers for answer in row]
    missing = dict(of.missing)
    figures: dict[str, Any] = {
        "kind": of.candidate.kind,
        "answers": len(answers),
        "tokens": _mean([[float(len(a.ids)) for a in row] for row in of.answers], seed),
        "characters": _mean([[float(len(a.text)) for a in row] for row in of.answers], seed),
        "finished": _mean([[float(a.finished) for a in row] for row in of.answers], seed),
    }
    if of.rewards is not None:
        figures["reward"] = _mean(of.rewards, seed)
        if of is not against and against.rewards is not None:
            means = [(mean_or_none(a), mean_or_none(b)) for a, b in zip(of.rewards, against.rewards, strict=True)]
            gaps = [[mine - theirs] for mine, theirs in means if mine is not None and theirs is not None]
            figures["reward_difference"] = _mean(gaps, seed)
        figures["sources"] = {name: _mean(values, seed) for name, values in of.sources.items()}
        complete = [[r for r in row if r is not None] for row in of.rewards]
        sizes = {len(row) for row in of.rewards} | {len(row) for row in complete}
        if len(sizes) == 1 and max(sizes) > 1:
            figures["best_of_n"] = best_of_n_curve(complete, seed=seed)
    else:
        missing["reward"] = "no reward model and no reward_funcs"
    if of.kl is not None:
        figures["kl"] = _mean([list(row) for row in of.kl], seed)
        lengths = [max(1, sum(len(a.ids) for a in row)) for row in of.answers]
        figures["kl_per_token"] = list(ratio_by_prompt([sum(row) for row in of.kl], lengths, seed=seed))
    if of.surprise is not None:
        nats = ratio_by_prompt(of.surprise, of.reference_tokens, seed=seed)
        figures["perplexity"] = [math.exp(value) for value in nats]
    _add_rouge(evaluation, of, figures, missing)
    if of.preferences is not None:
        figures |= _win_rates(of, seed)
    elif of is not against:
        missing["win_rate"] = "no judge"
    return {**figures, "missing": missing}


def _add_rouge(evaluation: Evaluation, of: Outcome, figures: dict[str, Any], missing: dict[str, str]) -> None:
    if any(text is None for text in evaluation.references):
        missing["rouge"] = "the data have no answers of their own"
    elif of.candidate.kind == "references":
        missing["rouge"] = "these are the references"
    elif importlib.util.find_spec("rouge_score") is None:
        missing["rouge"] = "pip install 'rlhf-engine[evaluate]' has it"
    else:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(list(ROUGE), use_stemmer=True)
        scores = [
            [scorer.score(reference or "", answer.text) for answer in row]
            for row, reference in zip(of.answers, evaluation.references, strict=True)
        ]
        for name in ROUGE:  # F-measures
            figures[name] = _mean(
                [[float(each[name].fmeasure) for each in row] for row in scores], evaluation.config.seed
            )


def _win_rates(of: Outcome, seed: int) -> dict[str, Any]:
    """Win rate, and shares of wins, ties and losses. Draws without a verdict are left out and counted."""
    assert of.preferences is not None
    preferences = [preference for row in of.preferences for preference in row]
    judged = [preference for preference in preferences if preference is not None]
    unjudged = len(preferences) - len(judged)
    if not judged:
        return {"win_rate": None, "unjudged": unjudged}
    return {
        "win_rate": _mean(of.preferences, seed),
        "won": fmean(p > 0.5 for p in judged),
        "tied": fmean(p == 0.5 for p in judged),
        "lost": fmean(p < 0.5 for p in judged),
        "unjudged": unjudged,
    }


def _mean(rows: Sequence[Sequence[float | None]], seed: int) -> list[float] | None:
    """[mean over prompts of the mean over draws, low, high]; None where nothing is there."""
    means = [fmean(present) for row in rows if (present := [v for v in row if v is not None])]
    return list(mean_by_prompt(means, seed=seed)) if means else None


def table(results: Mapping[str, Any]) -> Table:
    """Draw the figures of all models, a column for each."""
    title = f"{results['prompts']} prompts; win rates against {results['against']}, judged by {results['judge']}"
    shown = {
        escape(label): [escape("\n".join(filter(None, figure))) for figure in figures]
        for label, figures in lines(results)
    }
    caption = escape("[low, high]: 95 % by prompt. –: see missing in results.json")
    return summary_table(title, list(map(escape, results["models"])), shown, caption)


def lines(results: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Lines of the table that some model has a figure for: label, and each model's figure and its interval as texts."""
    models = [
        {**figures, **{f"reward: {name}": one for name, one in figures.get("sources", {}).items()}}
        for figures in results["models"].values()
    ]
    names = list(dict.fromkeys(name for figures in models for name in figures if name.startswith("reward: ")))
    sources = [(name, name, ".3f") for name in names] if len(names) > 1 else []
    difference = ("reward_difference", f"reward above that of {results['against']}", "+.3f")
    return [
        (label, [_as_text(figures.get(key), form) for figures in models])
        for key, label, form in (("reward", "reward", ".3f"), difference, *sources, *_LINES)
        if any(figures.get(key) is not None for figures in models)
    ]


def _as_text(figure: list[float] | None, form: str) -> tuple[str, str]:
    if figure is None:
        return "–", ""
    value, low, high = figure
    return f"{value:{form}}", f"[{low:{form}}, {high:{form}}]"


def write_page(evaluation: Evaluation, measured: Mapping[str, Outcome], results: Mapping[str, Any], out: Path) -> Path:
    """Write the page with the figures that `summarise` returned, at once and whole; its path."""
    judge = results["judge"] or "nobody"  # without its address or path
    judge = "a server" if judge.startswith(("http://", "https://")) else judge.rpartition("/")[2]
    text = render(
        "tools/page.html.jinja", ["runs/page_chart.js", "tools/page.js"], ["runs/page.css", "tools/page.css"],
        written=round(time.time()), refresh=None, title=show_controls(f"Evaluation of {', '.join(measured)}"),
        results=results, judge=judge, table=lines(results), data=_data(evaluation, measured, results),
    )  # fmt: skip
    write_atomic(out, text.encode())
    return out


def _data(evaluation: Evaluation, measured: Mapping[str, Outcome], results: Mapping[str, Any]) -> dict[str, Any]:
    every = -(-evaluation.n_prompts // MOST_PROMPTS)
    shown = range(0, evaluation.n_prompts, every)
    rows, texts = evaluation.prompts.rows, evaluation.prompts.prompts
    models = []
    for name, of in measured.items():
        curve = results["models"][name].get("best_of_n")
        models.append(
            {
                "name": name,
                "answers": [[_answer(of, i, draw) for draw in range(len(of.answers[i]))] for i in shown],
                "best": curve and {"kl": [b["kl"] for b in curve], "reward": [b["reward"][0] for b in curve]},
            }
        )
    prompts = [
        {
            "text": texts[i],
            # ratings are read as the data were: a string, or messages
            "source": row.prompt if isinstance(row.prompt, str) else [dict(message) for message in row.prompt],
        }
        for i, row in ((i, rows[i]) for i in shown)
    ]
    return {
        "colours": COLOURS, "runs": models, "prompts": prompts, "every": every, "against": results["against"],
        "key": json_digest([prompts, models], 16),
    }  # fmt: skip


def _answer(of: Outcome, i: int, draw: int) -> dict[str, Any]:
    its_pairs = [] if of.preferences is None else of.preferences[i][draw :: len(of.answers[i])]
    return {
        "text": of.answers[i][draw].text,
        "reward": None if of.rewards is None else of.rewards[i][draw],
        "preference": mean_or_none(its_pairs),
    }
