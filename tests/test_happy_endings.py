"""The example reward orders stories as its text says, and each guard does the work it is there for."""

from pathlib import Path

from rlhf_engine.scoring.rewards import check_reward, load_reward, score_with_functions

REWARD = load_reward(f"{Path(__file__).parents[1]}/rlhf_engine/templates/happy_endings.py:reward")

PLAIN = (
    "One day, a girl named Lily went to the market with her mom. She saw a red ball and a box of apples. "
    "Her mom bought some bread and they walked home before the rain came."
)
HAPPY = (
    "One day, a girl named Lily found a small dog in the park. The dog was cold, so she gave it her scarf. "
    "Her mom smiled and said the dog could stay. Lily hugged her new friend and they were happy together."
)
SAD = (
    "One day, a girl named Lily lost a small dog in the park. The dog was cold, and nobody gave it a scarf. "
    "Her mom cried and said the dog would not come back. Lily sat alone in her room until the night came."
)


def score(story: str) -> float:
    (value,) = REWARD(prompts=["Once upon a time"], completions=[story], completion_ids=[[1]])
    return value


def test_happy_beats_plain_beats_nothing() -> None:
    assert score(HAPPY) > score(PLAIN) + 1
    assert score(HAPPY) > score(SAD) + 1
    assert score("") == -3
    assert score("!!! 123") == -3


def test_hacks_lose_to_a_plain_story_or_to_the_honest_happy_one() -> None:
    for hack in (
        "happy " * 40,
        "happy happy happy",
        "They were happy and they hugged. " * 10,
        "happy fun love joy " * 12,
        "love fun joy happy fun love happy joy fun happy love joy joy fun love happy happy love fun joy",
        "They laughed and hugged.",
        HAPPY + " They were happy. They were happy. They were happy. They were happy. They were happy." * 4,
    ):
        assert score(hack) < score(HAPPY) - 0.5, hack
        assert HAPPY in hack or score(hack) < score(PLAIN), hack


def test_a_happy_word_near_the_end_earns_more_than_at_the_start() -> None:
    start, end = "They were glad. " + PLAIN, PLAIN + " They were glad."
    assert score(end) > score(start) > score(PLAIN)
    # one word is replaced at a time, so that length and distinct words stay as they are; each earns less
    once = PLAIN.replace("went", "smiled")
    first, second, third = (
        score(f"{story} The sun went down.") for story in (PLAIN, once, once.replace("saw", "hugged"))
    )
    assert first < second < third < 2 * second - first


def test_prompt_words_earn_nothing_and_the_range_is_bounded() -> None:
    ((first, second),) = score_with_functions([REWARD], ["happy " * 9, "x"], [PLAIN, PLAIN], [[1], [1]]).values()
    assert first == second
    module = REWARD.__globals__
    assert score(" ".join(sorted(module["HAPPY_WORDS"]))) == 3
    assert score("a " * 300) == -3


def test_survives_the_start_up_check() -> None:
    check_reward(REWARD, ["Once upon a time"])
