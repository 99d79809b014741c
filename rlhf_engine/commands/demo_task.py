"""A small synthetic task whose true preference is known: a hotel's agent answers a guest's complaint.

    prompt      "guest : excuse me , the shower is cold again . agent :"
    completion  "hello . i am so sorry about the shower . we will heat the shower now . goodbye ."

    s(x, y) = Σ parts(x, y)          true score, about -6 … 4; `score_parts` lists the parts
    P(y_a ≻ y_b) = σ(3 (s_a − s_b))  preference pairs are drawn with Bradley-Terry noise from the true score

x: prompt, y: completion. A text is split at its full stops and every sentence is looked up in the grammar
below, so that polite words alone earn nothing: a sentence outside the grammar costs, and so does one that is
said twice. SFT data are the preferred answers of pairs of mixed quality, which leaves much room above their mean.

Training and held-out prompts share every topic, problem and wording, but no (topic, problem) combination.
All randomness comes from the seed; the same calls give the same data on every machine. Source: our own.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from itertools import product

from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

FIXES = {  # problem → verbs that solve it
    "cold": ("heat", "warm"), "dirty": ("clean", "wash"), "broken": ("repair", "fix"),
    "missing": ("bring", "deliver"), "noisy": ("silence", "quieten"),
}  # fmt: skip
PROBLEMS = {  # topic → problems it can have
    "room": ("cold", "dirty", "noisy", "broken"), "shower": ("cold", "dirty", "broken", "noisy"),
    "bed": ("cold", "dirty", "broken", "missing"), "towel": ("cold", "dirty", "missing"),
    "window": ("cold", "dirty", "broken", "noisy"), "fridge": ("dirty", "broken", "noisy", "missing"),
    "lamp": ("dirty", "broken", "missing", "noisy"), "coffee": ("cold", "missing", "dirty"),
}  # fmt: skip
OPENERS = ("", "hello ,", "excuse me ,", "good evening ,", "sorry to bother you ,", "pardon me ,")
TAILS = (
    "", "again", "since last night", "and we are tired", "and nobody came", "after midnight", "and my children cry",
)  # fmt: skip

GREETINGS = ("hello", "good evening", "dear guest", "welcome back")
APOLOGIES = ("i am so sorry about the {topic}", "we apologise for the {topic}", "i am sorry the {topic} is {problem}")
PLAIN_APOLOGIES = ("i am so sorry", "please forgive us")
FIX_FORMS = ("we will {verb} the {topic} {when}", "someone will {verb} the {topic} {when}")
WHEN = ("now", "tonight", "at once", "right away", "within the hour")
VAGUE = ("please wait", "we will see", "someone may look at it later")
FILLER = (
    "the weather is nice today", "the garden opens at nine", "we have many guests", "the live music starts at eight",
    "our chef won a prize", "please enjoy our new bar below", "this house was built by my uncle",
)  # fmt: skip
RUDE = ("that is not my problem", "stop complaining", "deal with it", "you ask too much", "go away", "others never ask")
CLOSINGS = (
    "goodbye", "thank you for telling us", "thank you for your patience", "have a pleasant stay", "sleep well",
    "we wish you a restful holiday",
)  # fmt: skip

SHARPNESS = 3.0  # of preferences: a score ahead by 1 wins 95 times of 100
EDITED = 0.5  # share of pairs in which one answer is the other with one edit: they teach what exactly counts
MAX_WORDS = 28  # words beyond this cost; the best answers have 18 to 26
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")

_SIMPLE = {
    **dict.fromkeys(GREETINGS, "greeting"), **dict.fromkeys(PLAIN_APOLOGIES, "apology"),
    **dict.fromkeys(VAGUE, "vague"), **dict.fromkeys(FILLER, "filler"), **dict.fromkeys(RUDE, "rude"),
    **dict.fromkeys(CLOSINGS, "closing"),
}  # fmt: skip


def _pattern(forms: Sequence[str]) -> re.Pattern[str]:
    slots = {
        "topic": "|".join(PROBLEMS),
        "problem": "|".join(FIXES),
        "verb": "|".join(v for verbs in FIXES.values() for v in verbs),
        "when": "|".join(WHEN),
    }
    # one alternative per form; names of groups must be unique, so they end in the form's number
    parts = [
        re.sub(r"\{(\w+)\}", lambda slot, i=i: f"(?P<{slot[1]}{i}>{slots[slot[1]]})", form)  # type: ignore[misc]
        for i, form in enumerate(forms)
    ]
    return re.compile("|".join(parts))


_APOLOGY, _FIX = _pattern(APOLOGIES), _pattern(FIX_FORMS)
_COMPLAINT = re.compile(rf"the ({'|'.join(PROBLEMS)}) is ({'|'.join(FIXES)})\b")


def complaint(prompt: str) -> tuple[str, str]:
    """(topic, problem) of a prompt."""
    match = _COMPLAINT.search(prompt)
    if match is None:
        raise ValueError(f"prompt: expected a complaint such as 'the shower is cold', got {prompt!r}")
    return match[1], match[2]


def _parse(sentence: str) -> tuple[str, dict[str, str]]:
    """Kind of a sentence (`unknown` if the grammar does not make it) and what fills its slots."""
    if sentence in _SIMPLE:
        return _SIMPLE[sentence], {}
    for kind, pattern in (("apology", _APOLOGY), ("fix", _FIX)):
        match = pattern.fullmatch(sentence)
        if match is not None:
            return kind, {name.rstrip("0123456789"): v for name, v in match.groupdict().items() if v is not None}
    return "unknown", {}


def score_parts(prompt: str, completion: str) -> dict[str, float]:
    """The parts of the true score by name; their sum is `true_score`."""
    topic, problem = complaint(prompt)
    words = completion.split()
    spans = [" ".join(span.split()) for span in " ".join(words).split(".")]
    finished = not spans[-1]
    sentences = [span for span in spans if span]
    if not sentences:
        return {"empty": -4.0}
    parsed = [_parse(s) for s in sentences]
    kinds = [kind for kind, _ in parsed]
    topics = [slots["topic"] for _, slots in parsed if "topic" in slots]
    fixes = [slots["verb"] in FIXES[problem] for _, slots in parsed if slots.get("topic") == topic and "verb" in slots]
    wrong_problem = sum(slots.get("problem", problem) != problem for _, slots in parsed)
    stops = len(spans) - 1 - len(sentences) + (not finished)  # full stops that end nothing
    # several sentences of one kind earn nothing more; saying the very same one again costs most
    repeats = len(sentences) - len(set(sentences))
    doubles = sum(max(0, kinds.count(kind) - 1) for kind in ("greeting", "apology", "fix", "vague", "closing"))
    parts = {
        "greeting": 0.25 * (kinds[:1] == ["greeting"]),
        "apology": 0.5 * ("apology" in kinds),
        "topic": 1.0 * (topic in topics) - 0.75 * sum(t != topic for t in topics) - 0.25 * wrong_problem,
        "fix": 1.5 if any(fixes) else 0.5 if fixes else 0.1 * ("vague" in kinds),
        "closing": 0.5 * (kinds[-1:] == ["closing"]),
        "finished": 0.25 if finished else -0.75,
        "rude": -1.5 * kinds.count("rude"),
        "filler": -0.4 * kinds.count("filler"),
        "unknown": -0.75 * kinds.count("unknown"),
        "repetition": -1.0 * repeats - 0.25 * max(0, doubles - repeats) - 0.25 * stops,
        "length": -0.15 * max(0, len(words) - MAX_WORDS),
    }
    return {name: value for name, value in parts.items() if value}


def true_score(prompt: str, completion: str) -> float:
    """s(x, y): at most 4, bounded below at -8 so that one endless answer does not rule a mean."""
    return max(-8.0, math.fsum(score_parts(prompt, completion).values()))


def prefer(prompt: str, a: str, b: str) -> float:
    """1 if answer `a` has the higher true score, 0 if `b` has, 0.5 for a tie."""
    difference = true_score(prompt, a) - true_score(prompt, b)
    return 0.5 if abs(difference) < 1e-9 else float(difference > 0)


class DemoTask:
    """The task's data for one seed. Each method has its own stream: the order of calls changes nothing."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        rng = self._rng("split")
        while True:
            heldout = {(topic, rng.choice(problems)) for topic, problems in PROBLEMS.items()}
            pairs = [(topic, problem) for topic, problems in PROBLEMS.items() for problem in problems]
            train = [pair for pair in pairs if pair not in heldout]
            # every problem must stay learnable: at least three topics show it in training
            if all(sum(problem == p for _, p in train) >= 3 for problem in FIXES):
                break
        self.train_complaints = train
        self.heldout_complaints = [pair for pair in pairs if pair in heldout]

    def sft_pairs(self, n: int) -> list[dict[str, str]]:
        """n rows of prompt, chosen, rejected: answers of mixed quality, ordered by a noisy preference."""
        rng = self._rng("pairs")
        rows = []
        for prompt in self.train_prompts(n):
            a = b = _reply(prompt, rng)
            while b == a:
                b = _edited(a, rng) if rng.random() < EDITED else _reply(prompt, rng)
            p = 1 / (1 + math.exp(SHARPNESS * (true_score(prompt, b) - true_score(prompt, a))))
            chosen, rejected = (a, b) if rng.random() < p else (b, a)
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        return rows

    def thumbs(self, n: int) -> list[dict[str, str | bool]]:
        """n rows of prompt, completion, label: answers of mixed quality that were liked or not.

        Every eighth row has lost its prompt, as data of real chats have it.

            P(liked) = σ(3 (s(x, y) − 1))
        """
        rng = self._rng("thumbs")
        rows: list[dict[str, str | bool]] = []
        for i, prompt in enumerate(self.train_prompts(n)):
            answer = _reply(prompt, rng)
            liked = rng.random() < 1 / (1 + math.exp(SHARPNESS * (1 - true_score(prompt, answer))))
            rows.append({"prompt": prompt if (i + 1) % 8 else "", "completion": answer, "label": liked})
        return rows

    def train_prompts(self, n: int) -> list[str]:
        """n prompts; all of the training prompts come once before any comes again."""
        rng, pool = self._rng("train"), _prompts(self.train_complaints)
        prompts: list[str] = []
        while len(prompts) < n:
            prompts += rng.sample(pool, min(len(pool), n - len(prompts)))
        return prompts

    def heldout_prompts(self, n: int) -> list[str]:
        """n different prompts whose (topic, problem) no training prompt has."""
        pool = _prompts(self.heldout_complaints)
        if n > len(pool):
            raise ValueError(f"n: expected at most {len(pool)} held-out prompts, got {n}")
        return self._rng("heldout").sample(pool, n)

    def _rng(self, stream: str) -> random.Random:
        return random.Random(f"{self.seed}/{stream}")


def _prompts(complaints: Iterable[tuple[str, str]]) -> list[str]:
    return [
        " ".join(f"guest : {opener} the {topic} is {problem} {tail} . agent :".split())
        for (topic, problem), opener, tail in product(complaints, OPENERS, TAILS)
    ]


def _reply(prompt: str, rng: random.Random) -> str:
    """An answer of random quality q: from rude and beside the point to polite and exactly right."""
    topic, problem = complaint(prompt)
    q = rng.random() ** 3  # many more poor answers than good ones

    def chance(worst: float, best: float) -> bool:
        return rng.random() < worst + (best - worst) * q

    def fill(forms: Sequence[str]) -> str:
        named = topic if chance(0.75, 0.98) else rng.choice(list(PROBLEMS))
        verb = rng.choice(FIXES[problem if chance(0.6, 0.95) else rng.choice(list(FIXES))])
        return rng.choice(forms).format(topic=named, problem=problem, verb=verb, when=rng.choice(WHEN))

    middle = []
    if chance(0.3, 0.85):
        middle.append(rng.choice(PLAIN_APOLOGIES) if chance(0.4, 0.15) else fill(APOLOGIES))
    if chance(0.45, 0.9):
        middle.append(fill(FIX_FORMS))
    elif chance(0.5, 0.5):
        middle.append(rng.choice(VAGUE))
    if chance(0.6, 0.1):
        middle.append(rng.choice(FILLER))
    if chance(0.5, 0.02):
        middle.append(rng.choice(RUDE))
    if chance(0.3, 0.0):
        rng.shuffle(middle)
    if middle and chance(0.15, 0.0):
        middle.append(rng.choice(middle))
    sentences = [rng.choice(GREETINGS)] * chance(0.3, 0.7) + middle + [rng.choice(CLOSINGS)] * chance(0.2, 0.7)
    return " . ".join(sentences or [rng.choice(VAGUE)]) + " ." * (not chance(0.08, 0.0))


def _edited(reply: str, rng: random.Random) -> str:
    """The reply with one edit: another topic or verb, a sentence said twice, dropped, added or spliced, no end."""
    sentences = [s.strip() for s in reply.split(" .") if s.strip()]
    place = rng.randrange(len(sentences))
    edit = rng.choice(("topic", "verb", "double", "drop", "add", "cut", "splice"))
    if edit in ("topic", "verb"):
        words = tuple(PROBLEMS) if edit == "topic" else tuple(v for verbs in FIXES.values() for v in verbs)
        spots = [(i, word) for i, s in enumerate(sentences) for word in s.split() if word in words]
        if spots:
            place, old = rng.choice(spots)
            sentences[place] = " ".join(rng.choice(words) if w == old else w for w in sentences[place].split())
    elif edit == "double":
        sentences.insert(rng.randrange(len(sentences) + 1), sentences[place])
    elif edit == "drop" and len(sentences) > 1:
        del sentences[place]
    elif edit == "add":
        sentences.insert(place, rng.choice(FILLER + RUDE + VAGUE + CLOSINGS))
    elif edit == "splice":  # how a small model errs: a sentence that goes on as another
        head, tail = sentences[place].split(), rng.choice([*sentences, *_SIMPLE]).split()
        sentences[place] = " ".join(head[: rng.randint(1, len(head))] + tail[rng.randrange(len(tail)) :])
    return " . ".join(sentences) + " ." * (edit != "cut")


def vocabulary_texts() -> list[str]:
    """Texts that together hold every word of the task, for `build_tokenizer`."""
    forms = [form.format(topic="", problem="", verb="", when="") for form in (*APOLOGIES, *FIX_FORMS)]
    words = (*PROBLEMS, *FIXES, *(v for verbs in FIXES.values() for v in verbs), *WHEN)
    return [*_prompts([("room", "cold")]), *_SIMPLE, *forms, *words]


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of the words in `texts`, most frequent first; <bos> comes before each text."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(special_tokens=list(SPECIAL_TOKENS), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
